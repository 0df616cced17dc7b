"""What linear attention is worth in training: one step of the model of 2020, with linear attention, softmax, and none.

    python benchmarks/training_step.py       # about six minutes; benchmarks/results/training_step.{json,md,png}

The claim: a step costs the same at every length, little more than without any attention at all. 8 layers of 8 heads,
256 wide (`TarnnConfig.paper()`), float32, a vocabulary of 257, batch × t = 16,384 tokens: forward, loss, backward, and
with `--optimizer adamw` its update too. The three models take turns on the same tokens. Correctness is checked first:
with linear attention, loss and gradients are those of plain PyTorch.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import model_steps
import torch
from clock import Contender, Effort, Timing
from model_steps import Found, draw_tokens, step_call, table
from provenance import kernels, provenance, results_folder
from rivals import without_native_kernels
from targets import Target, at_least, at_most, summary, target_table

from tarnn.models import TarnnConfig, TarnnForCausalLM

LENGTHS, TOKENS = (256, 1024, 4096, 16384), 16384
PATIENCE = 12.0  # seconds a step beyond which one must do
PLAIN = "linear-in-pytorch"
RIVALS = {"linear": "linear", "softmax": "softmax", "none": "none", PLAIN: "linear"}  # name: attention
COLORS = {"linear": "#0072b2", "softmax": "#d55e00", "none": "#999999", PLAIN: "#56b4e9"}
FASTER_THAN_SOFTMAX = {4096: 2.0, 16384: 6.0}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--out", type=Path, help="folder; benchmarks/results for the whole run, else runs/benchmarks"
    )
    parser.add_argument("--lengths", type=int, nargs="+", default=LENGTHS)
    parser.add_argument("--tokens", type=int, default=TOKENS, help="a step: batch size × length")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--rivals", nargs="+", choices=RIVALS, default=("linear", "softmax", "none"))
    parser.add_argument("--optimizer", choices=("none", "adamw"), default="none")
    parser.add_argument("--threads", type=int, help="torch's own choice by default")
    whole = vars(parser.parse_args([]))
    options = parser.parse_args()
    if options.threads:
        torch.set_num_threads(options.threads)
    chosen = {name for name, value in vars(options).items() if value != whole[name]}
    options.out = options.out or results_folder(whole=chosen <= {"threads"})
    if wrong := model_steps.wrong(make_model("linear", layers=2), draw_tokens(2, 70)):
        print(f"the check is red, so nothing is measured: {wrong}", file=sys.stderr)
        return 1
    found: Found = {}
    interrupted = False
    try:
        for t in sorted(set(options.lengths)):
            found[t] = measure(t, options)
            write(options, found)
    except KeyboardInterrupt:
        interrupted = True
    if any(found.values()):
        print(f"targets: {summary(targets(found))}")
        print(*(options.out / f"training_step.{x}" for x in ("json", "md", "png")), sep="\n")
    return 130 if interrupted else 0


def measure(t: int, options) -> dict[str, Timing]:
    tokens = draw_tokens(max(1, options.tokens // t), t)
    contenders = {
        name: Contender(
            step_call(make_model(RIVALS[name], options.layers), tokens, options.optimizer),
            PATIENCE,
            *([without_native_kernels] if name == PLAIN else []),
        )
        for name in options.rivals
    }
    return model_steps.measure(t, contenders, Effort(seconds_a_round=0, rounds=(3, 7), seconds=8))


def make_model(attention: str, layers: int) -> TarnnForCausalLM:
    torch.manual_seed(0)
    return TarnnForCausalLM(TarnnConfig.paper(attention=attention, num_hidden_layers=layers)).train()


def targets(found: Found) -> list[Target]:
    """Whatever kernels serve: `linear` is what a user gets."""
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


def report(facts: dict[str, Any], found: Found, rivals: Sequence[str], judged: Sequence[Target]) -> str:
    update = "no optimizer" if facts["optimizer"] == "none" else f"and {facts['optimizer']}'s update"
    return "\n\n".join(
        (
            "# A training step of the model of 2020",
            f"`{facts['command']}`",
            f"{facts['machine']['cpu']}, {facts['threads']} threads; torch {facts['versions']['torch']}. "
            f"{facts['layers']} layers of 8 heads, 256 wide, float32; batch × t = {facts['tokens']:,} tokens; "
            f"forward, loss, backward, {update}. "
            f"Kernels: {facts['kernels']}. Medians, in turns; a time with * is of one step.",
            f"## Targets of this benchmark: {summary(judged)}",
            target_table(judged),
            "## Time and memory",
            table(found, rivals, (("softmax", "linear"), ("linear", "none"))),
        )
    )


def write(options, found: Found) -> None:
    judged = targets(found)
    facts = {
        **provenance(), "kernels": kernels(), "layers": options.layers, "tokens": options.tokens,
        "optimizer": options.optimizer, "targets": [t.as_json() for t in judged],
    }  # fmt: skip
    results = {str(t): {name: asdict(x) for name, x in at.items()} for t, at in found.items()}
    options.out.mkdir(parents=True, exist_ok=True)
    text = json.dumps({**facts, "results": results}, indent=2, ensure_ascii=False)
    (options.out / "training_step.json").write_text(text + "\n")
    (options.out / "training_step.md").write_text(report(facts, found, options.rivals, judged) + "\n")
    title = (
        f"a training step of the same number of tokens; {facts['machine']['cpu']}, {facts['threads']} threads"
    )
    model_steps.plot(found, COLORS, options.out / "training_step.png", title)


if __name__ == "__main__":
    sys.exit(main())
