"""What float32 products by oneDNN, and bfloat16, are worth: training steps, a prompt, and products alone.

    python benchmarks/products.py        # ten minutes on two cores; benchmarks/results/products.{json,md}

On x86, torch computes float32 products by MKL. `tarnn train` and other commands let oneDNN compute them where it keeps float32's
error (`tarnn.fast_matmul`). Contenders take turns, on one thread and on two:

* a step as `tarnn train` makes it (forward, loss, backward, clipping, fused AdamW, without the Trainer): products by MKL, by what
  `tarnn train` chooses here, and with --bf16;
* the products of the linear layers in such a step alone, forward and backward, by each library. The faster of them, divided
  by the step's time, is the share of a step that its products need;
* a prompt of 4,096 tokens through `model.prefill`;
* products of a few sizes around the one from which oneDNN is chosen (`tarnn.matmul.LEAST`).

Checked first: the gradients of the chosen products err at most 4 times as much against float64 as MKL's.
"""

import copy
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parents[1]))
from toolkit.model_steps import draw_tokens

from scripts.common.clock import Contender, Effort, Timing, measure_in_turns, with_threads
from scripts.common.options import parse
from scripts.common.results import run
from scripts.common.tables import markdown, milliseconds, page, source
from scripts.common.targets import Target, at_least, section
from tarnn.matmul import FAST, HIGHEST, LEAST, product_size, refusal
from tarnn.models import TarnnConfig, TarnnForCausalLM

SIZES = {"128 × 4": (4, 256), "256 × 8": (4, 512), "512 × 8": (4, 512)}  # hidden × layers: batch, length
SMALL = ((256, 64), (2048, 64), (128, 128), (512, 128), (32, 512), (128, 512))  # rows, channels
FULL = {"sizes": [*SIZES], "threads_each": [1, 2], "prompt": 4096, "prompt_size": "256 × 8", "seconds": 8.0}
QUICK = {"sizes": ["32 × 1"], "threads_each": [1], "prompt": 64, "prompt_size": "32 × 1", "seconds": 0.01}
MKL, CHOSEN, BF16, ONEDNN = "MKL", "chosen", "bf16", "oneDNN"
PRODUCTS = "products, "
BOUND = 4.0  # times the error of MKL
FASTER, SHARE = 1.7, 0.7
PATIENCE = 20.0  # seconds for a call beyond which one must do
Found = dict[str, dict[str, Timing]]


def main() -> int:
    about = {"sizes": "hidden × layers", "threads_each": "numbers of threads", "seconds": "for a contender"}
    options = parse(__file__, __doc__, FULL, QUICK, about=about)
    return run(options, measure, check=check, facts=facts, report=report)


def make_model(size: str) -> TarnnForCausalLM:
    hidden, layers = map(int, size.split(" × "))
    torch.manual_seed(0)
    config = TarnnConfig(
        vocab_size=257, hidden_size=hidden, num_hidden_layers=layers, num_attention_heads=4 if hidden < 256 else 8
    )
    return TarnnForCausalLM(config).train()


def chosen_for(model: nn.Module, rows: int) -> str:
    return HIGHEST if refusal(product_size(model, rows)) else FAST


def check(options) -> str:
    """Gradients with the chosen products against those in float64."""
    model, tokens = make_model("128 × 4"), draw_tokens(4, 256)
    exact = gradient(copy.deepcopy(model).double(), tokens)
    errors = []
    for precision in (HIGHEST, chosen_for(model, tokens.numel())):
        with use_precision(precision):
            errors.append((gradient(model, tokens) - exact).norm())
    return "" if errors[1] <= BOUND * errors[0] else f"gradients err {errors[1] / errors[0]:.0f} times as much as MKL's"


def gradient(model: TarnnForCausalLM, tokens: Tensor) -> Tensor:
    model.zero_grad()
    model(tokens, labels=tokens, use_cache=False).loss.backward()
    return torch.cat([x.grad.double().flatten() for x in model.parameters() if x.grad is not None])


def measure(options, found: Found, keep: Callable[[], None]) -> None:
    effort = Effort(seconds_a_round=0, seconds=options.seconds, rounds=(3, 9))
    for threads in options.threads_each:
        for size in options.sizes:
            note(found, f"step {size}", threads, step_contenders(size), effort, keep)
        note(found, f"prompt {options.prompt_size}", threads, prompt_contenders(options), effort, keep)
        for rows, channels in SMALL[: 1 if options.quick else None]:
            contenders = small_contenders(rows, channels)
            note(found, f"{rows} × {channels} × {channels}", threads, contenders, Effort(0.01, 0.3), keep)


def note(found: Found, what: str, threads: int, contenders, effort: Effort, keep: Callable[[], None]) -> None:
    """Measure the contenders in turns on so many threads, and print their times."""
    with with_threads(threads):
        found[f"{what}; {threads}"] = timings = measure_in_turns(contenders, effort)
    times = ", ".join(f"{name} {milliseconds(x)}" for name, x in timings.items())
    print(f"{what}, {threads} threads: {times} ms", flush=True)
    keep()


def step_contenders(size: str) -> dict[str, Contender]:
    batch, length = SIZES.get(size, (2, 16))
    model, tokens = make_model(size), draw_tokens(batch, length)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, betas=(0.9, 0.95), fused=True)
    chosen = chosen_for(model, batch * length)

    def step(bf16: bool = False) -> None:
        with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
            loss = model(tokens, labels=tokens, use_cache=False).loss
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        model.zero_grad()

    products = all_products(model, batch * length)
    return {
        MKL: Contender(step, PATIENCE, by(HIGHEST)),
        CHOSEN: Contender(step, PATIENCE, by(chosen)),
        BF16: Contender(partial(step, bf16=True), PATIENCE, by(chosen)),
        PRODUCTS + MKL: Contender(products, PATIENCE, by(HIGHEST)),
        PRODUCTS + CHOSEN: Contender(products, PATIENCE, by(chosen)),
    }


