"""What a server does under a load: tokens a second, times between tokens, and processor time on both sides.

The clients run in another process (`stream_load.py`), this one only waits.
"""

import json
import random
import statistics
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from toolkit.servers import HOST, Server

CLIENT = Path(__file__).parent / "stream_load.py"
PATH = "/v1/completions"
Body = dict[str, Any]
Answer = dict[str, Any]


class Wrong(Exception):
    """A server's answer that is not what was asked for: no figure is made of it."""


@dataclass(frozen=True)
class Load:
    """What the clients saw. groups: their answers, in the order in which they ended."""

    seconds: float
    client_cpu: float
    server_cpu: float
    groups: dict[str, list[Answer]]


def apply_load(server: Server, groups: dict[str, dict], path: str = PATH, seconds: float = 300) -> Load:
    """Raises Wrong where the clients fail or are not done in time."""
    load = {"host": HOST, "port": server.port, "path": path, "groups": groups}
    before = server.cpu_seconds()
    try:
        done = subprocess.run(
            [sys.executable, "-S", str(CLIENT)], input=json.dumps(load), capture_output=True, text=True, timeout=seconds
        )
    except subprocess.TimeoutExpired:
        raise Wrong(f"not done after {seconds:.0f} s") from None
    if done.returncode:
        raise Wrong(f"the clients failed: {(done.stderr.strip().splitlines() or ['no words'])[-1]}")
    said = json.loads(done.stdout)
    return Load(said["seconds"], said["cpu"], server.cpu_seconds() - before, said["groups"])


def completion(server: Server, prompt: Sequence[int] | str, tokens: int, **fields: Any) -> Body:
    """A body of /v1/completions: greedy, unless fields say otherwise."""
    return {
        "model": server.model,
        "prompt": prompt,
        "max_tokens": tokens,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
        **fields,
    }


def prompts(number: int, length: int, vocab: int, seed: int = 0) -> list[list[int]]:
    """Random tokens of text: the first few of the vocabulary are roles."""
    draw = random.Random(seed)
    return [[draw.randrange(8, vocab) for _ in range(length)] for _ in range(number)]


def written(answer: Answer) -> int:
    """Tokens of an answer, as the server counts them; as many as events where it doesn't."""
    usage = answer.get("usage") or {}
    return usage.get("completion_tokens") or usage.get("output_tokens") or len(answer["times"])


def check_whole(answers: Sequence[Answer], number: int, tokens: int) -> None:
    """Wrong unless there are so many answers of so many tokens each."""
    bad = [x for x in answers if x["status"] != 200 or x["error"] or written(x) != tokens]
    if bad:
        x = bad[0]
        why = x["error"] or x.get("body") or f"{written(x)} tokens, not {tokens}"
        raise Wrong(f"{len(bad)} of {len(answers)} answers are wrong; the first: status {x['status']}, {why}")
    if len(answers) != number:
        raise Wrong(f"{len(answers)} answers, not {number}")


def gaps_ms(answers: Sequence[Answer]) -> list[float]:
    """Milliseconds between an answer's tokens, of all answers."""
    return [1000 * (b - a) for x in answers for a, b in zip(x["times"], x["times"][1:], strict=False)]


def percentile(values: Sequence[float], share: float) -> float | None:
    """The value that this share of all is not above."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else None


def first_ms(answer: Answer) -> float:
    """From sending to the first token."""
    return 1000 * (answer["times"][0] - answer["sent"])


def speed_of(load: Load, name: str) -> dict[str, Any]:
    """Of a group that began with the load and ran to its end."""
    answers = load.groups[name]
    gaps, tokens = gaps_ms(answers), sum(map(written, answers))
    events = sum(len(x["times"]) for x in answers)
    firsts = [first_ms(x) for x in answers if x["times"]]
    return {
        "tokens": tokens,
        "seconds": load.seconds,
        "speed": tokens / load.seconds,
        "p50": percentile(gaps, 0.5),
        "p99": percentile(gaps, 0.99),
        "most": max(gaps, default=None),
        "first": statistics.median(firsts) if firsts else None,
        "tokens_an_event": tokens / max(events, 1),
        "server_cpu": load.server_cpu,
        "client_cpu": load.client_cpu,
    }
