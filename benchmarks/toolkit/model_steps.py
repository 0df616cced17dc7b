"""Training steps of whole models, in turns: how they are made, measured, and shown against length."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from scripts.common.clock import Contender, Effort, Timing, measure_in_turns
from scripts.common.plots import label, line, panels
from scripts.common.tables import MIB, markdown, mebibytes, milliseconds, ratio
from tarnn.decoding.fused import FusedStep, refusal
from tarnn.kernels.cpu import library
from tarnn.models import TarnnForCausalLM

EFFORT = Effort(seconds_a_round=0, rounds=(3, 7), seconds=8)
Found = dict[int, dict[str, Timing]]  # by length, by method


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


def wrong(model: Any, tokens: Tensor, step: Callable[[Any, Tensor], Tensor]) -> str:
    """What is wrong with a model's step, or nothing: loss and gradients against those of plain PyTorch."""
    loss_and_gradients = []
    for surroundings in (nullcontext, library.disabled):
        model.zero_grad()
        with surroundings():
            loss = step(model, tokens)
        loss_and_gradients.append([loss, *(p.grad for p in model.parameters())])
    for x, y in zip(*loss_and_gradients):
        if not (x - y).norm() <= 1e-4 * y.norm() + 1e-7:
            return f"off plain PyTorch by {(x - y).norm() / y.norm():.1e}"
    return ""


def wrong_token(model: TarnnForCausalLM, batch_size: int) -> str:
    """What is wrong with the fused step of a model, or nothing: five tokens' logits against those of model.step."""
    if reason := refusal(model):
        return reason
    step, ours, theirs = FusedStep(model), *(model.new_state(batch_size, capacity=8) for _ in range(2))
    for token in range(5):
        ids = torch.full((batch_size,), token)
        got, ours = step(ids, ours)
        expected, theirs = model.step(ids, theirs)
        if not torch.allclose(got, expected, rtol=1e-3, atol=1e-4):
            return f"the logits of token {token} are not those of model.step"
    return ""


def measure(t: int, contenders: Mapping[str, Contender]) -> dict[str, Timing]:
    """A timing a model, printed."""
    timings = measure_in_turns(contenders, EFFORT)
    for name, x in timings.items():
        peak = "" if x.peak_bytes is None else f"{x.peak_bytes / MIB:10.0f} MiB"
        print(f"t = {t:<8,}{name:24}{x.ms:10.0f} ms ({x.ms_min:.0f} – {x.ms_max:.0f}){peak}", flush=True)
    return timings


def table(found: Found, methods: Sequence[str], ratios: Sequence[tuple[str, str]]) -> str:
    """A row for each length: milliseconds, how many times as long one takes as another, peak memory."""
    head = ["t", *(f"{m}, ms" for m in methods), *(f"{over} / {under}" for over, under in ratios)]
    rows = []
    for t, at in found.items():
        timings = [at.get(m) for m in methods]
        times = [*map(milliseconds, timings), *(ratio(at.get(x), at.get(y)) for x, y in ratios)]
        rows.append([f"{t:,}", *times, *(x and mebibytes(x.peak_bytes, 0) for x in timings)])
    return markdown([*head, *(f"{m}, peak MiB" for m in methods)], rows, left=0)


def figure(found: Found, colors: Mapping[str, str], title: str, *, memory_scale: str = "linear") -> Any:
    """Draw milliseconds and memory against length. colors: by method, in the order of their names in the picture."""
    made, (times, sizes) = panels(2, title)
    for name, color in colors.items():
        timings = {int(t): at[name] for t, at in found.items() if name in at}
        line(times, ((t, x.ms) for t, x in timings.items()), color, name)
        line(sizes, ((t, x.peak_bytes and x.peak_bytes / MIB) for t, x in timings.items()), color, name)
    label(times, "length t", "milliseconds per step", ticks=[int(t) for t in found])
    label(sizes, "length t", "peak MiB", ticks=[int(t) for t in found], scales=f"log {memory_scale}")
    return made