@contextmanager
def use_precision(precision: str) -> Iterator[None]:
    """Within: torch's word for the precision of float32 products."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def by(precision: str) -> Callable[[], AbstractContextManager]:
    return partial(use_precision, precision)


def all_products(model: nn.Module, rows: int) -> Callable[[], None]:
    """The products of a model's linear layers in one step: forward, and the gradients of inputs and weights."""
    layers = [layer for layer in model.modules() if isinstance(layer, nn.Linear)]
    triples = {(n, k): (torch.randn(rows, k), torch.randn(n, k), torch.randn(rows, n)) for n, k in map(shape, layers)}

    def call() -> None:
        for layer in layers:
            x, weight, grad = triples[shape(layer)]
            torch.mm(x, weight.T), torch.mm(grad, weight), torch.mm(grad.T, x)

    return call


def shape(layer: nn.Linear) -> tuple[int, int]:
    return layer.out_features, layer.in_features


def prompt_contenders(options) -> dict[str, Contender]:
    model, tokens = make_model(options.prompt_size).eval(), draw_tokens(1, options.prompt)

    def read() -> None:
        with torch.no_grad():
            model.prefill(tokens, model.new_state(1))

    return {
        MKL: Contender(read, PATIENCE, by(HIGHEST)),
        CHOSEN: Contender(read, PATIENCE, by(chosen_for(model, options.prompt))),
    }


def small_contenders(rows: int, channels: int) -> dict[str, Contender]:
    call = all_products(nn.Linear(channels, channels), rows)
    return {MKL: Contender(call, PATIENCE, by(HIGHEST)), ONEDNN: Contender(call, PATIENCE, by(FAST))}


def targets(found: Found) -> list[Target]:
    faster, share, never_slower = {}, {}, {}
    for name, x in found.items():
        if name.startswith("step"):
            faster[name] = x[MKL].ms / x[CHOSEN].ms
            share[name] = products_share(x)
            never_slower[name] = faster[name]
        elif name.startswith("prompt"):
            never_slower[name] = x[MKL].ms / x[CHOSEN].ms
        elif size_of(name) >= LEAST:
            never_slower[name] = x[MKL].ms / x[ONEDNN].ms
    return [
        at_least(
            f"a step with the chosen products: at least {FASTER:g} times as fast as with MKL's",
            "measured",
            FASTER,
            faster,
        ),
        at_least(f"a step needs at least {SHARE:.0%} of its time for its products", "measured", SHARE, share, "%"),
        at_least("never slower: steps, prompts, products that are large enough", "measured", 1.0, never_slower),
    ]


def products_share(x: dict[str, Timing]) -> float:
    """The time of a step's products by the faster library, divided by the time of the step with the chosen one."""
    return min(x[PRODUCTS + MKL].ms, x[PRODUCTS + CHOSEN].ms) / x[CHOSEN].ms


def facts(options, found: Found) -> dict[str, Any]:
    return {"chosen": refusal() or "oneDNN in float32", "targets": [t.as_json() for t in targets(found)]}


def report(options, facts: dict[str, Any], found: Found) -> str:
    steps = {name: x for name, x in found.items() if name.startswith("step")}
    prompts = {name: x for name, x in found.items() if name.startswith("prompt")}
    small = {name: x for name, x in found.items() if name[0].isdigit()}
    how = (
        f"Chosen here: {facts['chosen']}. Milliseconds; medians, in turns. "
        + ", ".join(f"{size}: {batch} × {t} tokens" for size, (batch, t) in SIZES.items())
        + "."
    )
    return page(
        "Float32 products by oneDNN, and bfloat16",
        source(facts, how),
        section(targets(found)),
        "## A training step",
        markdown(
            [
                "model; threads",
                MKL,
                CHOSEN,
                BF16,
                "MKL / chosen",
                "MKL / bf16",
                "products, MKL",
                "chosen",
                "their share",
            ],
            [
                [
                    name.removeprefix("step "),
                    *(milliseconds(x[kind]) for kind in (MKL, CHOSEN, BF16)),
                    *(f"{x[MKL].ms / x[kind].ms:.2f}" for kind in (CHOSEN, BF16)),
                    *(milliseconds(x[PRODUCTS + kind]) for kind in (MKL, CHOSEN)),
                    f"{products_share(x):.0%}",
                ]
                for name, x in steps.items()
            ],
        ),
        f"## A prompt of {options.prompt:,} tokens",
        markdown(
            ["model; threads", MKL, CHOSEN, "MKL / chosen"],
            [
                [name.removeprefix("prompt "), *map(milliseconds, x.values()), f"{x[MKL].ms / x[CHOSEN].ms:.2f}"]
                for name, x in prompts.items()
            ],
        ),
        "## Products of a linear layer, forward and backward",
        f"oneDNN is chosen for a model whose products take {LEAST:,} multiplications each on average.",
        markdown(
            ["rows × inputs × outputs; threads", "multiplications", MKL, ONEDNN, "MKL / oneDNN"],
            [
                [name, f"{size_of(name):,}", *map(milliseconds, x.values()), f"{x[MKL].ms / x[ONEDNN].ms:.2f}"]
                for name, x in small.items()
            ],
        ),
    )


def size_of(name: str) -> int:
    rows, inputs, outputs = map(int, name.partition(";")[0].split(" × "))
    return rows * inputs * outputs


if __name__ == "__main__":
    sys.exit(main())
