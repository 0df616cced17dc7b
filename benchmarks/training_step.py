"""What linear attention is worth in training: one step of the model of 2020, with linear attention, softmax, and none.

    python benchmarks/training_step.py       # about six minutes; benchmarks/results/training_step.{json,md,png}

The claim: a step costs the same at every length, little more than without any attention at all. 8 layers of 8 heads,
256 wide (`TarnnConfig.paper()`), float32, a vocabulary of 257, batch × t = 16,384 tokens: forward, loss, backward, and
with `--optimizer adamw` its update too. The three models take turns on the same tokens. Correctness is checked first:
with linear attention, loss and gradients are those of plain PyTorch.
"""

import sys
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
import model_steps
from model_steps import Found, draw_tokens, step_call, table

from scripts.common.clock import Contender
from scripts.common.options import parse
from scripts.common.plots import ATTENTION, SKY
from scripts.common.results import run
from scripts.common.tables import page, source
from scripts.common.targets import Target, at_least, at_most, section
from tarnn.kernels.cpu import library
from tarnn.models import TarnnConfig, TarnnForCausalLM

PATIENCE = 12.0  # seconds per step beyond which one must do
PLAIN = "linear-in-pytorch"
METHODS = {"linear": "linear", "softmax": "softmax", "none": "none", PLAIN: "linear"}  # name: attention
FASTER_THAN_SOFTMAX = {4096: 2.0, 16384: 6.0}
FULL = {
    "lengths": [256, 1024, 4096, 16384], "tokens": 16384, "layers": 8, "methods": ["linear", "softmax", "none"],
    "optimizer": "none",
}  # fmt: skip
QUICK = {"lengths": [256, 1024], "tokens": 1024, "layers": 1}
CHOICES = {"methods": list(METHODS), "optimizer": ["none", "adamw"]}


def main() -> int:
    about = {"tokens": "per step: batch size × length"}
    options = parse(__file__, __doc__, FULL, QUICK, choices=CHOICES, about=about)
    return run(options, measure, check=check, facts=facts, report=report, figure=figure)


def check(options) -> str:
    return model_steps.wrong(make_model("linear", layers=2), draw_tokens(2, 70))


def measure(options, found: Found, keep) -> None:
    for t in sorted(set(options.lengths)):
        tokens = draw_tokens(max(1, options.tokens // t), t)
        contenders = {
            name: Contender(
                step_call(make_model(METHODS[name], options.layers), tokens, options.optimizer),
                PATIENCE,
                *([library.disabled] if name == PLAIN else []),
            )
            for name in options.methods
        }
        found[t] = model_steps.measure(t, contenders)
        keep()


def make_model(attention: str, layers: int) -> TarnnForCausalLM:
    torch.manual_seed(0)
    return TarnnForCausalLM(TarnnConfig.paper(attention=attention, num_hidden_layers=layers)).train()


def targets(found: Found) -> list[Target]:
    """By whatever computes here: `linear` is what a user gets."""
    judged = []
    case = "measured"
    for t, bound in FASTER_THAN_SOFTMAX.items():
        at = found.get(t, {})
        ratio = {"": at["softmax"].ms / at["linear"].ms} if {"softmax", "linear"} <= at.keys() else {}
        judged.append(
            at_least(f"t = {t:,}: at least {bound:g} times faster than softmax (SDPA)", case, bound, ratio)
        )
    ratios = {
        f"t = {t:,}": x["linear"].ms / x["none"].ms
        for t, x in found.items()
        if {"linear", "none"} <= x.keys()
    }
    judged.append(at_most("at most 1.2 times as long as without attention, at every t", case, 1.2, ratios))
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
        "A training step of the model of 2020", source(facts, how), section(targets(found)), "## Time and memory",
        table(found, options.methods, (("softmax", "linear"), ("linear", "none"))),
    )  # fmt: skip


def figure(options, facts: dict[str, Any], found: Found):
    on = f"{facts['machine']['cpu']}, {facts['threads']} threads"
    return model_steps.figure(
        found, ATTENTION | {PLAIN: SKY}, f"a training step of the same number of tokens; {on}"
    )


if __name__ == "__main__":
    sys.exit(main())
