"""Time a token and bytes of state against position: linear attention, and softmax with a KV cache.

    python benchmarks/decode.py            # about five minutes; writes benchmarks/results/decode.{json,png}

The claim: with linear attention a token costs the same wherever it stands, in time (within 10 %) and in memory; with softmax
both grow with all that came before. Same model but for its attention, float32, random weights, each with the number of
threads that is fastest for it. How a position is reached without generating up to it: see `tarnn.analysis.decode_cost`.
Correctness is checked first, and nothing is measured if that fails.
"""

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path

import torch
from provenance import provenance, total_memory

from tarnn import Elu, LinearState, step
from tarnn.analysis.decode_cost import ROUNDS, SECONDS_A_ROUND, DecodeCost, fastest_decode_cost, softmax_twin
from tarnn.analysis.plots import plot_decode_cost
from tarnn.models import TarnnConfig, TarnnForCausalLM
from tarnn.ops import reference

POSITIONS, BATCH_SIZES = (256, 1024, 4096, 16384, 65536), (1, 32)
SHAPE = {"num_hidden_layers": 8, "num_attention_heads": 8, "hidden_size": 256, "vocab_size": 257}
ROOM = 0.8  # of the machine's memory, at most, for a cache


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    parser.add_argument("--positions", type=int, nargs="+", default=POSITIONS)
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=BATCH_SIZES)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--seconds-a-round", type=float, default=SECONDS_A_ROUND)
    parser.add_argument(
        "--threads", type=int, nargs="+", default=(), help="each is tried; by default 1 and all"
    )
    parser.add_argument(
        "--compile", action="store_true", help="also measure the compiled step of the linear model"
    )
    options = parser.parse_args()
    if wrong := check():
        print(f"the check is red, so nothing is measured: {wrong}", file=sys.stderr)
        return 1
    costs, skipped = measure(options)
    flat = {name: flatness(points) for name, points in costs.items() if name.startswith("linear")}
    write(options.out, {**provenance(), "model": SHAPE, "flatness": flat, "skipped": skipped}, costs)
    return 0


def check() -> str:
    """What is wrong with the step, or nothing: against the definition in float64, and a forward."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 3, 37, 5, dtype=torch.float64) for _ in range(3))
    expected = reference.quadratic(Elu()(q), Elu()(k), v, causal=True)
    state = LinearState.zeros(2, 3, 5, 5, dtype=torch.float64)
    for i in range(q.shape[2]):
        one = slice(i, i + 1)
        o, state = step(q[:, :, one], k[:, :, one], v[:, :, one], Elu(), state)
        if not torch.allclose(o, expected[:, :, one], rtol=1e-9, atol=1e-12):
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
    return ""


def measure(options: argparse.Namespace) -> tuple[dict[str, list[DecodeCost]], list[dict]]:
    """Costs by name of the series, each printed as soon as it is known, and what had no room in memory."""
    config = TarnnConfig(**SHAPE)
    linear, softmax = (TarnnForCausalLM(c).eval() for c in (config, softmax_twin(config)))
    series = {"linear": (linear, None), "softmax": (softmax, None)}
    if options.compile:
        series["linear, compiled"] = (linear, torch.compile(linear.step, fullgraph=True, dynamic=False))
    costs: dict[str, list[DecodeCost]] = {}
    skipped = []
    for batch_size in options.batch_sizes:
        for kind, (model, compiled) in series.items():
            name = f"{kind}, batch {batch_size}"
            for position in options.positions:
                tokens = position if kind == "softmax" else 1
                needed = model.new_state(1, capacity=1).nbytes * batch_size * tokens
                if needed > ROOM * total_memory():
                    skipped.append({"series": name, "position": position, "state_bytes": needed})
                    print(f"{name:28}{position:8,}  skipped: {needed:,} bytes of cache have no room here")
                    continue
                cost = fastest_decode_cost(
                    model, position, threads=options.threads, batch_size=batch_size, rounds=options.rounds,
                    seconds_a_round=options.seconds_a_round, step=compiled,
                )  # fmt: skip
                costs.setdefault(name, []).append(cost)
                print(
                    f"{name:28}{position:8,}{cost.ms:10.3f} ms ({cost.ms_min:.3f} – {cost.ms_max:.3f})"
                    f"{cost.state_bytes:18,} bytes  {cost.threads} threads",
                    flush=True,
                )
    return costs, skipped


def flatness(points: list[DecodeCost]) -> float:
    """The slowest median over the fastest: 1.1 is flat within 10 %."""
    return max(p.ms for p in points) / min(p.ms for p in points)


def write(folder: Path, facts: dict, costs: dict[str, list[DecodeCost]]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    results = {name: [asdict(p) for p in points] for name, points in costs.items()}
    (folder / "decode.json").write_text(json.dumps({**facts, "results": results}, indent=2) + "\n")
    cpu, cores = facts["machine"]["cpu"], facts["machine"]["cores"]
    title = f"one more token, 8 layers of 8 heads, 256 wide, float32; {cpu}, {cores} cores"
    plot_decode_cost(costs, folder / "decode.png", title)
    for name, ratio in facts["flatness"].items():
        print(f"{name}: slowest position over fastest {ratio:.3f}")
    print(f"{folder / 'decode.json'}\n{folder / 'decode.png'}")


if __name__ == "__main__":
    sys.exit(main())
