"""The engine of `serve.py` without HTTP: its speed beside the bare step, and what parked conversations cost."""

import ctypes
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch

from scripts.common.memory import _status
from tarnn.decoding.loop import TokenLoop
from tarnn.decoding.samplers import greedy
from tarnn.serving.engine import Engine
from tarnn.serving.model import ServedModel
from tarnn.serving.request import Event, Request, Sampling
from tarnn.serving.snapshot import Snapshot
from tarnn.serving.store import StateStore
from toolkit.loads import Wrong, prompts

GREEDY = Sampling(temperature=0)
PROMPT = 16  # tokens, of the texts that are only there to be continued
TENANT = ""


def bare_step_speed(served: ServedModel, rows: int, steps: int) -> float:
    """Tokens a second of the fused step in place, without any choice of a token."""
    state, ids = served.model.new_state(rows), torch.arange(8, 8 + rows)
    served.step(ids, state, inplace=True)
    begun = time.perf_counter()
    for _ in range(steps):
        served.step(ids, state, inplace=True)
    return rows * steps / (time.perf_counter() - begun)


def engine_speed(served: ServedModel, rows: int, tokens: int, sampled: bool) -> float:
    """Tokens a second while all rows write, one reader taking their text after each step."""
    news = threading.Event()
    with Engine(served, max_rows=rows) as engine:
        streams = []
        for i, ids in enumerate(prompts(rows, PROMPT, served.step.num_outputs)):
            sampling = Sampling(seed=i) if sampled else GREEDY
            request = Request(np.array(ids, np.int32), max_tokens=tokens, sampling=sampling)
            streams.append(engine.submit(request, news.set))
        begun, over = (time.perf_counter(), 0), False
        while not over:
            news.wait()
            news.clear()
            events = [event for stream in streams for event in stream.take()]
            over = any(event.finish for event in events)
            if not begun[1] and engine.stats.running == rows:
                begun = time.perf_counter(), engine.stats.tokens_written
        return (engine.stats.tokens_written - begun[1]) / (time.perf_counter() - begun[0])


def not_the_loops(served: ServedModel, tokens: int) -> str:
    """What is wrong with answers of an engine that is busy, or "": each must be the token loop's."""
    asked = [np.array(ids, np.int32) for ids in prompts(5, PROMPT, served.step.num_outputs, seed=1)]
    with Engine(served, max_rows=3) as engine:
        streams = [engine.submit(Request(ids, max_tokens=tokens, sampling=GREEDY)) for ids in asked]
        answers = [[token for event in stream for token in event.tokens] for stream in streams]
    for ids, answer in zip(asked, answers, strict=True):
        loop = TokenLoop(served.model, served.model.new_state(1), step=served.step)
        loop.read(torch.from_numpy(ids)[None].long())
        if answer != [int(token) for token in loop.tokens(greedy(), tokens)]:
            return "the engine's answer is not the token loop's"
    return ""


def finished(engine: Engine, ids: list[int], tokens: int = 2) -> Snapshot:
    """Where a short answer to this prompt ends."""
    request = Request(np.array(ids, np.int32), max_tokens=tokens, sampling=GREEDY, keep=True)
    return last_event(engine, request).snapshot


def last_event(engine: Engine, request: Request) -> Event:
    *_, last = engine.submit(request)
    if last.finish != "length":
        raise Wrong(f"an answer ended with {last.finish!r} {last.error}")
    return last


def resume_ms(served: ServedModel, folder: Path | None, number: int) -> dict[str, list[float]]:
    """Milliseconds until a parked conversation's state is there, and until its next token; folder None: from memory.

    With a folder, the store has memory for one state, so each comes from its file (which the system may have in its cache).
    """
    found: dict[str, list[float]] = {"state": [], "first": []}
    size = served.model.new_state(1).nbytes
    store = StateStore(served, memory=2**30 if folder is None else int(1.5 * size), folder=folder)
    try:
        with Engine(served) as engine:
            asked = prompts(number, PROMPT, served.step.num_outputs, seed=2)
            held = [store.hold(TENANT, finished(engine, ids)).id for ids in asked]
            for name in held:
                begun = time.perf_counter()
                parked = store.get(TENANT, name)
                there = time.perf_counter()
                request = Request(np.array([9], np.int32), max_tokens=1, sampling=GREEDY, begin=parked)
                next(engine.submit(request))
                found["first"].append(1000 * (time.perf_counter() - begun))
                found["state"].append(1000 * (there - begun))
    finally:
        store.close()
    return found


def parked_bytes(served: ServedModel, number: int) -> dict[str, int]:
    """Resident bytes of this process that so many conversations take, parked in memory. For a process of its own.

    live: without what the heap keeps of memory that is free again.
    """
    size = served.model.new_state(1).nbytes
    store = StateStore(served, memory=4 * number * size)
    with Engine(served) as engine:
        asked = prompts(number, 4, served.step.num_outputs, seed=3)
        for ids in asked[:64]:  # the engine's own buffers
            finished(engine, ids)
        trim()
        before = _status("VmRSS")
        for at in range(0, number, 32):
            requests = [Request(np.array(ids, np.int32), max_tokens=2, keep=True) for ids in asked[at : at + 32]]
            for stream in [engine.submit(request) for request in requests]:
                *_, last = stream
                store.hold(TENANT, last.snapshot)
        held = len(store.list(TENANT))
        after = _status("VmRSS")
        trim()
        live = _status("VmRSS")
    store.close()
    return {"number": held, "state": size, "resident": after - before, "live": live - before}


def trim() -> None:
    """Give back what the heap has free, where there is glibc."""
    with suppress(AttributeError, OSError):
        ctypes.CDLL(None).malloc_trim(0)


def medians_in_turns(calls: dict[str, Callable[[], float]], rounds: int) -> dict[str, list[float]]:
    """What each call returns, once a round, in turns."""
    found: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            found[name].append(call())
    return found


def main() -> None:
    """python benchmarks/toolkit/engine_cases.py FOLDER WEIGHTS NUMBER → JSON of `parked_bytes`."""
    import json
    import sys

    from tarnn.serving.model import open_served

    folder, weights, number = sys.argv[1:]
    found: dict[str, Any] = parked_bytes(open_served(folder, weights=weights), int(number))
    print(json.dumps(found))


if __name__ == "__main__":
    main()
