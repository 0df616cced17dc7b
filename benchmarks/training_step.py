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
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from clock import Contender, Effort, Timing, measure_in_turns
from provenance import kernels, provenance, results_folder
from rivals import without_native_kernels
from targets import Target, at_least, at_most, summary, target_table
from torch import Tensor

from tarnn.models import TarnnConfig, TarnnForCausalLM

LENGTHS, TOKENS = (256, 1024, 4096, 16384), 16384
PATIENCE = 12.0  # seconds a step beyond which one must do
PLAIN = "linear-in-pytorch"
RIVALS = {"linear": "linear", "softmax": "softmax", "none": "none", PLAIN: "linear"}  # name: attention
COLORS = {"linear": "#0072b2", "softmax": "#d55e00", "none": "#999999", PLAIN: "#56b4e9"}
FASTER_THAN_SOFTMAX = {4096: 2.0, 16384: 6.0}
Found = dict[int, dict[str, Timing]]  # by length, by rival


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
    if wrong := check():
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


def check() -> str:
    """What is wrong with the linear model's step, or nothing: loss and gradients against those of plain PyTorch."""
    model, tokens = make_model("linear", layers=2), draw_tokens(2, 70)
    loss_and_gradients = []
    for surroundings in (nullcontext, without_native_kernels):
        model.zero_grad()
        with surroundings():
            loss = step(model, tokens)
        loss_and_gradients.append([loss, *(p.grad for p in model.parameters())])
    for x, y in zip(*loss_and_gradients):
        if not (x - y).norm() <= 1e-4 * y.norm() + 1e-7:
            return f"off plain PyTorch by {(x - y).norm() / y.norm():.1e}"
    return ""


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
    timings = measure_in_turns(contenders, Effort(seconds_a_round=0, rounds=(3, 7), seconds=8))
    for name, x in timings.items():
        peak = "" if x.peak_bytes is None else f"{x.peak_bytes / 2**20:10.0f} MiB"
        print(f"t = {t:<8,}{name:24}{x.ms:10.0f} ms ({x.ms_min:.0f} – {x.ms_max:.0f}){peak}", flush=True)
    return timings


def make_model(attention: str, layers: int) -> TarnnForCausalLM:
    torch.manual_seed(0)
    return TarnnForCausalLM(TarnnConfig.paper(attention=attention, num_hidden_layers=layers)).train()


def draw_tokens(batch_size: int, t: int) -> Tensor:
    torch.manual_seed(1)
    return torch.randint(0, 257, (batch_size, t))


def step(model: TarnnForCausalLM, tokens: Tensor) -> Tensor:
    loss = model(tokens, labels=tokens, use_cache=False).loss
    loss.backward()
    return loss.detach()


def step_call(model: TarnnForCausalLM, tokens: Tensor, optimizer: str) -> Callable[[], object]:
    update = None if optimizer == "none" else torch.optim.AdamW(model.parameters(), lr=1e-4).step

    def call() -> None:
        model.zero_grad(set_to_none=True)
        step(model, tokens)
        if update is not None:
            update()

    return call


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


def table(found: Found, rivals: Sequence[str]) -> str:
    head = [
        "t",
        *(f"{r}, ms" for r in rivals),
        "softmax / linear",
        "linear / none",
        *(f"{r}, peak MiB" for r in rivals),
    ]
    rows = [f"| {' | '.join(head)} |", f"|{'--:|' * len(head)}"]
    for t, at in found.items():
        row = [f"{t:,}", *(_ms(at.get(r)) for r in rivals)]
        for over, under in (("softmax", "linear"), ("linear", "none")):
            row.append(f"{at[over].ms / at[under].ms:.2f}" if {over, under} <= at.keys() else "–")
        row += [f"{at[r].peak_bytes / 2**20:,.0f}" if r in at and at[r].peak_bytes else "–" for r in rivals]
        rows.append(f"| {' | '.join(row)} |")
    return "\n".join(rows)


def _ms(timing: Timing | None) -> str:
    return "–" if timing is None else f"{timing.ms:,.0f}" + ("*" if timing.rounds == 1 else "")


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
            table(found, rivals),
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
    plot(found, options.out / "training_step.png", f"{facts['machine']['cpu']}, {facts['threads']} threads")


def plot(found: Found, path: Path, title: str) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.8), layout="constrained", dpi=150)
    panels = (("milliseconds a step", lambda x: x.ms), ("peak MiB", lambda x: (x.peak_bytes or 0) / 2**20))
    for axes, (ylabel, value) in zip(figure.subplots(1, 2), panels):
        for name in RIVALS:
            points = [(t, value(at[name])) for t, at in found.items() if name in at]
            if points:
                axes.plot(*zip(*points), color=COLORS[name], marker=".", label=name)
        axes.set(xscale="log", xlabel="length t", ylabel=ylabel)
        axes.set_yscale("log" if ylabel.startswith("milli") else "linear")
        axes.set_xticks(list(found), [f"{t:,}" for t in found])
        axes.minorticks_off()
        axes.grid(alpha=0.3)
    figure.axes[0].legend(frameon=False, title="attention", fontsize="small")
    figure.suptitle(f"a training step of the same number of tokens; {title}", fontsize="medium")
    figure.savefig(path)


if __name__ == "__main__":
    sys.exit(main())
