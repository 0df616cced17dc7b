"""Where a training step's time goes, and how much of it are matrix products: the default model at the demo's size.

    python benchmarks/training_profile.py     # a minute; benchmarks/results/training_profile.{json,md}
    python benchmarks/training_profile.py --before OLD.json     # beside what another version took

128 wide, 4 layers of 4 heads, 4 × 256 tokens a step, float32. In turns: the model's step (forward, loss, backward, clipping,
AdamW) and torch.mm of 2,048³; then `tarnn train` itself, by the seconds in its log. The claim: a step of `tarnn train` takes
no longer than the matrix products of its linear layers, at torch.mm's rate, divided by 0.6. Those of attention don't count
as products here. Where the rest goes, torch.profiler says.
"""

import json
import random
import statistics
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import cross_entropy
from torch.profiler import ProfilerActivity, profile

sys.path.insert(0, str(Path(__file__).parents[1]))
from scripts.common.clock import Contender, Effort, measure_in_turns
from scripts.common.options import parse
from scripts.common.results import run
from scripts.common.tables import markdown, page, source
from scripts.common.targets import Target, at_least, section
from tarnn.models import TarnnConfig, TarnnForCausalLM
from tarnn.tasks import TextSettings
from tarnn.training.folder import LOG
from tarnn.training.log import read_log
from tarnn.training.run import train

MODEL = {"hidden_size": 128, "layers": 4, "heads": 4, "context": 256, "batch_size": 4}
FULL = {"steps": 60, "profiled": 10, "matrix": 2048, "before": Path}
QUICK = {"steps": 20, "profiled": 1, "matrix": 256}
EFFORT = Effort(seconds_a_round=0.3, rounds=(5, 9), seconds=6)
SHARE = 0.6
# what operators are for, by the first part that is in their names
PARTS = {
    "matrix products": ("aten::mm", "aten::addmm", "aten::bmm"),
    "linear attention": ("tarnn_cpu::forward", "tarnn_cpu::backward", "_Attention", "LinearAttention"),
    "norms": ("rms_norm", "RmsNorm", "aten::pow", "aten::rsqrt", "aten::mean", "aten::div"),
    "SwiGLU": ("swiglu", "SwiGlu", "aten::silu"),
    "loss": ("log_softmax", "nll_loss"),
    "optimizer, clipping": ("adam", "Adam", "foreach", "linalg_vector_norm"),
    "sums and products of whole tensors": (
        "aten::add",
        "aten::mul",
        "aten::sum",
        "aten::copy_",
        "aten::fill_",
    ),
}
REST = "everything else that torch does"


def main() -> int:
    about = {"before": "the JSON of another version, to stand beside this one", "steps": "of tarnn train"}
    return run(parse(__file__, __doc__, FULL, QUICK, about=about), measure, facts=facts, report=report)


def measure(options, found: dict[str, Any], keep) -> None:
    model, step = make_step()
    matrix = torch.randn(options.matrix, options.matrix)
    timed = measure_in_turns(
        {"step": Contender(step), "mm": Contender(lambda: matrix @ matrix)},
        EFFORT,
    )
    rate = 2 * options.matrix**3 / timed["mm"].ms
    found |= {
        "parameters": model.num_parameters(), "gflops_of_mm": rate / 1e6, "step_ms": timed["step"].ms,
        "products_ms": 6 * in_products(model) * tokens() / rate, "parts_ms": profiled(step, options.profiled),
    }  # fmt: skip
    keep()
    found["train_ms"] = trained(options.steps)


def tokens() -> int:
    return MODEL["batch_size"] * MODEL["context"]


def in_products(model: TarnnForCausalLM) -> int:
    """Weights that each token is multiplied with once."""
    return sum(m.weight.numel() for m in model.modules() if isinstance(m, torch.nn.Linear))


