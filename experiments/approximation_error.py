"""The error of attention with random features: figure 4 of "Rethinking Attention with Performers", and beyond.

    python experiments/approximation_error.py                                  # random q, k, v: t = 4096, d = 16, 15 draws
    python experiments/approximation_error.py --stories stories260K.bin        # and those of a trained language model
    python experiments/approximation_error.py --encoder MiniLM-folder          # and of an encoder, texts by --texts
    python experiments/approximation_error.py --quick

Relative error ‖ô − o‖²/‖o‖² of the output of attention against the number of features: independent and orthogonal
directions, trigonometric and positive features, as in the paper, and what came after it: FAVOR++ (OPRF), SADERF,
centring. Median over the draws, with bars from the 10th to the 90th percentile.

The trained models' maps are fitted to one text and judged on another (calibrated, as a causal model must do it);
random data are fitted by the call. Choromanski et al. 2021 (arXiv 2009.14794), section 4.2.
"""

import argparse
import sys
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1]))
from measures.trained import Layer, encoder_layers, layers_of, own_stories, stories_model

from scripts.common.options import parse
from scripts.common.plots import BLUE, GREEN, GREY, ORANGE, RED, SKY, label, panels
from scripts.common.results import Unmeasured, run
from scripts.common.tables import markdown, page
from tarnn.feature_maps import (
    DataAwareRandomFeatures,
    FeatureMap,
    OptimalRandomFeatures,
    PositiveRandomFeatures,
    RegularizedRandomFeatures,
    Reparametrized,
    SderfFeatures,
    TrigonometricRandomFeatures,
)
from tarnn.feature_maps.statistics import FittedMap, Spread, spread_of
from tarnn.ops import linear_attention, softmax_attention

FULL = {
    "length": 4096,
    "head_dim": 16,
    "draws": 15,
    "features": [16, 32, 64, 128, 256],
    "sigma": [0.5, 1.0],
    "stories": Path,
    "encoder": Path,
    "texts": Path,
    "threads": 1,
}
QUICK = {"length": 512, "draws": 5, "features": [16, 64]}
ABOUT = {
    "sigma": "of random q and k",
    "stories": "stories260K.bin of llama2.c",
    "encoder": "a Hugging Face folder of an encoder, such as MiniLM",
    "texts": "lines for the encoder; half to fit to, half to judge by",
}
Make = Callable[..., FeatureMap]
METHODS: dict[str, tuple[Make, str]] = {  # name → (the map for d, m, heads, seed; how it is drawn in the picture)
    "trigonometric, iid": (
        lambda d, m, g, s: TrigonometricRandomFeatures(d, m, directions="iid", seed=s),
        f"{GREY} --",
    ),
    "trigonometric, orthogonal": (lambda d, m, g, s: TrigonometricRandomFeatures(d, m, seed=s), f"{GREY} -"),
    "positive, iid": (lambda d, m, g, s: PositiveRandomFeatures(d, m, directions="iid", seed=s), f"{BLUE} --"),
    "positive, orthogonal (FAVOR+)": (lambda d, m, g, s: PositiveRandomFeatures(d, m, seed=s), f"{BLUE} -"),
    "SMREG": (lambda d, m, g, s: RegularizedRandomFeatures(d, m, seed=s), f"{SKY} -"),
    "FAVOR++ (OPRF)": (lambda d, m, g, s: OptimalRandomFeatures(d, m, num_heads=g, seed=s), f"{RED} -"),
    "FAVOR+, centred": (
        lambda d, m, g, s: Reparametrized(PositiveRandomFeatures(d, m, seed=s), num_heads=g, balance=False),
        f"{GREEN} --",
    ),
    "SADERF": (
        lambda d, m, g, s: Reparametrized(OptimalRandomFeatures(d, m, num_heads=g, seed=s), num_heads=g, centre=False),
        f"{RED} --",
    ),
    "SDERF": (lambda d, m, g, s: SderfFeatures(d, m, num_heads=g, seed=s), f"{ORANGE} --"),
    "DARKFormer": (lambda d, m, g, s: DataAwareRandomFeatures(d, m, num_heads=g, seed=s), f"{ORANGE} -"),
    "DARKFormer, centred, balanced": (
        lambda d, m, g, s: Reparametrized(DataAwareRandomFeatures(d, m, num_heads=g, seed=s), num_heads=g),
        f"{ORANGE} :",
    ),
    "FAVOR++, centred, balanced": (
        lambda d, m, g, s: Reparametrized(OptimalRandomFeatures(d, m, num_heads=g, seed=s), num_heads=g),
        f"{GREEN} -",
    ),
}


