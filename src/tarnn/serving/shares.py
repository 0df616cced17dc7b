"""Who of several clients gets a row next, and who makes way: none has two rows more than another one who waits.

And whose slow readers are waited for no longer.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from tarnn.serving.answer import Answer
from tarnn.serving.stream import Mail


def client_of(answer: Answer) -> str:
    client: str = answer.mail.request.client
    return client


def is_behind(client: str, writing: Iterable[Answer]) -> bool:
    """Whether another client has at least two rows more."""
    rows = Counter(map(client_of, writing))
    return rows[client] + 1 < max(rows.values(), default=0)


def next_of(waiting: Sequence[Answer], writing: Iterable[Answer]) -> int:
    """Which of those that wait gets a row: the first one whose client has the fewest."""
    rows = Counter(map(client_of, writing))
    return min(range(len(waiting)), key=lambda i: rows[client_of(waiting[i])])


def makes_way(waiting: Iterable[Answer], writing: Sequence[Answer]) -> int | None:
    """The row that is taken from the client who has the most, if one who waits is behind."""
    if not any(is_behind(client, writing) for client in set(map(client_of, waiting))):
        return None
    rows = Counter(map(client_of, writing))
    return max(range(len(writing)), key=lambda row: (rows[client_of(writing[row])], row))


def given_up(parked: Mapping[Mail, Sequence[Answer]], most: int) -> list[Mail]:
    """Requests that are parked and end, so that the states of the others take so many bytes at most: each time the oldest of the
    client who has the most. One alone may take more."""
    sizes = {mail: bytes_of(answers) for mail, answers in parked.items()}
    ended = []
    while len(sizes) > 1 and sum(sizes.values()) > most:
        shares: Counter[str] = Counter()
        for mail, size in sizes.items():
            shares[mail.request.client] += size
        [(client, _)] = shares.most_common(1)
        ended.append(next(x for x in sizes if x.request.client == client))
        del sizes[ended[-1]]
    return ended


def bytes_of(answers: Sequence[Answer]) -> int:
    """Of the states at which they stand; choices of a request may share one."""
    return sum({id(x.at): x.at.nbytes for x in answers if x.at is not None}.values())
