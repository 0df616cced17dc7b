"""Drafts: how many tokens a second with a trained head, and by looking the text up.

    python benchmarks/drafts.py --threads 1        # some ten minutes, training included; benchmarks/results/drafts.{md,json}

The goal: where 60 % of the drafts are right, a text is written at least 1.35 times as fast. Simulated ones are drawn to be right
that often; in the saved run 48 to 53 % were. Figures for two questions:

* **Which share is right?** A small model of Qwen3.5's shape over bytes is trained here with its head for the byte after next, on
  novels (`--data`; a text made here where there are none), and goes on with novels it has not read and with a repeated table.
* **What is a share worth?** Models whose weights are read from memory, random ones, where each draft is right with a set
  probability. The head's program runs for each of them, and its tokens are then replaced. Without a head: by looking up.

Batch 1, one thread, greedy unless said, in turns; medians, in seconds of the processor, which is what a thread takes when alone.
Each text is compared with the one without drafts. Ctrl-C keeps what was measured, and the training; `--resume` goes on.
"""

import random
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import torch
import transformers as hf
from one_call import LARGE, OF_LARGE
from toolkit import draft_model

sys.path.insert(0, str(Path(__file__).parents[1]))
import tarnn
from scripts.common.options import ROOT, as_facts, parse
from scripts.common.others import Watch
from scripts.common.provenance import provenance
from scripts.common.results import Unmeasured, earlier, run
from scripts.common.tables import markdown, page, source
from scripts.common.targets import Target, at_least, section
from tarnn.decoding.drafts import DraftLoop, PromptLookup, token_loop
from tarnn.decoding.draws import Sampling, row_sampler
from tarnn.decoding.mtp import TrainedHead
from tarnn.families.config import Config
from tarnn.families.qwen3_5_mtp import program
from tarnn.families.weights import Weights
from tarnn.program.runtime import Runtime, check_kernels

SMALL = "Qwen3.5, 99 M"
TINY = "tiny"
CONFIGS = {
    SMALL: {
        "vocab_size": 32768,
        "hidden_size": 640,
        "intermediate_size": 1792,
        "num_hidden_layers": 12,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 128,
        "linear_num_key_heads": 8,
        "linear_num_value_heads": 8,
        "tie_word_embeddings": True,
    },
    LARGE: {**OF_LARGE, "num_hidden_layers": 24},
}
CONFIGS[TINY] = CONFIGS[SMALL] | {"vocab_size": 300, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 4}
FORMATS = {SMALL: ("int8", "float32"), LARGE: ("int8",), TINY: ("float32",)}
FULL = {
    "data": ROOT.parent / "shared" / "data" / "gutenberg_books",
    "size": 192,
    "layers": 4,
    "steps": 500,
    "models": [SMALL],
    "tokens": 200,
    "rounds": 3,
    "resume": False,
}
QUICK = {"size": 64, "steps": 2, "models": [TINY], "tokens": 12, "rounds": 1}
DRAFTS = (1, 2, 3)
GAIN, SHARE = 1.35, 0.6
ONE_BY_ONE = {
    1: 0.6,
    2: 0.704,
    3: 0.782,
}  # a draft's probability behind right ones, so that 60 % of all are right: p + p² + … = 0.6 n
TABLE = "".join(
    f"| {name} | {n} | {n * n} |\n" for n, name in enumerate(("ash", "birch", "cedar", "elm", "fir", "oak"), 11)
)
HEAD, LOOKUP = "by the head", "looked up"
BOTH, FREE = "simulated, with the head", "simulated, free"


def main() -> int:
    about = {"resume": "go on where the results file ends", "data": "folder of books in .txt.gz"}
    options = parse(__file__, __doc__, FULL, QUICK, choices={"models": list(CONFIGS)}, about=about)
    with torch.no_grad():
        return run(options, measure, check=check, report=report)


@dataclass(frozen=True)
class Way:
    """How a text is written: at most so many drafts a pass, and who makes them; None: the model's head."""

    draft: int = 0
    drafter: Callable[[], Any] | None = None

    def loop(self, opened: Any, capacity: int) -> Any:
        made = token_loop(opened, opened.new_state(1, capacity), draft=self.draft)
        if self.drafter is not None and self.draft:
            made.drafter = self.drafter()
        if self.draft and self.drafter is None and not isinstance(made.drafter, TrainedHead):
            raise Unmeasured("the model was opened without its head")
        return made


