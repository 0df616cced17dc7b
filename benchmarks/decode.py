"""Time a token and bytes of state against position: linear attention, and softmax with a KV cache.

    python benchmarks/decode.py            # about five minutes; benchmarks/results/decode.{json,md,png}

The claim: with linear attention a token costs the same wherever it stands, in time (within 10 %) and in memory; with softmax
both grow with all that came before. Same model but for its attention, float32, random weights, by the fused step that
`tarnn generate` uses, each with the number of threads that is fastest for it. How a position is reached without generating
up to it: see `scripts/common/decode_cost.py`.
Correctness is checked first, and nothing is measured if that fails.
"""

import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
from toolkit.model_steps import wrong_token

from scripts.common.decode_cost import ROUNDS, SECONDS_A_ROUND, DecodeCost, fastest_decode_cost
from scripts.common.options import parse
from scripts.common.others import taken_quietly
from scripts.common.plots import ATTENTION, label, line, panels
from scripts.common.provenance import total_memory
from scripts.common.results import run
from scripts.common.tables import MIB, bullets, markdown, page, source
from scripts.common.targets import GUARANTEE
from tarnn import Elu, LinearState, step
from tarnn.decoding.fused import FusedStep
from tarnn.huggingface.config import softmax_twin
from tarnn.models import TarnnConfig, TarnnForCausalLM
from tarnn.ops.linear import definition as linear_definition

FULL = {
    "positions": [256, 1024, 4096, 16384, 65536],
    "batch_sizes": [1, 32],
    "rounds": ROUNDS,
    "seconds_a_round": SECONDS_A_ROUND,
    "thread_counts": [int],
    "compile": False,
}
QUICK = {"positions": [64, 256], "batch_sizes": [1], "rounds": 2, "seconds_a_round": 0.02}
ABOUT = {
    "thread_counts": "each is tried; by default 1 and all",
    "compile": "also the compiled step of the linear model",
}
SHAPE = {"num_hidden_layers": 8, "num_attention_heads": 8, "hidden_size": 256, "vocab_size": 257}
ROOM = 0.8  # of the machine's memory, at most, for a cache


def main() -> int:
    options, skipped = parse(__file__, __doc__, FULL, QUICK, about=ABOUT), []

    def facts(options, costs) -> dict[str, Any]:
        flat = {name: flatness(points) for name, points in costs.items() if name.startswith("linear")}
        return {"model": SHAPE, "flatness": flat, "skipped": skipped}

    return run(
        options,
        lambda options, costs, keep: measure(options, costs, skipped, keep),
        check=lambda options: check(),
        facts=facts,
        report=report,
        figure=figure,
    )


