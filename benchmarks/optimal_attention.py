"""How far from the best that any attention could do: figure 3 of "Rethinking Attention with Performers".

    python benchmarks/optimal_attention.py           # five minutes; benchmarks/results/optimal_attention.{json,md,png}
    python benchmarks/optimal_attention.py --quick   # under a minute; runs/benchmarks/optimal_attention.{json,md,png}

A training step (forward, loss, backward) of one sequence of t tokens, by the model's attention: Performer (FAVOR+ with
256 features), softmax (torch's SDPA), and none, where each position sees its own value only: what the paper calls
"X (OPT)". The model is the paper's regular one in width, 8 heads, 512 wide, feed-forward 2048, vocabulary 256, with 2 of
its 6 layers, which are all alike; causal, float32, without dropout. The three take turns on the same tokens. What would
take too long, by a shorter length's time, is left out and listed. Correctness is checked first: with Performer attention,
loss and gradients are those of plain PyTorch. Choromanski et al. 2021 (arXiv 2009.14794), section 4.1.
"""

import sys
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
from toolkit import model_steps
from toolkit.model_steps import Found, draw_tokens, step_call, table

from scripts.common.clock import Contender
from scripts.common.options import parse
from scripts.common.plots import BLUE, GREY, RED
from scripts.common.results import run
from scripts.common.tables import bullets, page, source
from scripts.common.targets import GUARANTEE
from tarnn.models import TarnnConfig, TarnnForCausalLM

PATIENCE = 4.0  # seconds per step beyond which one must do
VOCABULARY = 256
METHODS = {"performer": ("linear", 1), "softmax": ("softmax", 2), "none": ("none", 1)}  # attention, power of t
COLORS = {"performer": BLUE, "softmax": RED, "none": GREY}
FULL = {
    "lengths": [1024, 2048, 4096, 8192, 16384, 32768],
    "layers": 2,
    "hidden_size": 512,
    "features": 256,
    "methods": list(METHODS),
    "longest_call": 60.0,
}
QUICK = {"lengths": [256, 1024], "layers": 1}
ABOUT = {
    "layers": "6 are the paper's",
    "features": "m",
    "longest_call": "seconds per step beyond which a model is left out",
}


def main() -> int:
    options = parse(__file__, __doc__, FULL, QUICK, choices={"methods": list(METHODS)}, about=ABOUT)
    left_out: list[str] = []

    def measure(options, found: Found, keep) -> None:
        for t in sorted(set(options.lengths)):
            found[t] = measure_length(t, options, found, left_out)
            keep()

    facts = lambda options, found: {"left_out": left_out}  # noqa: E731
    return run(options, measure, check=check, facts=facts, report=report, figure=figure)


def check(options) -> str:
    return model_steps.wrong(make_model("performer", options), draw_tokens(2, 70, VOCABULARY), model_steps.step)


def make_model(name: str, options) -> TarnnForCausalLM:
    """The paper's regular model, in width: LayerNorm before each sublayer, GELU, positions added to the embedding."""
    torch.manual_seed(0)
    config = TarnnConfig(
        vocab_size=VOCABULARY,
        hidden_size=options.hidden_size,
        num_hidden_layers=options.layers,
        num_attention_heads=8,
        intermediate_size=4 * options.hidden_size,
        attention=METHODS[name][0],
        feature_map="favor",
        feature_map_options={"favor": {"num_features": options.features}},
        decay="none",
        position="sinusoidal",
        norm="layer",
        mlp="gelu",
        bias=True,
        qk_norm=False,
    )
    return TarnnForCausalLM(config).train()


def measure_length(t: int, options, found: Found, left_out: list[str]):
    """A timing for each model that does not take too long; for the others a line in `left_out`."""
    tokens = draw_tokens(1, t, VOCABULARY)
    contenders = {}
    for name in options.methods:
        if why := too_long(name, t, found, options.longest_call):
            left_out.append(f"{name}, t = {t:,}: {why}")
            print(f"without {left_out[-1]}")
        else:
            contenders[name] = Contender(step_call(make_model(name, options), tokens), PATIENCE)
    return model_steps.measure(t, contenders)


def too_long(name: str, t: int, found: Found, longest: float) -> str:
    """Why not to try, or nothing: by the longest that was measured before."""
    known = [shorter for shorter, at in found.items() if name in at]
    if not known:
        return ""
    shorter = max(known)
    seconds = found[shorter][name].ms / 1000 * (t / shorter) ** METHODS[name][1]
    return f"a step would take about {seconds:.0f} s, by t = {shorter:,}" if seconds > longest else ""


def report(options, facts: dict[str, Any], found: Found) -> str:
    how = (
        f"One sequence of t tokens through {options.layers} layers of 8 heads, {options.hidden_size} wide, feed-forward "
        f"{4 * options.hidden_size}, causal, float32: forward, loss, backward. performer: FAVOR+ with {options.features} "
        "features. none: a position sees its own value only, the paper's X (OPT). Medians, in turns; a time with * is of "
        "one step."
    )
    ratios = (("performer", "none"), ("softmax", "none"), ("softmax", "performer"))
    return page(
        "A training step against the best that attention could do",
        source(facts, how),
        GUARANTEE,
        table(found, options.methods, ratios),
        "## Left out",
        bullets(facts["left_out"]),
    )


def figure(options, facts: dict[str, Any], found: Found):
    title = f"a training step of one sequence; {facts['machine']['cpu']}, {facts['threads']} threads"
    return model_steps.figure(found, COLORS, title, memory_scale="log")


if __name__ == "__main__":
    sys.exit(main())