class Simulated(TrainedHead):
    """Run the head for each draft, and then expect what is known to follow, or with some probability another token."""

    def __init__(self, runtime: Runtime, text: Sequence[int], right: float):
        super().__init__(runtime)
        self.known = Known(text, right)

    def read(self, ids: Sequence[int]) -> None:
        super().read(ids)
        self.known.read(ids)

    def propose(self, most: int) -> list[int]:
        super().propose(most)
        return self.known.propose(most)


class Known:
    """Expect what is known to follow, or with some probability another token: a drafter that costs nothing."""

    def __init__(self, text: Sequence[int], right: float):
        self.text, self.at, self.right, self.draws = text, 0, right, random.Random(0)

    def read(self, ids: Sequence[int]) -> None:
        self.at += len(ids)

    def propose(self, most: int) -> list[int]:
        expected = self.text[self.at : self.at + most]
        return [x if self.draws.random() < self.right else (x + 1) % 256 for x in expected]


def check(options) -> str:
    """The texts of a tiny model with a head."""
    with TemporaryDirectory() as folder:
        draft_model.save(*draft_model.new_model(64, 4), Path(folder) / "tiny")
        opened = tarnn.load(Path(folder) / "tiny").opened
        opened.draft_head  # noqa: B018 — reads its weights while they are there
    for way in (Way(3), Way(3, PromptLookup)):
        try:
            in_turns(options, opened, [*TABLE.encode()], {"plain": Way(), "drafts": way}, 30)
        except Unmeasured as error:
            return str(error)
    return ""


def in_turns(options, opened: Any, prompt: list[int], ways: dict[str, Way], tokens: int, **drawn: Any) -> Any:
    """Tokens a second of each way to write one text, the first without drafts; and what became of drafts."""
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    counts, texts, watch = {}, {}, Watch()
    for _ in range(options.rounds):
        for name, way in ways.items():
            loop = way.loop(opened, len(prompt) + tokens)
            loop.read(torch.tensor([prompt]))
            sample = row_sampler(
                Sampling(**drawn or {"temperature": 0}), opened.config.vocab_size, seed=1, prompt=prompt
            )
            start = time.process_time()
            text = [int(x) for x in loop.tokens(sample, tokens)]
            seconds[name].append(time.process_time() - start)
            if text != texts.setdefault("text", text):
                raise Unmeasured(f"with {name} the text is another than without drafts")
            if isinstance(loop, DraftLoop):
                counts[name] = {"drafted": loop.drafted, "right": loop.accepted, "passes": loop.passes}
    per_second = {name: tokens / median(x) for name, x in seconds.items()}
    found = {name: {"per_second": x, **counts.get(name, {})} for name, x in per_second.items()}
    return found | {"others": watch.share()}


def measure(options, results: dict[str, Any], keep) -> None:
    check_kernels()
    if options.resume:
        facts = {**provenance(options.script), "settings": as_facts(options)}
        results |= earlier(options.out / "drafts.json", facts, ("settings", "versions"))["results"]
    text, held_out = draft_model.books(options.data)
    kept = options.out if options.quick else ROOT / "runs" / "benchmarks"
    folder = kept / f"drafts_{options.size}_{options.steps}"
    model = draft_model.trained(folder, text, options.size, options.layers, options.steps, partial(print, flush=True))
    opened = tarnn.load(model).opened
    names = {f"{x}, {n}": Way(n, maker) for x, maker in ((HEAD, None), (LOOKUP, PromptLookup)) for n in DRAFTS}
    ways = {"plain": Way(), **names}
    novel, table = held_out[:600].tolist(), [*(TABLE * 5).encode()]
    cases = {"a novel": (novel, {}), "a novel, temperature 0.8": (novel, {"temperature": 0.8}), "a table": (table, {})}
    for name, (prompt, drawn) in cases.items():
        if f"trained, {name}" not in results:
            results[f"trained, {name}"] = in_turns(options, opened, prompt, ways, options.tokens, **drawn)
            keep()
    for name in options.models:
        for weights in FORMATS[name]:
            if f"{name}, {weights}" not in results:
                results[f"{name}, {weights}"] = of_memory(options, name, weights)
                keep()


