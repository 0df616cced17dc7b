"""What float32 products by oneDNN, and bfloat16, are worth: training steps, and products alone.

    python benchmarks/products.py        # eight minutes on two cores; benchmarks/results/products.{json,md}

On x86, torch computes float32 products by MKL. `tarnn train` and other commands let oneDNN compute them where it keeps float32's
error (`tarnn.fast_matmul`). Contenders take turns, on one thread and on two: a step as `tarnn train` makes it (forward, loss,
backward, clipping, fused AdamW) with products by MKL, by oneDNN, and with --bf16; and products of a few sizes around the one from
which oneDNN is chosen (`tarnn.matmul.LEAST`).

Checked first: the gradients with oneDNN's products err at most 4 times as much against float64 as with MKL's.
"""

import copy
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from math import prod
from pathlib import Path

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parents[1]))
from toolkit.model_steps import draw_tokens

from scripts.common.clock import Contender, Effort, Timing, measure_in_turns, with_threads
from scripts.common.options import parse
from scripts.common.results import run
from scripts.common.tables import markdown, milliseconds, page, source
from scripts.common.targets import Target, at_least, section
from tarnn.matmul import FAST, HIGHEST, LEAST, refusal
from tarnn.models import TarnnConfig, TarnnForCausalLM

SIZES = {"128 × 4": (4, 256), "256 × 8": (4, 512), "512 × 8": (4, 512)}  # hidden × layers: batch, length
PRODUCTS = ((256, 64), (2048, 64), (128, 128), (512, 128), (32, 512), (128, 512))  # rows, channels
FULL = {"sizes": [*SIZES], "threads_each": [1, 2], "seconds": 8.0}
QUICK = {"sizes": ["32 × 1"], "threads_each": [1], "seconds": 0.01}
ABOUT = {"sizes": "hidden × layers", "threads_each": "numbers of threads", "seconds": "for a contender"}
MKL, ONEDNN, BF16 = "MKL", "oneDNN", "bf16"
FASTER, BOUND = 1.7, 4.0
Found = dict[str, dict[str, Timing]]


def main() -> int:
    options = parse(__file__, __doc__, FULL, QUICK, about=ABOUT)
    facts = lambda *_: {"chosen": refusal() or "oneDNN in float32"}  # noqa: E731
    return run(options, measure, check=check, facts=facts, targets=targets, report=report)


def make_model(size: str) -> TarnnForCausalLM:
    hidden, layers = map(int, size.split(" × "))
    torch.manual_seed(0)
    heads = 4 if hidden < 256 else 8
    config = TarnnConfig(hidden_size=hidden, num_hidden_layers=layers, num_attention_heads=heads)
    return TarnnForCausalLM(config).train()


@contextmanager
def use_precision(precision: str) -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def check(options) -> str:
    """What is wrong with gradients by oneDNN's products, or nothing."""
    model, tokens = make_model("128 × 4"), draw_tokens(4, 256)
    exact = gradient(copy.deepcopy(model).double(), tokens)
    errors = []
    for precision in (HIGHEST, FAST):
        with use_precision(precision):
            errors.append((gradient(model, tokens) - exact).norm())
    rounds = refusal() != "" or errors[1] <= BOUND * errors[0]  # where tarnn keeps MKL, oneDNN may round
    return "" if rounds else f"gradients err {errors[1] / errors[0]:.0f} times as much as with MKL's products"


def gradient(model: TarnnForCausalLM, tokens: Tensor) -> Tensor:
    model.zero_grad()
    model(tokens, labels=tokens, use_cache=False).loss.backward()
    return torch.cat([x.grad.double().flatten() for x in model.parameters() if x.grad is not None])


def measure(options, found: Found, keep: Callable[[], None]) -> None:
    effort = Effort(seconds_a_round=0, seconds=options.seconds, rounds=(3, 9))
    for threads in options.threads_each:
        cases = [(f"step {size}", steps(size), effort) for size in options.sizes]
        sizes = PRODUCTS[: 1 if options.quick else None]
        cases += [(f"{n} × {c} × {c}", products(n, c), Effort(0.01, min(0.3, options.seconds))) for n, c in sizes]
        for name, contenders, its_effort in cases:
            with with_threads(threads):
                found[f"{name}; {threads}"] = timings = measure_in_turns(contenders, its_effort)
            times = ", ".join(f"{who} {milliseconds(x)}" for who, x in timings.items())
            print(f"{name}, {threads} threads: {times} ms", flush=True)
            keep()


def steps(size: str) -> dict[str, Contender]:
    model, tokens = make_model(size), draw_tokens(*SIZES.get(size, (2, 16)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, betas=(0.9, 0.95), fused=True)

    def step(bf16: bool = False) -> None:
        with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
            loss = model(tokens, labels=tokens, use_cache=False).loss
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        model.zero_grad()

    return by_library(step) | {BF16: Contender(partial(step, bf16=True), 20.0)}


def products(rows: int, channels: int) -> dict[str, Contender]:
    """The products of a linear layer: forward, and the gradients of inputs and weights."""
    x, weight, grad = torch.randn(rows, channels), torch.randn(channels, channels), torch.randn(rows, channels)
    return by_library(lambda: (torch.mm(x, weight.T), torch.mm(grad, weight), torch.mm(grad.T, x)))


def by_library(call: Callable[[], object]) -> dict[str, Contender]:
    ways = {MKL: HIGHEST, ONEDNN: FAST}
    return {name: Contender(call, 20.0, partial(use_precision, precision)) for name, precision in ways.items()}


def faster(x: dict[str, Timing], name: str = ONEDNN) -> float:
    return x[MKL].ms / x[name].ms


def size_of(name: str) -> int:
    """Multiplications of "rows × inputs × outputs; threads"."""
    return prod(map(int, name.partition(";")[0].split(" × ")))


def targets(found: Found) -> list[Target]:
    gains = {name: faster(x) for name, x in found.items() if name.startswith("step")}
    never = gains | {name: faster(x) for name, x in found.items() if name[0].isdigit() and size_of(name) >= LEAST}
    return [
        at_least(f"a step by oneDNN: at least {FASTER:g} times as fast as by MKL", "measured", FASTER, gains),
        at_least("never slower: steps, and products that are large enough", "measured", 1.0, never),
    ]


def report(options, facts, found: Found) -> str:
    steps = {name.removeprefix("step "): x for name, x in found.items() if name.startswith("step")}
    alone = {name: x for name, x in found.items() if name[0].isdigit()}
    sizes = ", ".join(f"{size}: {batch} × {t} tokens" for size, (batch, t) in SIZES.items())
    return page(
        "Float32 products by oneDNN, and bfloat16",
        source(facts, f"Chosen here: {facts['chosen']}. Milliseconds; medians, in turns. {sizes}."),
        section(targets(found)),
        "## A training step",
        markdown(
            ["model; threads", MKL, ONEDNN, BF16, "MKL / oneDNN", "MKL / bf16"],
            [
                [name, *map(milliseconds, x.values()), f"{faster(x):.2f}", f"{faster(x, BF16):.2f}"]
                for name, x in steps.items()
            ],
        ),
        "## Products of a linear layer, forward and backward",
        f"oneDNN is chosen for products of {LEAST:,} multiplications on average.",
        markdown(
            ["rows × inputs × outputs; threads", "multiplications", MKL, ONEDNN, "MKL / oneDNN"],
            [
                [name, f"{size_of(name):,}", *map(milliseconds, x.values()), f"{faster(x):.2f}"]
                for name, x in alone.items()
            ],
        ),
    )


if __name__ == "__main__":
    sys.exit(main())
