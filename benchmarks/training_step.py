"""What linear attention is worth in training: one step of the model of 2020, with linear attention, softmax, and none.

    python benchmarks/training_step.py       # about six minutes; benchmarks/results/training_step.{json,md,png}

The claim: a step costs the same at every length, little more than one whose attention is free. `projections` is that: the
four projections of attention, forward and backward, and nothing between them (o is v). `none` drops the projections of q
and k too, which no attention can do: of the 12 matrices of a layer, each hidden × hidden, it computes 10, so that already
the products of a model with attention take 1.2 times as long as its own. 8 layers of 8 heads,
256 wide (`TarnnConfig.paper()`), float32, a vocabulary of 257, batch × t = 16,384 tokens: forward, loss, backward, and
with `--optimizer adamw` its update too. The models take turns on the same tokens. Correctness is checked first:
with linear attention, loss and gradients are those of plain PyTorch.
"""

import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1]))
from toolkit import model_steps
from toolkit.model_steps import Found, draw_tokens, step_call, table

from scripts.common.clock import Contender
from scripts.common.options import parse
from scripts.common.plots import ATTENTION, ORANGE, SKY
from scripts.common.results import run
from scripts.common.tables import page, source
from scripts.common.targets import Target, at_least, at_most, section
from tarnn.kernels.cpu import library
from tarnn.models import TarnnConfig, TarnnForCausalLM

PATIENCE = 12.0  # seconds per step beyond which one must do
PLAIN = "linear-in-pytorch"
PROJECTIONS = "projections"
METHODS = {
    "linear": "linear",
    "softmax": "softmax",
    PROJECTIONS: "linear",
    "none": "none",
    PLAIN: "linear",
}  # name: attention
FASTER_THAN_SOFTMAX = {4096: 2.0, 16384: 6.0}
FULL = {
    "lengths": [256, 1024, 4096, 16384],
    "tokens": 16384,
    "layers": 8,
    "methods": ["linear", "softmax", PROJECTIONS, "none"],
    "optimizer": "none",
}
QUICK = {"lengths": [256, 1024], "tokens": 1024, "layers": 1}
CHOICES = {"methods": list(METHODS), "optimizer": ["none", "adamw"]}


def main() -> int:
    about = {"tokens": "per step: batch size × length"}
    options = parse(__file__, __doc__, FULL, QUICK, choices=CHOICES, about=about)
    return run(options, measure, check=check, facts=facts, report=report, figure=figure)


def check(options) -> str:
    return model_steps.wrong(make_model("linear", layers=2), draw_tokens(2, 70), model_steps.step)


def measure(options, found: Found, keep) -> None:
    for t in sorted(set(options.lengths)):
        tokens = draw_tokens(max(1, options.tokens // t), t)
        contenders = {
            name: Contender(
                step_call(make_model(name, options.layers), tokens, options.optimizer),
                PATIENCE,
                *([library.disabled] if name == PLAIN else []),
            )
            for name in options.methods
        }
        found[t] = model_steps.measure(t, contenders)
        keep()


def make_model(method: str, layers: int) -> TarnnForCausalLM:
    torch.manual_seed(0)
    config = TarnnConfig.paper(attention=METHODS[method], num_hidden_layers=layers)
    model = TarnnForCausalLM(config).train()
    if method == PROJECTIONS:
        for block in model.model.layers:
            block.attention.mix = values_for_outputs
    return model


def values_for_outputs(x: Tensor, q: Tensor, k: Tensor, v: Tensor, **_) -> tuple[Tensor]:
    return (FreeAttention.apply(q, k, v),)


class FreeAttention(torch.autograd.Function):
    """o = v, and a gradient for q and k all the same, so that their projections have their backward."""

    @staticmethod
    def forward(ctx, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return v.view_as(v)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return grad, grad, grad


def targets(found: Found) -> list[Target]:
    """By whatever computes here: `linear` is what a user gets."""
    judged = []
    case = "measured"
    for t, bound in FASTER_THAN_SOFTMAX.items():
        at = found.get(t, {})
        ratio = {"": at["softmax"].ms / at["linear"].ms} if {"softmax", "linear"} <= at.keys() else {}
        judged.append(at_least(f"t = {t:,}: at least {bound:g} times faster than softmax (SDPA)", case, bound, ratio))
    ratios = {
        f"t = {t:,}": x["linear"].ms / x[PROJECTIONS].ms
        for t, x in found.items()
        if {"linear", PROJECTIONS} <= x.keys()
    }
    judged.append(at_most("at most 1.2 times as long as the projections alone, at every t", case, 1.2, ratios))
    return judged


def facts(options, found: Found) -> dict[str, Any]:
    return {"tokens": options.tokens, "targets": [t.as_json() for t in targets(found)]}


def report(options, facts: dict[str, Any], found: Found) -> str:
    update = "no optimizer" if options.optimizer == "none" else f"and {options.optimizer}'s update"
    how = (
        f"{options.layers} layers of 8 heads, 256 wide, float32; batch × t = {options.tokens:,} tokens; forward, loss, "
        f"backward, {update}. Medians, in turns; a time with * is of one step."
    )
    return page(
        "A training step of the model of 2020",
        source(facts, how),
        section(targets(found)),
        "## Time and memory",
        table(found, options.methods, (("softmax", "linear"), ("linear", PROJECTIONS), ("linear", "none"))),
    )


def figure(options, facts: dict[str, Any], found: Found):
    on = f"{facts['machine']['cpu']}, {facts['threads']} threads"
    return model_steps.figure(
        found, ATTENTION | {PROJECTIONS: ORANGE, PLAIN: SKY}, f"a training step of the same number of tokens; {on}"
    )


if __name__ == "__main__":
    sys.exit(main())
