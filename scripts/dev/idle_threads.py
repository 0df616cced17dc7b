"""How long OpenMP's idle threads should spin: a training step with two threads, on a quiet machine and beside other work.

    python scripts/dev/idle_threads.py      # about eight minutes; scripts/dev/results/idle_threads.{json,md}

The claim: the short spin that `tarnn`'s commands ask for (`tarnn.cli.threads`) costs at most 3 % on a quiet machine, and
beside three busy processes a step takes at most half of its time with OpenMP's default. Each setting is a process of its
own, since OpenMP reads it when torch is loaded. The processes take turns; one that waits sleeps, and spins for nobody. Two
steps are timed: of the default model of `tarnn train` (8 × 256 tokens; AdamW), and of as large a Transformer in plain PyTorch.
"""

import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))
sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
from toolkit.model_steps import draw_tokens

from scripts.common.options import parse
from scripts.common.results import run
from scripts.common.tables import markdown, page, source
from scripts.common.targets import Target, at_most, section
from tarnn.cli.threads import SHORT, WAIT_CHOICES
from tarnn.models import TarnnConfig, TarnnForCausalLM

DEFAULT, PASSIVE = "OpenMP's default", "OMP_WAIT_POLICY=PASSIVE"
STEPS = ("tarnn", "PyTorch")
FULL = {"spins": [0, 100, 300, 1000, 3000, 10_000, 30_000], "rounds": 9, "steps": 8, "busy": 3}
QUICK = {"spins": [1000], "rounds": 2, "steps": 2}
WORKER = "--worker"


def main() -> int:
    options = parse(__file__, __doc__, FULL, QUICK, about={"busy": "processes that compute beside the step"})
    return run(options, measure, facts=facts, report=report)


def environments(options) -> dict[str, dict[str, str]]:
    spins = {f"GOMP_SPINCOUNT={n}": {"GOMP_SPINCOUNT": str(n)} for n in options.spins}
    return {DEFAULT: {}, PASSIVE: {"OMP_WAIT_POLICY": "PASSIVE"}, **spins}


def measure(options, found: dict[str, Any], keep) -> None:
    """found["quiet" or "busy"][setting][step]: milliseconds a step, the median of each round."""
    clean = {name: value for name, value in os.environ.items() if name not in WAIT_CHOICES}
    command = [sys.executable, __file__, WORKER, str(options.threads), str(options.steps)]
    workers = {
        name: subprocess.Popen(command, env=clean | setting, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for name, setting in environments(options).items()
    }
    try:
        for surroundings, busy in (("quiet", 0), ("busy", options.busy)):
            others = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(busy)]
            try:
                times = found[surroundings] = {name: {step: [] for step in STEPS} for name in workers}
                for _ in range(options.rounds):
                    for name, worker in workers.items():
                        print("round", file=worker.stdin, flush=True)
                        for step, ms in json.loads(worker.stdout.readline()).items():
                            times[name][step].append(ms)
            finally:
                for other in others:
                    other.kill()
            keep()
    finally:
        for worker in workers.values():
            worker.stdin.close()
            worker.wait()


def medians(found: dict[str, Any], surroundings: str, step: str) -> dict[str, float]:
    return {name: statistics.median(times[step]) for name, times in found.get(surroundings, {}).items()}


def targets(found: dict[str, Any]) -> list[Target]:
    chosen, judged = f"GOMP_SPINCOUNT={SHORT['GOMP_SPINCOUNT']}", []
    for surroundings, bound in (("quiet", 1.03), ("busy", 0.5)):
        values = {}
        for step in STEPS:
            ms = medians(found, surroundings, step)
            if chosen in ms:
                values[step] = ms[chosen] / ms[DEFAULT]
        judged.append(at_most(f"{chosen}: at most {bound} × the time with {DEFAULT}", surroundings, bound, values))
    return judged


def facts(options, found: dict[str, Any]) -> dict[str, Any]:
    return {"targets": [t.as_json() for t in targets(found)]}


def report(options, facts: dict[str, Any], found: dict[str, Any]) -> str:
    columns = [(surroundings, step) for surroundings in found for step in STEPS]
    rows = [[name, *(f"{medians(found, *column)[name]:.1f}" for column in columns)] for name in environments(options)]
    how = f"Milliseconds a step, medians of {options.rounds} rounds in turns; busy: beside {options.busy} processes that compute."
    return page(
        "How long idle threads spin",
        source(facts, how),
        section(targets(found)),
        markdown(["setting", *(f"{step}, {surroundings}" for surroundings, step in columns)], rows),
    )


def work(threads: int, steps: int) -> None:
    """One setting: a line on stdin asks for a round."""
    torch.set_num_threads(threads)
    calls = {"tarnn": tarnn_step(), "PyTorch": torch_step()}
    for call in calls.values():
        call(), call()
    for _ in sys.stdin:
        print(json.dumps({name: median_ms(call, steps) for name, call in calls.items()}), flush=True)


def median_ms(call, steps: int) -> float:
    times = []
    for _ in range(steps):
        begun = time.perf_counter()
        call()
        times.append(1000 * (time.perf_counter() - begun))
    return statistics.median(times)


def tarnn_step():
    torch.manual_seed(0)
    model = TarnnForCausalLM(TarnnConfig(hidden_size=256, num_hidden_layers=4, num_attention_heads=4)).train()
    tokens = draw_tokens(8, 256)
    return with_update(model, lambda: model(tokens, labels=tokens, use_cache=False).loss)


def torch_step():
    torch.manual_seed(0)
    layer = torch.nn.TransformerEncoderLayer(256, 4, 1024, dropout=0.0, batch_first=True)
    model = torch.nn.TransformerEncoder(layer, 4, enable_nested_tensor=False).train()
    x = torch.randn(8, 256, 256)
    return with_update(model, lambda: model(x).square().mean())


def with_update(model: torch.nn.Module, loss):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def step() -> None:
        loss().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


if __name__ == "__main__":
    sys.exit(work(*map(int, sys.argv[2:])) if sys.argv[1:2] == [WORKER] else main())
