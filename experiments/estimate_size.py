"""How far attention with random features is from softmax, by the size of queries and keys: an honest table.

    python experiments/estimate_size.py            # ten seconds

‖ô − o‖/‖o‖ of a head's output, causal, t = 256, d = 64; queries and keys normal with standard deviation σ, eight heads,
the median over the draws.
"""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
from measures.softmax_error import softmax_error

from scripts.common.options import parse
from scripts.common.results import run
from scripts.common.tables import markdown, page
from tarnn.feature_maps import (
    FeatureMap,
    HyperbolicRandomFeatures,
    OptimalRandomFeatures,
    PositiveRandomFeatures,
    RegularizedRandomFeatures,
)
from tarnn.feature_maps.statistics import FittedMap

SIGMAS = (0.25, 0.5, 0.75, 1.0)
MAPS = {
    "favor, 256": lambda seed: PositiveRandomFeatures(64, 256, seed=seed),
    "favor, 1,024": lambda seed: PositiveRandomFeatures(64, 1024, seed=seed),
    "hyperbolic, 256": lambda seed: HyperbolicRandomFeatures(64, 256, seed=seed),
    "smreg, 256": lambda seed: RegularizedRandomFeatures(64, 256, seed=seed),
    "oprf, 256": lambda seed: OptimalRandomFeatures(64, 256, seed=seed),
}


def main() -> int:
    options = parse(__file__, __doc__, {"draws": 8, "length": 256, "threads": 1})
    return run(options, measure, report=report)


def measure(options, results: dict[str, dict[str, float]], keep) -> None:
    generator = torch.Generator().manual_seed(0)
    for sigma in SIGMAS:
        q, k, v = (torch.randn(1, 8, options.length, 64, generator=generator) for _ in range(3))
        results[f"{sigma:g}"] = {
            name: median_error(make, sigma * q, sigma * k, v, options.draws) for name, make in MAPS.items()
        }


def report(options, facts, results) -> str:
    rows = [[sigma, *(f"{x:.2g}" for x in found.values())] for sigma, found in results.items()]
    about = f"d = 64, causal, t = {options.length}, {options.draws} draws."
    return page("‖ô − o‖/‖o‖ by the size of queries and keys", about, markdown(["σ", *MAPS], rows))


def median_error(make, q, k, v, draws: int) -> float:
    errors = []
    for seed in range(draws):
        phi: FeatureMap = make(seed)
        phi = phi.fitted(q, k) if isinstance(phi, FittedMap) else phi
        errors.append(softmax_error(q, k, v, phi, causal=True).mean())
    return torch.stack(errors).median().item()


if __name__ == "__main__":
    raise SystemExit(main())
