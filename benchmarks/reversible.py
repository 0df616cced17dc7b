"""What reversible layers save and cost: a training step by depth, against stored activations and gradient checkpointing.

    python benchmarks/reversible.py        # two minutes; benchmarks/results/reversible.{json,md}

`TarnnForCausalLM`, linear attention, 128 wide by default, float32, batches of 4 × 512 tokens. A step is forward, loss and
backward. The models take turns on the same tokens. Memory is the peak above what was there before a step, gradients of
the weights included. Correctness is checked first: gradients against those of the same model with stored activations.
"""

import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1]))

from scripts.common.clock import Contender, Effort, measure_in_turns
from scripts.common.options import parse
from scripts.common.results import run
from scripts.common.tables import markdown, mebibytes, milliseconds, page, source
from scripts.common.targets import Target, at_most, section
from tarnn.models import TarnnConfig, TarnnForCausalLM

FULL = {"depths": [2, 4, 8, 16], "batch": 4, "length": 512, "hidden_size": 128, "heads": 4}
QUICK = {"depths": [1, 2], "batch": 2, "length": 32, "hidden_size": 32, "heads": 2}
METHODS = ("stored", "checkpointed", "reversible")


def main() -> int:
    options = parse(__file__, __doc__, FULL, QUICK)
    return run(options, measure, check=check, report=report)


def check(options) -> str:
    """With hidden states put out, activations are stored."""
    model, ids, found = make_model("reversible", 4, options), tokens(2, 70), []
    for stored in (False, True):
        model.zero_grad()
        model(ids, labels=ids, output_hidden_states=stored).loss.backward()
        found.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
    error = ((found[0] - found[1]).norm() / found[1].norm()).item()
    return "" if error < 1e-4 else f"gradients are off those of stored activations by {error:.1e}"


def make_model(method: str, depth: int, options) -> TarnnForCausalLM:
    torch.manual_seed(0)
    config = TarnnConfig(
        hidden_size=options.hidden_size,
        num_hidden_layers=depth,
        num_attention_heads=options.heads,
        dropout=0.1,
        reversible=method == "reversible",
    )
    model = TarnnForCausalLM(config).train()
    if method == "checkpointed":
        model.gradient_checkpointing_enable()
    return model


def tokens(*shape: int) -> Tensor:
    return torch.randint(257, shape, generator=torch.Generator().manual_seed(0))


def measure(options, found: dict[str, Any], keep) -> None:
    effort = Effort(seconds=0.1, rounds=(1, 1)) if options.quick else Effort(seconds=4.0, rounds=(3, 5))
    ids = tokens(options.batch, options.length)
    for depth in options.depths:
        contenders = {}
        for name in METHODS:
            model = make_model(name, depth, options)

            def step(model=model) -> None:
                model(ids, labels=ids).loss.backward()
                model.zero_grad()

            contenders[name] = Contender(step)
        found[str(depth)] = measure_in_turns(contenders, effort)
        keep()


def targets(found: dict[str, Any]) -> list[Target]:
    times = {f"{depth} layers": at["reversible"].ms / at["stored"].ms for depth, at in found.items()}
    checkpointed = {f"{depth} layers": at["reversible"].ms / at["checkpointed"].ms for depth, at in found.items()}
    return [
        at_most("a step takes at most half as long again as with stored activations", "measured", 1.5, times),
        at_most("and at most a tenth longer than with gradient checkpointing", "measured", 1.1, checkpointed),
    ]


def report(options, facts, found: dict[str, Any]) -> str:
    rows = [
        [
            depth,
            *(milliseconds(at[name]) for name in METHODS),
            f"{at['reversible'].ms / at['stored'].ms:.2f}",
            *(mebibytes(at[name].peak_bytes, 0) for name in METHODS),
        ]
        for depth, at in found.items()
    ]
    header = [
        "layers",
        *(f"{name}, ms" for name in METHODS),
        "reversible / stored",
        *(f"{name}, MiB" for name in METHODS),
    ]
    about = (
        f"Batches of {options.batch} × {options.length} tokens, hidden {options.hidden_size}, {options.heads} heads."
    )
    return page(
        "A training step with reversible layers", source(facts, about), section(targets(found)), markdown(header, rows)
    )


if __name__ == "__main__":
    raise SystemExit(main())
