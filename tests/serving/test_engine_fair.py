"""Clients share the machine fairly: what is read, and the rows."""

from collections import Counter
from types import SimpleNamespace

import pytest
import torch
from support.served import NO_ENDS, alone, answer, prompt

from tarnn.serving.engine import Engine
from tarnn.serving.fairness import FairQueue, has_fewer_rows, next_choice, row_to_preempt
from tarnn.serving.request import Request, Sampling


class Prompt:
    """The parts of a `Prefill` that the queue looks at."""

    begun = True

    def __init__(self, client, left):
        self.request, self.left = SimpleNamespace(client=client), left
        self.queue = SimpleNamespace(request=self.request)


def read_all(queue, piece, turns=10**6, may=lambda client: True):
    """Tokens of each client that were read, in order."""
    read = []
    while queue and len(read) < turns:
        reading = queue.first(may)
        if reading is None:
            break
        size = min(piece, reading.left)
        reading.left -= size
        queue.advance(reading, size)
        read.append((reading, size))
    return read


def test_each_client_has_equally_many_tokens_read():
    queue = FairQueue(100)
    for client, sizes in {"many": [1000] * 20, "short": [7] * 500, "long": [50_000]}.items():
        for size in sizes:
            queue.add(Prompt(client, size))
    tokens = Counter()
    for reading, size in read_all(queue, 64, turns=300):
        tokens[reading.request.client] += size
    assert max(tokens.values()) - min(tokens.values()) <= 2 * 100 + 64


def test_a_short_prompt_does_not_wait_for_a_long_one_of_its_client():
    queue = FairQueue(256)
    short, long = Prompt("a", 10), Prompt("a", 100_000)
    queue.add(long)
    queue.add(short)
    assert [x[0] for x in read_all(queue, 256, turns=3)] == [long, short, long]


def test_who_may_not_have_more_read_holds_nobody_up():
    queue = FairQueue(256)
    first, second = Prompt("a", 1000), Prompt("b", 300)
    queue.add(first)
    queue.add(second)
    assert [x[0] for x in read_all(queue, 256, may=lambda client: client == "b")] == [second, second]
    assert queue.first(lambda client: False) is None
    assert queue.remove(first.queue) is first
    assert not queue


def of(*clients):
    return [SimpleNamespace(queue=SimpleNamespace(request=SimpleNamespace(client=x))) for x in clients]


@pytest.mark.parametrize(
    ("waiting", "writing", "row"),
    [
        ("b", "aaa", 2),
        ("b", "aab", None),
        ("b", "abab", None),
        ("a", "aaa", None),
        ("ab", "caaa", 3),
        ("", "aaa", None),
    ],
)
def test_who_makes_way(waiting, writing, row):
    assert row_to_preempt(of(*waiting), of(*writing)) == row


def test_who_comes_next():
    assert next_choice(of("a", "a", "c", "b"), of("a", "b")) == 2
    assert not has_fewer_rows("a", of("a", "b", "b"))
    assert has_fewer_rows("c", of("b", "b"))


def test_a_client_with_many_long_texts_makes_way(served):
    """By hand, so that it is seen how soon: the answers are as ever."""
    one = Engine(served(), max_rows=4)
    long = [Request(prompt(9, i), 300, Sampling(seed=i), end_ids=NO_ENDS, client="greedy") for i in range(8)]
    streams = [one.submit(request) for request in long]

    def rounds(number):
        with torch.no_grad():
            for _ in range(number):
                one.step()

    rounds(20)
    assert one.stats.running == 4
    quick = Request(prompt(9, 99), 10, Sampling(seed=99), end_ids=NO_ENDS, client="modest")
    stream = one.submit(quick)
    rounds(12)
    assert [token for event in stream.take() for token in event.tokens] == alone(served(), quick)[0]
    with one:
        assert [answer(x)[0][1] for x in streams] == [alone(served(), x)[0] for x in long]
