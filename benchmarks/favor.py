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
length's figures, is left out and listed. Results are written after each cell: Ctrl-C keeps them, `--resume` goes on.
"""

import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1]))
from toolkit.attention_cells import HEADS_FIRST, Costs, measure_cells
from toolkit.attention_check import wrong
from toolkit.baselines import Method, release_scratch, sdpa
from toolkit.favor_report import DTYPE, figure, named, report, targets

from scripts.common.options import parse
from scripts.common.results import Unmeasured, run
from tarnn import PositiveRandomFeatures, linear_attention
from tarnn.feature_maps import Identity
from tarnn.kernels.cpu import library
from tarnn.kernels.cpu.linear import CHUNK_OF_MANY

loaded = Costs.from_json  # as `scripts/redraw.py` reads results
FULL = {
    "lengths": [1024, 4096, 16384],
    "features": [64, 256],
    "head_dim": 64,
    "heads": 8,
    "kinds": ["causal", "full"],
    "passes": ["forward", "both"],
    "seconds": 2.5,
    "longest_call": 15.0,
    "resume": False,
}
QUICK = {"lengths": [256, 1024], "features": [64], "seconds": 0.3}
CHOICES = {"kinds": ["causal", "full"], "passes": ["forward", "both"]}
ABOUT = {
    "features": "m",
    "resume": "go on where the results file ends",
    "seconds": "about so long, at most, for all rounds of one method",
    "longest_call": "seconds beyond which a method is left out",
}


class Ready(Identity):
    """Features as they are given: those of a positive map, so that their sum normalises."""

    positive = True


READY = Ready()


def main() -> int:
    options = parse(__file__, __doc__, FULL, QUICK, choices=CHOICES, about=ABOUT)
    options.head_dims, options.dtypes, options.batch_size, options.device = ([options.head_dim], [DTYPE], 1, "cpu")
    options.layouts, options.caches = [HEADS_FIRST], ["warm"]
    return run(options, measure, results=Costs(), facts=facts, report=report, figure=figure)


def measure(options, costs: Costs, keep) -> None:
    entrants = entrants_of(options)
    costs.take_up(options, shape(options))
    measure_cells(entrants, costs, options, keep)


def shape(options) -> dict[str, Any]:
    return {"heads": options.heads, "head_dim": options.head_dim}


def facts(options, costs: Costs) -> dict[str, Any]:
    judged = [t.as_json() for t in targets(costs, options.features)]
    return {"shape": shape(options), "skipped": costs.skipped, "chunk": CHUNK_OF_MANY, "targets": judged}


def entrants_of(options) -> list[tuple[Method, str]]:
    """Who takes part: three for each number of features, and softmax. Unmeasured for one that is wrong."""
    methods = [Method("sdpa", sdpa, power=2, patience=1.0)]
    for m in sorted(set(options.features)):
        phi = PositiveRandomFeatures(options.head_dim, m, seed=0)
        for method in methods_of(phi):
            for dtype in (torch.float64, torch.float32):
                if found := wrong(method, dtype, [options.head_dim], phi=phi):
                    raise Unmeasured(f"the check is red: {method.name}, {found}.")
            methods.append(method)
    return [(method, DTYPE) for method in methods]


def methods_of(phi: PositiveRandomFeatures) -> list[Method]:
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
        Method(named("fused", m), fused, ours=True, release=release_scratch),
        Method(named("stored", m), stored, ours=True, surroundings=library.disabled),
    ]
    if library.available():
        found.append(Method(named("ready", m), ready, ours=True, release=release_scratch, given=features))
    return found


if __name__ == "__main__":
    sys.exit(main())