UNDRAWN = {"SADERF", "SDERF", "DARKFormer, centred, balanced"}  # near others; the table has them


class Problem(NamedTuple):
    """Attention to be estimated. `spreads`: of q and k a layer, for calibration; None: fitted by the call."""

    name: str
    layers: list[Layer]
    causal: bool
    mask: Tensor | None = None  # (b, t), of keys and queries
    spreads: list[tuple[Spread, Spread]] | None = None


def main() -> int:
    lists = {"methods": list(METHODS)}
    options = parse(__file__, __doc__, FULL | lists, QUICK, choices=lists, about=ABOUT)
    return run(options, measure, report=report, figure=figure)


@torch.no_grad()
def measure(options, results: dict[str, dict[str, dict[int, list[float]]]], keep) -> None:
    if (options.encoder is None) != (options.texts is None):
        raise Unmeasured("--encoder and --texts go together.")
    for problem in problems(options):
        print(f"{problem.name} …", flush=True)
        results[problem.name] = errors_of(problem, options)
        keep()


def problems(options: argparse.Namespace) -> Iterable[Problem]:
    """Random data of each size; then the trained models that were named."""
    generator = torch.Generator().manual_seed(0)
    shape = (1, 1, options.length, options.head_dim)
    for sigma in options.sigma:
        q, k, v = (torch.randn(shape, generator=generator) for _ in range(3))
        yield Problem(f"normal, σ = {sigma:g}", [Layer(sigma * q, sigma * k, v)], causal=False)
    if options.stories is not None:
        model = stories_model(options.stories)
        ids = own_stories(model, 8, 64 if options.quick else 256)
        seen, judged = layers_of(model, ids[:4]), layers_of(model, ids[4:])
        yield Problem("stories260K", judged, causal=True, spreads=spreads_of(seen, None))
    if options.encoder is not None:
        texts = options.texts.read_text().splitlines()
        layers, mask = encoder_layers(options.encoder, texts)
        half = len(texts) // 2
        seen, judged = (
            [Layer(*(x[cut] for x in layer)) for layer in layers] for cut in (slice(half), slice(half, None))
        )
        yield Problem(
            options.encoder.name, judged, causal=False, mask=mask[half:], spreads=spreads_of(seen, mask[:half])
        )


def spreads_of(layers: list[Layer], mask: Tensor | None) -> list[tuple[Spread, Spread]]:
    """A layer's queries' and keys', a key head, over all rows."""
    heads = layers[0].k.shape[1]
    return [
        (
            spread_of(x.q, heads, mask=mask, full=True).over_batch(),
            spread_of(x.k, heads, mask=mask, full=True).over_batch(),
        )
        for x in layers
    ]


def errors_of(problem: Problem, options: argparse.Namespace) -> dict[str, dict[int, list[float]]]:
    """Method → number of features → an error a draw, over all layers, rows and heads."""
    exact = [
        masked(softmax_attention(*x, causal=problem.causal, key_mask=problem.mask), problem.mask)
        for x in problem.layers
    ]
    heads, head_dim = problem.layers[0].k.shape[1], problem.layers[0].q.shape[-1]
    found: dict[str, dict[int, list[float]]] = {}
    for name in options.methods:
        for m in options.features:

            def make(i: int, draw: int, m=m, name=name) -> FeatureMap:
                return METHODS[name][0](head_dim, m, heads, 1000 * draw + i)

            errors = [error_of(problem, exact, partial(make, draw=draw)) for draw in range(options.draws)]
            found.setdefault(name, {})[m] = errors
    return found


