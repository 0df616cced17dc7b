"""Random features within the kernels: time and memory of FAVOR+ attention, against features that are stored.

    python benchmarks/favor.py           # four minutes on two cores; benchmarks/results/favor.{json,md,png}
    python benchmarks/favor.py --quick   # under a minute; runs/benchmarks/favor.{json,md,png}

The claim: m random features of each query and key (m = 256: four times q) cost arithmetic, and no memory. d = e = 64,
m = 64 and 256, causal and not, forward and forward with backward, float32. Compared, in turns, on the same inputs:

* fused: `linear_attention(q, k, v, PositiveRandomFeatures(64, m))`, as one calls it;
* stored: the same in PyTorch. φ(q) and φ(k) are computed by the module, kept by autograd, and multiplied in chunks;
* ready: the native kernels, given φ(q) and φ(k) of width m, that were made before the clock started; its gradients are
  those of the features;
* sdpa: softmax, which is what is estimated, exactly.

Correctness is checked first, against the quadratic definition in float64. What would take too long, by a shorter
length's figures, is left out and listed. Results are written after each cell: Ctrl-C keeps them.
"""

import argparse
import sys
import time
from pathlib import Path
from typing import Any

import torch
from attention import kernel_chunk, measure
from attention_check import wrong
from attention_costs import Costs, save
from favor_report import named, plot, report, targets
from provenance import kernels, provenance, results_folder
from rivals import Rival, native_kernels, release_scratch, sdpa, without_native_kernels
from targets import summary
from torch import Tensor

from tarnn import PositiveRandomFeatures, linear_attention
from tarnn.feature_maps import Identity

LENGTHS, FEATURES = (1024, 4096, 16384), (64, 256)
QUICK = {"lengths": [256, 1024], "features": [64], "seconds": 0.3}
DTYPE = "float32"


class Ready(Identity):
    """Features as they are given: those of a positive map, so that their sum normalises."""

    positive = True


READY = Ready()


def main() -> int:
    options = parse()
    if options.threads:
        torch.set_num_threads(options.threads)
    begun, interrupted, costs = time.perf_counter(), False, Costs()
    path = options.out / "favor.json"
    try:
        entrants = entrants_of(options)
    except ValueError as error:
        print(f"nothing is measured: {error}", file=sys.stderr)
        return 1
    facts = {**provenance(), "kernels": kernels()}
    facts |= {"heads": options.heads, "head_dim": options.head_dim, "features": list(options.features)}
    print(f"{facts['machine']['cpu']}, {facts['threads']} threads; kernels: {facts['kernels']}")
    options.out.mkdir(parents=True, exist_ok=True)
    try:
        measure(entrants, costs, options, lambda: save(path, facts, costs))
    except KeyboardInterrupt:
        interrupted = True
        print("interrupted: what was measured is kept", file=sys.stderr)
    if costs.by:
        write(options, facts, costs)
    print(f"{(time.perf_counter() - begun) / 60:.1f} minutes")
    return 130 if interrupted else 0


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--quick", action="store_true", help="short, one width; under a minute")
    add("--out", type=Path, help="folder; benchmarks/results for the whole run, else runs/benchmarks")
    add("--lengths", type=int, nargs="+", default=LENGTHS)
    add("--features", type=int, nargs="+", default=FEATURES, help="m")
    add("--head-dim", type=int, default=64)
    add("--heads", type=int, default=8)
    add("--kinds", nargs="+", choices=("causal", "full"), default=("causal", "full"))
    add("--passes", nargs="+", choices=("forward", "both"), default=("forward", "both"))
    add("--threads", type=int, help="torch's own choice by default")
    add("--seconds", type=float, default=2.5, help="about so long, at most, for all rounds of one rival")
    add("--longest-call", type=float, default=15.0, help="seconds beyond which a rival is left out")
    whole = vars(parser.parse_args([]))
    if parser.parse_args().quick:
        parser.set_defaults(**QUICK)
    options = parser.parse_args()
    chosen = {name for name, value in vars(options).items() if value != whole[name]}
    options.out = options.out or results_folder(whole=chosen <= {"threads"})
    options.head_dims, options.dtypes = [options.head_dim], [DTYPE]
    options.batch_size, options.device = 1, "cpu"
    return options


def entrants_of(options) -> list[tuple[Rival, str]]:
    """Who takes part: three a number of features, and softmax. ValueError for one that is wrong."""
    rivals = [Rival("sdpa", sdpa, power=2, patience=1.0)]
    for m in sorted(set(options.features)):
        phi = PositiveRandomFeatures(options.head_dim, m, seed=0)
        for rival in rivals_of(phi):
            for dtype in (torch.float64, torch.float32):
                if found := wrong(rival, dtype, [options.head_dim], phi=phi):
                    raise ValueError(f"the check is red: {rival.name}, {found}.")
            rivals.append(rival)
    return [(rival, DTYPE) for rival in rivals]


def rivals_of(phi: PositiveRandomFeatures) -> list[Rival]:
    """Fused and stored; and ready, where there are native kernels."""

    def fused(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
        return linear_attention(q, k, v, phi, causal=causal)

    def stored(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
        return ready(*features(q, k, v), causal)

    def features(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        (phi_q, _), (phi_k, weight) = phi.queries(q), phi.keys(k)  # a query's scale cancels
        return phi_q, phi_k, v, weight

    def ready(phi_q: Tensor, phi_k: Tensor, v: Tensor, weight: Tensor, causal: bool) -> Tensor:
        return linear_attention(phi_q, phi_k, v, READY, causal=causal, key_log_weight=weight)

    m = phi.num_features(phi.head_dim)
    found = [
        Rival(named("fused", m), fused, ours=True, release=release_scratch),
        Rival(named("stored", m), stored, ours=True, surroundings=without_native_kernels),
    ]
    if native_kernels()[0]:
        found.append(Rival(named("ready", m), ready, ours=True, release=release_scratch, given=features))
    return found


def write(options, facts: dict[str, Any], costs: Costs) -> None:
    found = targets(costs, options.features)
    facts |= {"chunk": kernel_chunk(), "targets": [t.as_json() for t in found]}
    save(options.out / "favor.json", facts, costs)
    (options.out / "favor.md").write_text(report(facts, costs, found))
    plot(
        costs,
        options.features,
        options.out / "favor.png",
        f"{facts['machine']['cpu']}, {facts['threads']} threads",
    )
    print(f"targets: {summary(found)}")
    print(*(options.out / f"favor.{x}" for x in ("json", "md", "png")), sep="\n")


if __name__ == "__main__":
    sys.exit(main())
