"""Readers of streams: in asyncio, in threads, slow ones, and those that have gone."""

import asyncio
import gc
import threading
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest
from support.served import NO_ENDS, alone, answer, prompt

from tarnn.decoding.streaming import TextStream
from tarnn.serving.engine import Busy, Engine
from tarnn.serving.request import Request, Sampling, TokenLogprob
from tarnn.serving.stream import Choice

ENDLESS = Request(prompt(5), 10**7, Sampling(seed=0), end_ids=NO_ENDS)


def until(condition):
    """Wait for what another thread is about to do."""
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(1e-3)


def requests(number, tokens=12):
    return [Request(prompt(9, seed=i), tokens, Sampling(seed=i), end_ids=NO_ENDS) for i in range(number)]


def test_async_readers(engine, served):
    one = engine(max_rows=4)

    async def read(request):
        return [token async for event in one.submit(request) for token in event.tokens]

    async def all_of_them():
        return await asyncio.gather(*map(read, requests(9)))

    assert asyncio.run(all_of_them()) == [alone(served(), request)[0] for request in requests(9)]


def test_readers_in_threads(engine, served):
    one, found = engine(max_rows=4), {}

    def read(i, request):
        found[i] = answer(one.submit(request))[0][1]

    threads = [threading.Thread(target=read, args=x) for x in enumerate(requests(9))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {i: alone(served(), request)[0] for i, request in enumerate(requests(9))}


def test_on_events_is_called_once_for_all_who_share_it(served):
    one, calls = Engine(served()), []
    streams = [one.submit(request, lambda: None) for request in requests(2, tokens=5)]
    shared = lambda: calls.append(threading.current_thread().name)  # noqa: E731
    streams += [one.submit(request, shared) for request in requests(3, tokens=5)]
    with one:
        until(lambda: sum(len(x.take()) for x in streams) or all(x.over for x in streams))
        until(lambda: [x.take() for x in streams] and all(x.over for x in streams))
    assert set(calls) == {f"engine of {served().name}"}
    assert len(calls) <= 5 + 3  # a step each, and no more than the reading of each prompt


def test_take_does_not_wait(engine):
    stream = Engine(engine().model).submit(ENDLESS)  # of an engine that was not started
    assert stream.take() == []
    assert not stream.over


def test_a_cancelled_request_ends(engine):
    one = engine()
    stream = one.submit(ENDLESS)
    next(stream)
    stream.cancel()
    assert [event.finish for event in stream][-1] == "cancelled"
    assert stream.over
    assert one.stats.running == 0


def test_a_request_is_cancelled_while_its_prompt_is_read(served):
    one = Engine(served(), prefill_piece=16)
    stream = one.submit(Request(prompt(200_000), 5))
    with one:
        until(lambda: one.stats.tokens_read)
        stream.cancel()
        assert [(x.finish, x.tokens) for x in stream] == [("cancelled", ())]
        assert one.stats.tokens_read < 200_000
        assert (one.stats.waiting, one.stats.waiting_tokens) == (0, 0)


def test_who_has_gone_is_cancelled(engine):
    one = engine()
    stream = one.submit(ENDLESS)
    next(stream)
    del stream
    gc.collect()
    until(lambda: not one.stats.running)


def test_a_slow_reader_is_paused_and_holds_nobody_up(engine, served):
    one = engine(max_rows=2)
    long = Request(prompt(5), 900, Sampling(seed=3), end_ids=NO_ENDS)
    slow = [one.submit(long) for _ in range(3)]
    quick = requests(4, tokens=40)
    assert [answer(one.submit(x))[0][1] for x in quick] == [alone(served(), x)[0] for x in quick]
    until(lambda: one.stats.paused == 3)
    expected = alone(served(), long)[0]
    assert [answer(x)[0][1] for x in slow] == [expected] * 3
    assert one.stats.paused == 0


def test_a_paused_request_is_cancelled(engine):
    one = engine()
    stream = one.submit(ENDLESS)
    until(lambda: one.stats.paused)
    stream.cancel()
    assert answer(stream)[0][2] == "cancelled"
    assert one.stats.paused == 0


def test_a_full_queue(served):
    one = Engine(served(), max_queue=2)
    streams = [one.submit(Request(prompt(5), 1)) for _ in range(2)]
    with pytest.raises(Busy, match="the queue is full"):
        one.submit(Request(prompt(5), 1))
    with one:
        assert [len(answer(x)[0][1]) for x in streams] == [1, 1]
        assert one.stats.refused == 1


def test_a_queue_full_of_tokens(served):
    one = Engine(served(), max_queue_tokens=100)
    streams = [one.submit(Request(prompt(500), 1))]  # nothing is too long for an empty queue
    with pytest.raises(Busy):
        one.submit(Request(prompt(1), 1))
    with one:
        answer(streams[0])
        assert one.stats.waiting_tokens == 0
        answer(one.submit(Request(prompt(100), 1)))


def test_closing_cancels_or_drains(served):
    one = Engine(served())
    one.start()
    stream = one.submit(ENDLESS)
    next(stream)
    one.close()
    assert answer(stream)[0][2] == "cancelled"
    with pytest.raises(RuntimeError, match="is being closed; it takes no more requests"):
        one.submit(ENDLESS)
    one = Engine(served())
    streams = [one.submit(request) for request in requests(3)]
    one.start()
    one.close(drain=True)
    assert [answer(x)[0][2] for x in streams] == ["length"] * 3


def test_an_engine_that_never_began_cancels(served):
    one = Engine(served())
    stream = one.submit(ENDLESS)
    one.close()
    assert answer(stream)[0][2] == "cancelled"


def test_closed_while_a_step_begins(served):
    """The step may take the command that `close` wakes the thread with: it must not wait for another."""
    one, closing = Engine(served()), []
    step = one.step

    def late():
        if not closing:
            thread = threading.Thread(target=one.close, daemon=True)
            thread.start()
            time.sleep(0.2)  # until the command is there
            closing.append(thread)
        return step()

    one.step = late
    one.start()
    until(lambda: closing)
    closing[0].join(20)
    assert not closing[0].is_alive()


def test_a_closed_loop_harms_nobody(engine, served):
    one = engine()

    async def first(stream):
        return await anext(stream)

    stream = one.submit(ENDLESS)
    asyncio.run(first(stream))
    [request] = requests(1)
    assert answer(one.submit(request))[0][1] == alone(served(), request)[0]


def test_what_was_taken_is_kept_no_longer(served):
    """Of the logprobs and texts of an answer without an end; its tokens are its state's name."""
    queue = SimpleNamespace(request=Request(prompt(5), 10**18, stop=("never",), logprobs=1), ends=NO_ENDS)
    choice = Choice(queue, 0, TextStream(served().decoder(), [], ("never",)))
    choice.most = 10**18
    for token in (65, 66, 67):
        choice.wrote(token, TokenLogprob(token, -1.0))
        event = choice.take()
        assert (event.tokens, [x.token for x in event.logprobs]) == ((token,), [token])
    assert len(choice.tokens) == 3
    assert not choice.logprobs
    assert not choice.texts


def test_states_of_slow_readers_have_a_bound(engine):
    """The oldest text of the client who has the most ends; others wait for their readers, and so does one alone, of any size."""
    probe = engine()
    one = probe.submit(replace(ENDLESS, max_tokens=1, keep=True))
    size = max(event.snapshot.nbytes for event in one if event.snapshot)
    bounded = engine(max_rows=4, max_paused=2 * size + 3000)
    streams = []
    for client in ("a", "b", "a", "c"):
        streams.append(bounded.submit(replace(ENDLESS, client=client)))
        until(lambda: bounded.stats.tokens_written > 256 * len(streams) and not bounded.stats.running)
    bounded.close()
    ended = [[event.finish for event in stream.take()][-1] for stream in streams]
    assert ended[0] == "error"
    assert sorted(ended) == ["cancelled"] * 2 + ["error"] * 2
    single = engine(max_paused=1)
    stream = single.submit(ENDLESS)
    until(lambda: single.stats.paused == 1)
    assert [event.finish for event in stream.take()] == [""]
