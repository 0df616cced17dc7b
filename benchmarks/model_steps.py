"""Training steps of whole models, in turns: how they are made, measured, and shown against length."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path

import torch
from clock import Contender, Effort, Timing, measure_in_turns
from rivals import without_native_kernels
from torch import Tensor

from tarnn.models import TarnnForCausalLM

Found = dict[int, dict[str, Timing]]  # by length, by rival


def draw_tokens(batch_size: int, t: int, vocab_size: int = 257) -> Tensor:
    torch.manual_seed(1)
    return torch.randint(0, vocab_size, (batch_size, t))


def step(model: TarnnForCausalLM, tokens: Tensor) -> Tensor:
    """Forward, loss, backward."""
    loss = model(tokens, labels=tokens, use_cache=False).loss
    loss.backward()
    return loss.detach()


def step_call(model: TarnnForCausalLM, tokens: Tensor, optimizer: str = "none") -> Callable[[], object]:
    update = None if optimizer == "none" else torch.optim.AdamW(model.parameters(), lr=1e-4).step

    def call() -> None:
        model.zero_grad(set_to_none=True)
        step(model, tokens)
        if update is not None:
            update()

    return call


def wrong(model: TarnnForCausalLM, tokens: Tensor) -> str:
    """What is wrong with a model's step, or nothing: loss and gradients against those of plain PyTorch."""
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


def measure(t: int, contenders: Mapping[str, Contender], effort: Effort) -> dict[str, Timing]:
    """A timing a model, printed."""
    timings = measure_in_turns(contenders, effort)
    for name, x in timings.items():
        peak = "" if x.peak_bytes is None else f"{x.peak_bytes / 2**20:10.0f} MiB"
        print(f"t = {t:<8,}{name:24}{x.ms:10.0f} ms ({x.ms_min:.0f} – {x.ms_max:.0f}){peak}", flush=True)
    return timings


def table(found: Found, rivals: Sequence[str], ratios: Sequence[tuple[str, str]]) -> str:
    """A row a length: milliseconds, how many times as long one takes as another, peak memory."""
    head = ["t", *(f"{r}, ms" for r in rivals), *(f"{over} / {under}" for over, under in ratios)]
    head += [f"{r}, peak MiB" for r in rivals]
    rows = [f"| {' | '.join(head)} |", f"|{'--:|' * len(head)}"]
    for t, at in found.items():
        row = [f"{t:,}", *(_ms(at.get(r)) for r in rivals)]
        row += [f"{at[x].ms / at[y].ms:.2f}" if {x, y} <= at.keys() else "–" for x, y in ratios]
        row += [f"{at[r].peak_bytes / 2**20:,.0f}" if r in at and at[r].peak_bytes else "–" for r in rivals]
        rows.append(f"| {' | '.join(row)} |")
    return "\n".join(rows)


def _ms(timing: Timing | None) -> str:
    return "–" if timing is None else f"{timing.ms:,.0f}" + ("*" if timing.rounds == 1 else "")


def plot(
    found: Found, colors: Mapping[str, str], path: Path, title: str, *, memory_scale: str = "linear"
) -> None:  # fmt: skip
    """Milliseconds and memory against length; `colors` by rival, in the legend's order."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.8), layout="constrained", dpi=150)
    panels = (
        ("milliseconds a step", "log", lambda x: x.ms),
        ("peak MiB", memory_scale, lambda x: (x.peak_bytes or 0) / 2**20),
    )
    for axes, (ylabel, scale, value) in zip(figure.subplots(1, 2), panels):
        for name, color in colors.items():
            points = [(t, value(at[name])) for t, at in found.items() if name in at]
            if points:
                axes.plot(*zip(*points), color=color, marker=".", label=name)
        axes.set(xscale="log", yscale=scale, xlabel="length t", ylabel=ylabel)
        axes.set_xticks(list(found), [f"{t:,}" for t in found])
        axes.minorticks_off()
        axes.grid(alpha=0.3)
    figure.axes[0].legend(frameon=False, title="attention", fontsize="small")
    figure.suptitle(title, fontsize="medium")
    figure.savefig(path)