def of_memory(options, name: str, weights: str) -> dict[str, Any]:
    """A random model that is read from memory, whose drafts are right with a set probability."""
    opened, head = random_model(name, weights)
    prompt, tokens = [*range(3, 67)], max(12, options.tokens // (8 if name == LARGE else 3))
    plain = Way().loop(opened, len(prompt) + tokens)
    plain.read(torch.tensor([prompt]))
    greedy = row_sampler(Sampling(temperature=0), opened.config.vocab_size, seed=1)
    text = [*prompt, *(int(x) for x in plain.tokens(greedy, tokens))]
    ways = {"plain": Way()}
    for n, right in ONE_BY_ONE.items():
        ways[f"{BOTH}, {n}"] = Way(n, partial(Simulated, head, text, right))
        ways[f"{FREE}, {n}"] = Way(n, partial(Known, text, right))
    found = in_turns(options, opened, prompt, ways, tokens)
    return found | {"bytes": opened.step.runtime.packed.block.numel(), "of the head": head.packed.block.numel()}


def random_model(name: str, weights: str) -> tuple[Any, Runtime]:
    """Open a model with random weights, and its head."""
    torch.manual_seed(0)
    config = hf.Qwen3_5TextConfig(**CONFIGS[name])
    dtype = torch.bfloat16 if name == LARGE else torch.float32
    model = hf.AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
    head = draft_model.Head(model.config).to(dtype)
    tensors = {**model.state_dict(), **{f"mtp.{x}": y for x, y in head.state_dict().items()}}
    written = program(Config(config.to_dict()), Weights.of(tensors))
    assert written is not None
    return tarnn.load(model, weights=weights).opened, Runtime(written, weights)


def gains(found: dict[str, Any]) -> dict[str, float]:
    """How many times as fast as without drafts."""
    plain = found["plain"]["per_second"]
    return {x: y["per_second"] / plain for x, y in found.items() if x != "plain" and isinstance(y, dict)}


def targets(results: dict[str, Any]) -> list[Target]:
    best: dict[str, dict[str, float]] = {BOTH: {}, FREE: {}}
    for name, found in results.items():
        if not name.startswith("trained"):
            for kind, values in best.items():
                values[name] = max(x for way, x in gains(found).items() if way.startswith(kind))
    claim = (
        f"with the best of {DRAFTS[0]} to {DRAFTS[-1]} drafts a pass, drawn to be right in {SHARE:.0%} (as drawn: see the "
        f"table), at least {GAIN} times as fast"
    )
    return [at_least(claim, kind, GAIN, values) for kind, values in best.items()]


def report(options, facts, results: dict[str, Any]) -> str:
    rows, sizes = [], []
    for name, found in results.items():
        rows.append([name, "without drafts", *[None] * 2, f"{found['plain']['per_second']:,.1f}", "1.00"])
        for way, gain in gains(found).items():
            x = found[way]
            share = f"{x['right'] / x['drafted']:.0%}" if x["drafted"] else None
            each = f"{1 + x['right'] / x['passes']:.2f}"
            rows.append([name, way, share, each, f"{x['per_second']:,.1f}", f"{gain:.2f}"])
        if "bytes" in found:
            sizes.append(f"{name}: {found['bytes'] / 1e6:,.0f} MB, its head {found['of the head'] / 1e6:,.0f} MB")
    others = max((x["others"] or 0 for x in results.values()), default=0)
    about = f"Medians of {options.rounds} rounds, in turns; batch 1. Packed weights: {'; '.join(sizes)}. "
    about += f"Other processes took up to {others:.0%} of the processors; a second is one of this process."
    columns = "model, text | drafts, at most | right | tokens a pass | tokens a second | times as fast"
    return page("Drafts", source(facts, about), section(targets(results)), markdown(columns, rows, left=2))


if __name__ == "__main__":
    raise SystemExit(main())
