"""A rank that is killed, or hangs: an error that says so on all others, in time."""

import signal

import pytest
from support.rank_cases import a_call
from support.ranks import Processes

TIMEOUT = 5.0


@pytest.fixture(scope="module")
def pairs():
    """Three groups that have nothing to do with each other, so that what befalls one leaves the others as they are."""
    started = Processes(5, TIMEOUT, groups=((0, 1, 2), (3, 4)))
    yield started
    started.close()


@pytest.mark.parametrize(
    ("members", "moment", "how"),
    [((0, 1, 2), "backward", signal.SIGKILL), ((3, 4), "forward", signal.SIGSTOP)],
    ids=["killed", "stopped"],
)
def test_the_others_are_told(pairs, members, moment, how):
    pairs.send(a_call, moment, 1, int(how), members=members)
    for member in (members[0], *members[2:]):
        kind, message, seconds = pairs.receive(member)
        assert kind == "LostRankError"
        assert f"of {len(members)} waited for the others" in message
        assert "one of them ended, or did not come within the group's timeout" in message
        assert seconds < 120  # where torch's own timeout is half an hour
