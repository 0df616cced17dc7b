"""What `serve.py` measures of `tarnn serve`, over HTTP on loopback: each case starts a server and stops it."""

import random
import statistics
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from toolkit.loads import (
    Load,
    Wrong,
    apply_load,
    check_whole,
    completion,
    first_ms,
    gaps_ms,
    percentile,
    prompts,
    speed_of,
    written,
)
from toolkit.servers import Server, serving

SHORT = 16  # tokens of a prompt that is only there to be continued
WARM_UP = 8


@contextmanager
def tarnn_server(options, folder: Path, weights: str, *words: object, threads: int | None = None) -> Iterator[Server]:
    """`tarnn serve` with as many threads as the script has, unless `threads` says otherwise. words: more of its options."""
    command = [sys.executable, "-m", "tarnn", "serve", str(folder), "--port", "{port}", "--weights", weights]
    surroundings = {"OMP_NUM_THREADS": str(threads or options.threads)}
    log = folder.parent / "tarnn.log"
    with serving(
        [*command, *map(str, words)], log, environment=surroundings, ready="/ready", model=folder.name
    ) as server:
        warm_up(options, server)
        yield server


def warm_up(options, server: Server) -> None:
    for _ in range(2):
        bodies = [completion(server, ids, WARM_UP) for ids in prompts(2, SHORT, options.vocab, seed=9)]
        apply_load(server, {"": {"streams": 2, "bodies": bodies}})


def streams_load(options, server: Server, streams: int, tokens: int, *, sampled: bool = False, **fields: Any) -> Load:
    """So many clients, each with `--waves` answers of so many tokens, one after the other."""
    number = streams * options.waves
    bodies = []
    for i, ids in enumerate(prompts(number, SHORT, options.vocab, seed=100 + streams + 1000 * sampled)):
        draws = {"temperature": 1, "seed": i} if sampled else {}
        bodies.append(completion(server, ids, tokens, **draws, **fields))
    load = apply_load(server, {"streams": {"streams": streams, "bodies": bodies}})
    check_whole(load.groups["streams"], number, tokens)
    return load


def speeds(options, folder: Path, weights: str) -> dict[str, Any]:
    """By the number of streams, greedy; and of the most of them with a seed each."""
    with tarnn_server(options, folder, weights) as server:
        found = {str(n): speed_of(streams_load(options, server, n, options.tokens), "streams") for n in options.streams}
        sampled = streams_load(options, server, options.streams[-1], options.tokens, sampled=True)
        return found | {f"{options.streams[-1]}, sampled": speed_of(sampled, "streams")}


def beside_prompts(options, folder: Path, weights: str) -> dict[str, Any]:
    """Times between tokens of all streams, while long prompts arrive at one a second."""
    streams = options.streams[-1]
    with tarnn_server(options, folder, weights, "--max-rows", 2 * streams) as server:  # or prompts wait for a row
        quiet = speed_of(streams_load(options, server, streams, options.tokens), "streams")
        # as many tokens as the quiet server writes in that time: the busy one takes longer, which does no harm
        each = max(options.tokens, int(quiet["speed"] / streams * options.prompt_seconds))
        writers = [completion(server, ids, each) for ids in prompts(streams, SHORT, options.vocab, seed=4)]
        long = prompts(20 * options.prompt_seconds, options.long_prompt, options.vocab, seed=5)
        groups = {
            "streams": {"streams": streams, "bodies": writers},
            "prompts": {"rate": 1, "bodies": [completion(server, ids, 2) for ids in long], "while": "streams"},
        }
        load = apply_load(server, groups)
        check_whole(load.groups["streams"], streams, each)
    read = [x for x in load.groups["prompts"] if x["times"]]
    firsts = [first_ms(x) for x in read]
    found = speed_of(load, "streams") | {"prompts": len(read), "prompt_first": percentile(firsts, 0.5)}
    return found | {"quiet_p99": quiet["p99"]}


def long_prefix(options, folder: Path, weights: str) -> dict[str, Any]:
    """Milliseconds to the first token behind a long text: cold, begun from its state, and sent again in two forms."""
    draw = random.Random(6)
    ids = [draw.randrange(8, options.vocab) for _ in range(options.prefix)]
    with tarnn_server(options, folder, weights) as server:
        found = {"cold": firsts(server, [completion(server, [*ids, 9], 2)])}
        status, state = server.call("POST", "/v1/states", {"model": server.model, "tokens": ids})
        if status != 200:
            raise Wrong(f"POST /v1/states answered {status} {state}")
        tails = prompts(options.repeats, 4, options.vocab, seed=7)
        found["state"] = firsts(server, [completion(server, tail, 2, state=state["id"]) for tail in tails])
        tails = prompts(options.repeats, 4, options.vocab, seed=11)  # others, or all of each would be cached
        found["sent again, token ids"] = firsts(server, [completion(server, [*ids, *tail], 2) for tail in tails])
        return found


def firsts(server: Server, bodies: list[dict]) -> dict[str, Any]:
    """Milliseconds to the first token of one request after the other, and tokens that were not read again."""
    answers = apply_load(server, {"": {"streams": 1, "bodies": bodies}}).groups[""]
    check_whole(answers, len(bodies), bodies[0]["max_tokens"])
    ms = [first_ms(x) for x in answers]
    cached = [(x["usage"].get("prompt_tokens_details") or {}).get("cached_tokens", 0) for x in answers]
    return {"median": statistics.median(ms), "most": max(ms), "number": len(ms), "cached": min(cached)}


def overload(options, folder: Path, weights: str) -> dict[str, Any]:
    """Requests at four times the rate that the server can answer: when the refused know, and how the accepted fare."""
    streams = options.streams[-1]
    with tarnn_server(options, folder, weights, "--max-queue", streams) as server:
        quiet = speed_of(streams_load(options, server, streams, options.tokens), "streams")
        before = server.resident_bytes()
        rate = options.overload * quiet["speed"] / options.tokens
        number = max(4 * streams, int(rate * options.overload_seconds))
        bodies = [completion(server, ids, options.tokens) for ids in prompts(number, SHORT, options.vocab, seed=10)]
        load = apply_load(server, {"all": {"rate": rate, "bodies": bodies}})
        after = server.resident_bytes()
    answers = load.groups["all"]
    accepted = [x for x in answers if x["status"] == 200]
    refused = [1000 * (x["headers"] - x["sent"]) for x in answers if x["status"] == 429]
    check_whole(accepted, len(accepted), options.tokens)
    if len(accepted) + len(refused) != len(answers):
        other = next(x for x in answers if x["status"] not in (200, 429))
        raise Wrong(f"status {other['status']} {other.get('body') or other['error']}")
    gaps = gaps_ms(accepted)
    return {
        "rate": rate,
        "requests": len(answers),
        "refused": len(refused),
        "refused_p50": percentile(refused, 0.5),
        "refused_p99": percentile(refused, 0.99),
        "p50": percentile(gaps, 0.5),
        "p99": percentile(gaps, 0.99),
        "quiet_p99": quiet["p99"],
        "speed": sum(map(written, accepted)) / load.seconds,
        "quiet_speed": quiet["speed"],
        "grown": after - before,
        "server_cpu": load.server_cpu,
        "client_cpu": load.client_cpu,
    }
