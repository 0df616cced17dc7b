"""How far attention with random features is from softmax, by the size of queries and keys: an honest table.

    python experiments/estimate_size.py            # ten seconds

‖ô − o‖/‖o‖ of a head's output, causal, t = 256, d = 64; queries and keys normal with standard deviation σ, eight heads,
the median over the draws.
"""

import argparse
from pathlib import Path

import torch
from output import RESULTS, markdown, write

from tarnn.analysis.softmax_error import softmax_error
from tarnn.feature_maps import (
    FeatureMap,
    HyperbolicRandomFeatures,
    OptimalRandomFeatures,
    PositiveRandomFeatures,
    RegularizedRandomFeatures,
)
from tarnn.feature_maps.spread import FittedMap

SIGMAS = (0.25, 0.5, 0.75, 1.0)
MAPS = {
    "favor, 256": lambda seed: PositiveRandomFeatures(64, 256, seed=seed),
    "favor, 1,024": lambda seed: PositiveRandomFeatures(64, 1024, seed=seed),
    "hyperbolic, 256": lambda seed: HyperbolicRandomFeatures(64, 256, seed=seed),
    "smreg, 256": lambda seed: RegularizedRandomFeatures(64, 256, seed=seed),
    "oprf, 256": lambda seed: OptimalRandomFeatures(64, 256, seed=seed),
}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=RESULTS, help="where results go")
    parser.add_argument("--draws", type=int, default=8)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    generator = torch.Generator().manual_seed(0)
    results: dict[str, dict[str, float]] = {}
    for sigma in SIGMAS:
        q, k, v = (torch.randn(1, 8, options.length, 64, generator=generator) for _ in range(3))
        results[f"{sigma:g}"] = {
            name: median_error(make, sigma * q, sigma * k, v, options.draws) for name, make in MAPS.items()
        }
    rows = [[sigma, *(f"{x:.2g}" for x in found.values())] for sigma, found in results.items()]
    table = markdown(["σ", *MAPS], rows)
    heading = f"# ‖ô − o‖/‖o‖ by the size of queries and keys\n\nd = 64, causal, t = {options.length}, {options.draws} draws."
    write(options.out, "estimate_size", {"results": results}, f"{heading}\n\n{table}\n")
    print(table)
    return 0


def median_error(make, q, k, v, draws: int) -> float:
    errors = []
    for seed in range(draws):
        phi: FeatureMap = make(seed)
        phi = phi.fitted(q, k) if isinstance(phi, FittedMap) else phi
        errors.append(softmax_error(q, k, v, phi, causal=True).mean())
    return torch.stack(errors).median().item()


if __name__ == "__main__":
    raise SystemExit(main())