def error_of(problem: Problem, exact: list[Tensor], make: Callable[[int], FeatureMap]) -> float:
    """‖ô − o‖²/‖o‖² over all layers, each with a draw of its own: make(layer)."""
    above = below = 0.0
    for i, (layer, o) in enumerate(zip(problem.layers, exact)):
        phi: Any = make(i)
        if isinstance(phi, FittedMap):
            if problem.spreads is None:
                phi = phi.fitted(layer.q, layer.k)
            else:
                phi.calibrate(*problem.spreads[i])
        estimate = attend(*layer, phi, causal=problem.causal, key_mask=problem.mask)
        above += masked(estimate - o, problem.mask).double().square().sum().item()
        below += o.double().square().sum().item()
    return above / below


def attend(
    q: Tensor, k: Tensor, v: Tensor, feature_map: FeatureMap, *, causal: bool, key_mask: Tensor | None = None
) -> Tensor:
    """Linear attention divided by the sum of its weights, be they negative or not."""
    phi = feature_map if feature_map.positive else Divided(feature_map)
    o = linear_attention(q, k, v, phi, causal=causal, key_mask=key_mask)
    assert isinstance(o, Tensor)
    return o


class Divided(FeatureMap):
    """A signed map that claims to be none: for a measurement, not for a model."""

    def __init__(self, feature_map: FeatureMap):
        super().__init__()
        self.queries, self.keys = feature_map.queries, feature_map.keys  # type: ignore[method-assign]


def masked(o: Tensor, mask: Tensor | None) -> Tensor:
    return o if mask is None else o.masked_fill(~mask[:, None, :, None], 0.0)


def quantiles(errors: list[float]) -> list[float]:
    """10 %, median, 90 %."""
    return torch.tensor(errors, dtype=torch.float64).quantile(torch.tensor([0.1, 0.5, 0.9]).double()).tolist()


def report(options, facts, results) -> str:
    parts = [
        f"‖ô − o‖²/‖o‖², median over {options.draws} draws (10 % – 90 %). Random data: t = {options.length}, "
        f"d = {options.head_dim}, attention to both sides, maps fitted by the call. Trained models: maps calibrated on "
        "other text. A number above 1 is worse than answering zero."
    ]
    for name, methods in results.items():
        features = list(next(iter(methods.values())))
        rows = [[method, *(cell(errors[m]) for m in features)] for method, errors in methods.items()]
        parts += [f"## {name}", markdown(["features", *map(str, features)], rows)]
    return page("The error of attention with random features", *parts)


def cell(errors: list[float]) -> str:
    low, middle, high = quantiles(errors)
    return f"{middle:.2g} ({low:.2g} – {high:.2g})"


def figure(options, facts, results):
    """Draw most of the maps with orthogonal directions; the table has the others too."""
    made, axes_of = panels(len(results), width=4.2, height=4.6)
    for axes, (name, methods) in zip(axes_of, results.items()):
        middles = {method: [quantiles(x)[1] for x in errors.values()] for method, errors in methods.items()}
        for i, (method, errors) in enumerate((x, methods[x]) for x in methods if "iid" not in x and x not in UNDRAWN):
            color, line = METHODS[method][1].split()
            low, middle, high = zip(*(quantiles(x) for x in errors.values()))
            bars = [[a - b for a, b in zip(middle, low)], [b - a for a, b in zip(middle, high)]]
            at = [int(m) * 1.03 ** (i - len(methods) / 2) for m in errors]  # side by side
            axes.errorbar(at, middle, yerr=bars, color=color, linestyle=line, marker=".", capsize=2, label=method)
        label(axes, "features", "‖ô − o‖²/‖o‖²", title=name, ticks=[int(m) for m in errors])
        axes.set_ylim(top=6 * max(max(x) for method, x in middles.items() if "trigonometric" not in method))
    return made


if __name__ == "__main__":
    raise SystemExit(main())