def check() -> str:
    """What is wrong with the step, or nothing: against the definition in float64, and a forward."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 3, 37, 5) for _ in range(3))
    expected = linear_definition.quadratic(Elu()(q.double()), Elu()(k.double()), v.double(), causal=True)
    state = LinearState.zeros(2, 3, 5, 5)
    for i in range(q.shape[2]):
        one = slice(i, i + 1)
        o, state = step(q[:, :, one], k[:, :, one], v[:, :, one], Elu(), state)
        if not torch.allclose(o.double(), expected[:, :, one], rtol=1e-5, atol=1e-5):
            return f"step {i} differs from the definition by {(o - expected[:, :, one]).abs().max():.1e}"
    config = TarnnConfig(**SHAPE | {"num_hidden_layers": 2})
    ids = torch.randint(0, 257, (2, 20))
    for one in (config, softmax_twin(config)):
        model = TarnnForCausalLM(one).eval()
        _, state = model.prefill(ids[:, :10], model.new_state(2, capacity=20))
        for i in range(10, 20):
            logits, state = model.step(ids[:, i], state)
        if not torch.allclose(logits, model(ids).logits[:, -1], rtol=1e-3, atol=1e-3):
            return f"a {one.attention} model steps to other logits than it computes at once"
        if what := wrong_token(model, 2):
            return f"the fused step of a {one.attention} model: {what}"
    return ""


def measure(options, costs: dict[str, list[DecodeCost]], skipped: list[dict], keep) -> None:
    """Costs by name of the series, each printed as soon as it is known, and what had no room in memory."""
    config = TarnnConfig(**SHAPE)
    linear, softmax = (TarnnForCausalLM(c).eval() for c in (config, softmax_twin(config)))
    series = {"linear": (linear, FusedStep(linear)), "softmax": (softmax, FusedStep(softmax))}
    if options.compile:
        series["linear, compiled"] = (linear, torch.compile(linear.step, fullgraph=True, dynamic=False))
    for batch_size in options.batch_sizes:
        for kind, (model, one_token) in series.items():
            name = f"{kind}, batch {batch_size}"
            for position in options.positions:
                tokens = position if kind == "softmax" else 1
                needed = model.new_state(1, capacity=1).nbytes * batch_size * tokens
                if needed > ROOM * total_memory():
                    skipped.append({"series": name, "position": position, "state_bytes": needed})
                    print(f"{name:28}{position:8,}  skipped: {needed:,} bytes of cache have no room here")
                    continue
                measured = partial(
                    fastest_decode_cost,
                    model,
                    position,
                    threads=options.thread_counts or (),
                    batch_size=batch_size,
                    rounds=options.rounds,
                    seconds_a_round=options.seconds_a_round,
                    step=one_token,
                )
                cost, _ = taken_quietly(measured)
                costs.setdefault(name, []).append(cost)
                print(
                    f"{name:28}{position:8,}{cost.ms:10.3f} ms ({cost.ms_min:.3f} – {cost.ms_max:.3f})"
                    f"{cost.state_bytes:18,} bytes  {cost.threads} threads",
                    flush=True,
                )
                keep()


def flatness(points: list[DecodeCost]) -> float:
    """The slowest median over the fastest: 1.1 is flat within 10 %."""
    return max(p.ms for p in points) / min(p.ms for p in points)


def report(options, facts: dict[str, Any], costs: dict[str, list[DecodeCost]]) -> str:
    rows = [
        [name, f"{p.position:,}", f"{p.ms:.3f}", f"{p.ms_min:.3f} – {p.ms_max:.3f}", f"{p.state_bytes:,}", p.threads]
        for name, points in costs.items()
        for p in points
    ]
    flat = [f"{name}: the slowest position over the fastest {ratio:.3f}" for name, ratio in facts["flatness"].items()]
    left_out = [f"{x['series']}, {x['position']:,}: a cache of {x['state_bytes']:,} bytes" for x in facts["skipped"]]
    return page(
        "One more token, by its position",
        source(facts, "8 layers of 8 heads, 256 wide, float32, fused step. Medians."),
        GUARANTEE,
        markdown(["", "position", "ms", "least – most", "bytes of state", "threads"], rows),
        bullets(flat),
        "## Left out",
        bullets(left_out),
    )


DASHES = ("-", "--", ":", "-.")  # of the lines of one attention, in order


def figure(options, facts: dict[str, Any], costs: dict[str, list[DecodeCost]]):
    """Draw milliseconds per step, with the range of the rounds as a band, and bytes of state."""
    on = f"{facts['machine']['cpu']}, {facts['machine']['cores']} cores"
    made, (time, size) = panels(2, f"one more token, 8 layers of 8 heads, 256 wide, float32; {on}")
    kinds: list[str] = []
    for name, points in costs.items():
        kind = name.split(", ")[0]
        style = f"{ATTENTION[kind]} {DASHES[kinds.count(kind)]}"
        kinds.append(kind)
        at = [p.position for p in points]
        line(time, [(p.position, p.ms) for p in points], style, name)
        time.fill_between(at, *zip(*((p.ms_min, p.ms_max) for p in points)), color=style.split()[0], alpha=0.15)
        line(size, [(p.position, p.state_bytes / MIB) for p in points], style, name)
    label(time, "tokens so far", "milliseconds per step (a token per row)", ticks=options.positions)
    label(size, "tokens so far", "MiB of state", ticks=options.positions)
    return made


if __name__ == "__main__":
    sys.exit(main())