def make_step() -> tuple[TarnnForCausalLM, Callable[[], None]]:
    """The model, and a step as `tarnn train` makes it, without the Trainer."""
    torch.manual_seed(0)
    config = TarnnConfig(
        vocab_size=257, hidden_size=MODEL["hidden_size"], num_hidden_layers=MODEL["layers"],
        num_attention_heads=MODEL["heads"],
    )  # fmt: skip
    model = TarnnForCausalLM(config).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, betas=(0.9, 0.95), fused=True)
    rows = torch.randint(0, 257, (MODEL["batch_size"], MODEL["context"] + 1))

    def step() -> None:
        logits = model(input_ids=rows[:, :-1], use_cache=False).logits
        cross_entropy(logits.float().flatten(0, 1), rows[:, 1:].flatten()).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        model.zero_grad()

    return model, step


def profiled(step: Callable[[], None], steps: int) -> dict[str, float]:
    """Milliseconds a step by part, as torch.profiler has them."""
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        for _ in range(steps):
            step()
    parts = dict.fromkeys([*PARTS, REST], 0.0)
    for event in seen.key_averages():
        parts[part_of(event.key)] += event.self_cpu_time_total / 1000 / steps
    return parts


def part_of(operator: str) -> str:
    return next((part for part, names in PARTS.items() if any(x in operator for x in names)), REST)


def trained(steps: int) -> float:
    """Milliseconds a step of `tarnn train`, the median of the times between lines of its log, of which the first is left out."""
    with tempfile.TemporaryDirectory() as folder:
        text = Path(folder, "text.txt")
        text.write_bytes(bytes(random.Random(0).choices(range(32, 127), k=100_000)))
        out = Path(folder, "run")
        train(
            TextSettings(
                (str(text),), out, **MODEL, steps=steps, save_every=steps, val_fraction=0.0, sample_tokens=0
            ),
            show=False,
        )
        lines = [line for line in read_log(out / LOG) if "loss" in line]
    gaps = [1000 * (b["seconds"] - a["seconds"]) / (b["step"] - a["step"]) for a, b in zip(lines, lines[1:])]
    return statistics.median(gaps[:-1] or gaps)  # the last has the checkpoint in it


def share(found: dict[str, Any]) -> float:
    return found["products_ms"] / found["train_ms"]


def targets(found: dict[str, Any]) -> list[Target]:
    ratio = {"tarnn train": share(found)} if "train_ms" in found else {}
    return [
        at_least(f"at least {SHARE:.0%} of a step are products at mm's rate", "measured", SHARE, ratio, "")
    ]


def facts(options, found: dict[str, Any]) -> dict[str, Any]:
    earlier = {} if options.before is None else json.loads(options.before.read_text())["results"]
    return {"before": earlier, "targets": [t.as_json() for t in targets(found)]}


def report(options, facts: dict[str, Any], found: dict[str, Any]) -> str:
    columns = [x for x in (facts["before"], found) if x]
    names = ["before", "now"][-len(columns) :]
    lines: list[list[Any]] = [
        ["products of the linear layers, at mm's rate, ms", *(f"{x['products_ms']:.1f}" for x in columns)],
        ["the model's step, ms", *(f"{x['step_ms']:.1f}" for x in columns)],
        ["a step of tarnn train, ms", *(f"{x['train_ms']:.1f}" for x in columns)],
        ["tokens per second of tarnn train", *(f"{1000 * tokens() / x['train_ms']:,.0f}" for x in columns)],
        ["products' share of it", *(f"{share(x):.0%}" for x in columns)],
    ]
    parts = [[part, *(f"{x['parts_ms'].get(part, 0):.1f}" for x in columns)] for part in [*PARTS, REST]]
    how = (
        f"{MODEL['hidden_size']} wide, {MODEL['layers']} layers of {MODEL['heads']} heads, {found['parameters']:,} parameters, "
        f"{MODEL['batch_size']} × {MODEL['context']} tokens, float32; torch.mm {found['gflops_of_mm']:.0f} GFLOP/s."
    )
    return page(
        "Where a training step's time goes", source(facts, how), section(targets(found)), markdown(["", *names], lines),
        "## By operator, ms a step",
        "As torch.profiler has it, whose own time is in it; Python between operators is not.",
        markdown(["part", *names], parts),
    )  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
