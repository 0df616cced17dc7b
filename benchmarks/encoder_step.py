"""What linear attention is worth in an encoder: one training step of a bidirectional model, and reading a batch, against SDPA.

    python benchmarks/encoder_step.py        # under a minute; benchmarks/results/encoder_step.{json,md}

A masked language model, `TarnnForMaskedLM`: 2 layers of 4 heads, 128 wide by default, float32. `softmax` is the same model with
PyTorch's scaled_dot_product_attention. A step is forward, loss and backward on one sequence; reading is a batch of 8
sequences of 512 tokens, no gradients. The models take turns on the same tokens. Correctness is checked first: loss and
gradients of each against those of plain PyTorch.
"""

import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1]))
from toolkit import model_steps

from scripts.common.clock import Contender, Effort, measure_in_turns
from scripts.common.options import parse
from scripts.common.results import run
from scripts.common.tables import markdown, mebibytes, milliseconds, page, source
from scripts.common.targets import Target, at_least, section
from tarnn.models import TarnnConfig, TarnnForMaskedLM

FULL = {"lengths": [1024, 4096, 8192], "batch": 8, "short": 512, "layers": 2, "hidden_size": 128, "heads": 4}
QUICK = {"lengths": [64, 128], "batch": 2, "short": 32, "layers": 1, "hidden_size": 32, "heads": 2}
METHODS = {"linear": {"feature_map": "elu"}, "FAVOR+": {"feature_map": "favor"}, "softmax": {"attention": "softmax"}}
FASTER = {4096: 4.0, 8192: 8.0}  # a step at that length, times SDPA's speed
READING = "reading"


def main() -> int:
    options = parse(__file__, __doc__, FULL, QUICK)
    return run(options, measure, check=check, report=report)


def check(options) -> str:
    found = {name: model_steps.wrong(make_model(name, options), tokens(2, 70), train_step) for name in METHODS}
    return "; ".join(f"{name} is {what}" for name, what in found.items() if what)


def train_step(model: TarnnForMaskedLM, ids: Tensor) -> Tensor:
    """Forward, loss, backward."""
    loss = model(ids, labels=ids).loss
    loss.backward()
    return loss.detach()


def make_model(method: str, options) -> TarnnForMaskedLM:
    torch.manual_seed(0)
    config = TarnnConfig(
        hidden_size=options.hidden_size,
        num_hidden_layers=options.layers,
        num_attention_heads=options.heads,
        causal=False,
        **METHODS[method],
    )
    return TarnnForMaskedLM(config)


def tokens(*shape: int) -> Tensor:
    return torch.randint(257, shape, generator=torch.Generator().manual_seed(0))


def measure(options, found: dict[str, Any], keep) -> None:
    effort = Effort(seconds=0.1, rounds=(1, 1)) if options.quick else Effort(seconds=2.0, rounds=(3, 5))
    for t in options.lengths:
        ids, contenders = tokens(1, t), {}
        for name in METHODS:
            model = make_model(name, options).train()

            def step(model=model, ids=ids) -> None:
                train_step(model, ids)
                model.zero_grad()

            contenders[name] = Contender(step)
        found[f"step {t}"] = measure_in_turns(contenders, effort)
        keep()
    ids, contenders = tokens(options.batch, options.short), {}
    for name in METHODS:
        model = make_model(name, options).eval()

        def read(model=model, ids=ids) -> None:
            with torch.inference_mode():
                model(ids)

        contenders[name] = Contender(read)
    found[f"{READING} {options.batch} x {options.short}"] = measure_in_turns(contenders, effort)


def targets(found: dict[str, Any]) -> list[Target]:
    judged = []
    for t, bound in FASTER.items():
        at = found.get(f"step {t}")
        ratios = {} if at is None else {"elu + 1": at["softmax"].ms / at["linear"].ms}
        judged.append(
            at_least(f"a step at t = {t:,}: at least {bound:g} times as fast as SDPA", "measured", bound, ratios)
        )
    ratios = {name: x["softmax"].ms / x["linear"].ms for name, x in found.items() if name.startswith(READING)}
    judged.append(at_least("reading a batch: never slower than SDPA", "measured", 1.0, ratios))
    return judged


def report(options, facts, found: dict[str, Any]) -> str:
    rows = [
        [
            what,
            *(milliseconds(at[name]) for name in METHODS),
            f"{at['softmax'].ms / at['linear'].ms:.1f}",
            *(mebibytes(at[name].peak_bytes, 0) for name in METHODS),
        ]
        for what, at in found.items()
    ]
    header = ["", *(f"{name}, ms" for name in METHODS), "softmax / linear", *(f"{name}, MiB" for name in METHODS)]
    about = f"{options.layers} layers, hidden {options.hidden_size}, {options.heads} heads: a small model."
    return page("A training step of an encoder", source(facts, about), section(targets(found)), markdown(header, rows))


if __name__ == "__main__":
    raise SystemExit(main())
