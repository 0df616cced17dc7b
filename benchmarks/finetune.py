"""A step that tunes a folder with adapters: `tarnn finetune`, beside transformers with peft, and mlx-lm's trainer.

    python benchmarks/finetune.py --mlx ENVIRONMENT/bin/python     # half an hour; benchmarks/results/finetune.{json,md}

Two questions: what does a step cost in time and memory, and is it what the command said before it began? The folders have
Qwen3.5's text model (`softmax`: a Llama) with random weights in bfloat16; adapters have rank 16 on all wide linear layers; all
contenders recompute activations. A step is forward, loss, backward and AdamW. `row`: one text of 1,024 tokens. `short`: 16
examples of 64 to 184 tokens, half of them learned, which tarnn packs into one row and the others pad to the longest. `long`: one
text of 2,001 tokens, tarnn alone. `large …`: the same in a model of the size of Qwen3.5-0.8B, with its vocabulary.

Each contender has a process of its own (`toolkit/finetune_worker.py`, `toolkit/mlx_worker.py`), as memory is its own; the
processes take turns, a step at a time. `transformers, float32` reads the weights as float32, since products of 16 bits are slow
on processors without instructions for them. A contender whose first step takes more than --patience seconds or half of the memory
is left out, of later cases too, and the page says so. ENVIRONMENT has `mlx`, `mlx-cpu` and `mlx-lm`; without it mlx-lm is left
out. Correctness is checked first: a tiny model in float32 has the same losses, step by step (mlx-lm: the first one, for it draws
other adapters).
"""

import json
import os
import random
import select
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import psutil
import torch
import transformers as hf
from tokenizers import Tokenizer, models, pre_tokenizers

sys.path.insert(0, str(Path(__file__).parents[1]))
from families import TINY
from one_call import COMMON, FAMILIES, LARGE, SIZE

from scripts.common.options import ROOT, parse
from scripts.common.others import MOST, taken_quietly
from scripts.common.results import run
from scripts.common.tables import bullets, markdown, page, source
from scripts.common.targets import Target, at_least, at_most, section

METHODS = "tarnn", "transformers", "transformers, float32", "transformers, float32, compiled", "mlx-lm"
OURS, THEIRS, WIDE, COMPILED, MLX = METHODS
SMALL, SOFTMAX = "Qwen3.5", "Llama"
RANK, WORDS, END = 16, 512, "</s>"
SHORT = [64 + 8 * i for i in range(16)]
MODELS = {**FAMILIES, SOFTMAX: lambda n: hf.LlamaConfig(**COMMON, **SIZE, num_hidden_layers=n)}
CASES = {  # a model, and the lengths of the examples of a step
    "row": (SMALL, [1024]),
    "short": (SMALL, SHORT),
    "short, softmax": (SOFTMAX, SHORT),
    "long": (SMALL, [2001]),
    "large": (LARGE, [1024]),
    "large, long": (LARGE, [2001]),
}
FULL = {"mlx": Path, "cases": list(CASES), "methods": list(METHODS), "rounds": 3, "patience": 240, "layers": 12}
QUICK = {"cases": ["short"], "methods": [OURS, THEIRS], "rounds": 1, "layers": 0}
ABOUT = {"mlx": "the interpreter of the environment that has mlx-lm", "layers": "0: a tiny model"}
FASTER, LEARNED, OFF = 2.0, 3.0, {"bytes": 0.1, "seconds": 0.25}
Found = dict[str, Any]


def main() -> int:
    choices = {"cases": list(CASES), "methods": list(METHODS)}
    options = parse(__file__, __doc__, FULL, QUICK, choices=choices, about=ABOUT)
    return run(options, measure, check=check, targets=targets, report=report)


class Missing(Exception):
    """Why a contender is not measured."""


def write_folder(folder: Path, config: Any, dtype: str) -> None:
    """A folder with random weights, whose tokenizer has one token for each word."""
    torch.manual_seed(0)
    hf.AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype)).save_pretrained(folder)
    names = {END: 0, **{f"w{i}": i for i in range(1, min(WORDS, config.vocab_size))}}
    backend = Tokenizer(models.WordLevel(names, unk_token=END))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    hf.PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=END).save_pretrained(folder)


def write_rows(path: Path, lengths: list[int], words: int) -> list[tuple[list[int], int]]:
    """Examples as a table, and as (ids, how many of them are not learned). Several: half of each is its prompt."""
    draw, rows = random.Random(0), []
    with path.open("w") as file:
        for length in lengths:
            ids = [draw.randrange(1, words) for _ in range(length - 1)]
            text, skip = [f"w{i}" for i in ids], length // 2 if len(lengths) > 1 else 0
            row = {"prompt": " ".join(text[:skip]), "completion": " ".join(text[skip:])}
            file.write(json.dumps(row if skip else {"text": row["completion"]}) + "\n")
            rows.append(([*ids, 0], max(1, skip)))
    return rows


class Worker:
    """A contender in its process: what it says before its first step, and how long that takes."""

    def __init__(self, method: str, options, case: dict[str, Any]):
        torch_alone = Path(__file__).parent / "toolkit" / "finetune_worker.py"
        python, script = sys.executable, torch_alone
        if method == MLX:
            if options.mlx is None:
                raise Missing("no environment was named")
            python, script = str(options.mlx), torch_alone.with_name("mlx_worker.py")
        threads = {name: str(options.threads) for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS")}
        case = {**case, "method": method, "threads": options.threads, "rank": RANK}
        case["out"] = str(Path(case["folder"]).parent / f"of {method}")
        Path(case["out"]).mkdir(exist_ok=True)
        self.errors = tempfile.TemporaryFile("w+")  # noqa: SIM115  closed by end()
        self.process: Any = subprocess.Popen(
            [python, str(script), json.dumps(case)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.errors,
            bufsize=0,
            env={**os.environ, **threads, "PYTHONPATH": str(ROOT / "src")},
        )
        try:
            self.about = {**self.answer(options.patience), **self.answer(options.patience)}
            # mlx-lm compiles its kernels before its first step, once for each version of mlx
            self.first = self.answer(options.patience)
        except Missing:
            self.end()
            raise

    def answer(self, patience: float) -> dict[str, Any]:
        """Return the next line; Missing for a process that ends, takes too long or half of the memory."""
        begun, most = time.monotonic(), psutil.virtual_memory().total // 2
        while not select.select([self.process.stdout], [], [], 1)[0]:
            if time.monotonic() - begun > patience:
                raise Missing(f"no step within {patience:,} s")
            if psutil.Process(self.process.pid).memory_info().rss > most:
                raise Missing(f"a step takes more than {most / 1e9:.0f} GB")
        if line := self.process.stdout.readline():
            return json.loads(line)
        self.errors.seek(0)
        raise Missing((self.errors.read().strip().splitlines() or ["it ended without a word"])[-1][:200])

    def step(self, patience: float) -> dict[str, Any]:
        self.process.stdin.write(b"\n")
        return self.answer(patience)

    def memory(self) -> dict[str, int]:
        """Bytes: the most that were resident so far; how many are mapped files now."""
        lines = Path(f"/proc/{self.process.pid}/status").read_text().splitlines()
        fields = {name: int(x.split()[0]) * 1024 for name, x in (line.split(":") for line in lines) if "kB" in x}
        return {"peak_bytes": fields["VmHWM"], "mapped_bytes": fields["RssFile"]}

    def end(self) -> None:
        self.process.kill()
        self.process.communicate()
        self.errors.close()


def check(options) -> str:
    """The losses of three steps of a tiny model, and the numbers of trained parameters."""
    with tempfile.TemporaryDirectory() as folder:
        case = written(Path(folder), hf.Qwen3_5TextConfig(**TINY), "float32", [70])
        losses, trained, rounds = {}, {}, 3
        for method in [x for x in options.methods if x not in (WIDE, COMPILED) and (x != MLX or options.mlx)]:
            try:
                worker = Worker(method, options, case)
                losses[method] = [
                    worker.first["loss"],
                    *(worker.step(options.patience)["loss"] for _ in range(rounds - 1)),
                ]
            except Missing as why:
                return f"{method}: {why}"
            trained[method] = worker.about["trained"]
            worker.end()
    far = [abs(x - y) for method, at in losses.items() for x, y in zip(at[: 1 if method == MLX else 3], losses[OURS])]
    if max(far) > 1e-4 or len({*trained.values()}) > 1:
        return f"losses differ by {max(far):.1g}: {losses}; trained: {trained}"
    return ""


def written(place: Path, config: Any, dtype: str, lengths: list[int]) -> dict[str, Any]:
    """Write a folder and data; return what workers are told of them."""
    write_folder(place / "model", config, dtype)
    rows = write_rows(place / "data.jsonl", lengths, min(WORDS, config.vocab_size))
    return {
        "folder": str(place / "model"),
        "data": str(place / "data.jsonl"),
        "rows": rows,
        "length": max(2048, *lengths),
    }


def measure(options, found: Found, keep) -> None:
    left_out = set[str]()
    for name in options.cases:
        model, lengths = CASES[name]
        config = MODELS[model](options.layers) if options.layers else hf.Qwen3_5TextConfig(**TINY)
        methods = [x for x in options.methods if x == OURS or ("long" not in name and x not in left_out)]
        with tempfile.TemporaryDirectory() as folder:
            case = written(Path(folder), config, "bfloat16", lengths)
            size = sum(x.stat().st_size for x in Path(case["folder"]).glob("*.safetensors")) // 2
            learned = sum(len(ids) - skip for ids, skip in case["rows"])
            found[name] = {"parameters": size, "tokens": sum(lengths), "learned": learned}
            found[name]["ways"] = of_case(case, methods, options)
        left_out |= {method for method, x in found[name]["ways"].items() if "missing" in x}
        keep()


def of_case(case: dict[str, Any], methods: list[str], options) -> dict[str, Found]:
    ways: dict[str, Found] = {}
    workers: dict[str, Worker] = {}
    try:
        for method in methods:
            try:
                workers[method] = Worker(method, options, case)
            except Missing as why:
                ways[method] = {"missing": str(why)}
        rounds, share = taken_quietly(
            lambda: [{m: w.step(options.patience) for m, w in workers.items()} for _ in range(options.rounds)]
        )
        for method, worker in workers.items():
            times = [x[method]["ms"] for x in rounds]
            ways[method] = {
                **worker.about,
                **worker.memory(),
                "ms": median(times),
                "ms_min": min(times),
                "ms_max": max(times),
                "rounds": len(times),
                "first_ms": worker.first["ms"],
                "loss": worker.first["loss"],
                "others": share,
            }
    finally:
        for worker in workers.values():
            worker.end()
    return {method: ways[method] for method in methods}


def targets(found: Found) -> list[Target]:
    times, bytes_of = _compared(found, "ms"), _compared(found, "peak_bytes")
    rows, short = (
        {name: x for name, x in times.items() if ("short" in name) == is_short} for is_short in (False, True)
    )
    judged = [
        at_least(f"a step at least {FASTER:g} times as fast as transformers", "measured", FASTER, rows),
        at_least(f"short: learned tokens at least {LEARNED:g} times as fast", "measured", LEARNED, short),
        at_most("no more memory than transformers", "measured", 1.0, {name: 1 / x for name, x in bytes_of.items()}),
    ]
    for what, taken in (("bytes", "peak_bytes"), ("seconds", "ms")):
        off = {name: abs(_said(x, what) / _taken(x, taken) - 1) for name, x in found.items() if "ms" in x["ways"][OURS]}
        claim = f"the {'memory' if what == 'bytes' else 'time'} that was said: at most {OFF[what]:.0%} off"
        judged.append(at_most(claim, "measured", OFF[what], off, unit="%"))
    return judged


def _compared(found: Found, what: str, ways: tuple[str, ...] = (THEIRS, WIDE)) -> dict[str, float]:
    """How many times as much transformers takes at least, by those ways of it that were measured."""
    ratios = {}
    for name, x in found.items():
        theirs = [x["ways"][way][what] for way in ways if what in x["ways"].get(way, {})]
        if theirs and what in x["ways"].get(OURS, {}):
            ratios[name] = min(theirs) / x["ways"][OURS][what]
    return ratios


def _said(case: Found, what: str) -> float:
    return case["ways"][OURS][f"said_{what}"]


def _taken(case: Found, what: str) -> float:
    return case["ways"][OURS][what] / (1000 if what == "ms" else 1)


def report(options, facts, found: Found) -> str:
    rows, missing, said = [], [], []
    for name, case in found.items():
        label = f"{name}, {case['parameters'] / 1e6:,.0f} M"
        for method, x in case["ways"].items():
            if "missing" in x:
                missing.append(f"{label}, {method}: {x['missing']}")
                continue
            seconds, mark = x["ms"] / 1000, "°" * ((x["others"] or 0) > MOST)
            ours = case["ways"][OURS]["ms"] / 1000
            rows.append(
                [
                    label,
                    f"{method} {x.get('version', '')}".strip(),
                    f"{seconds:.2f}{mark}",
                    f"{seconds / ours:.2f}",
                    f"{case['tokens'] / seconds:,.0f}",
                    f"{case['learned'] / seconds:,.0f}",
                    f"{x['peak_bytes'] / 1e9:.2f}",
                    f"{x['mapped_bytes'] / 1e9:.2f}",
                    f"{x['first_ms'] / 1000:.1f}",
                    f"{x['loss']:.4f}",
                ]
            )
        x = case["ways"][OURS]
        if "ms" in x:
            pairs = [(x["said_bytes"] / 1e9, x["peak_bytes"] / 1e9), (x["said_seconds"], x["ms"] / 1000)]
            cells = [[f"{a:.2f}", f"{b:.2f}", f"{a / b - 1:+.0%}"] for a, b in pairs]
            said.append([label, f"{case['tokens']:,}", *cells[0], *cells[1]])
    header = (
        "model | trained by | s a step | × tarnn | tokens/s | learned tokens/s | peak GB | of it mapped files | "
        "first step, s | first loss"
    )
    about = (
        f"Medians of {options.rounds} steps of each, in turns, after a first one (° where others took over {MOST:.0%} of the "
        f"processors). bfloat16, adapters of rank {RANK}, activations recomputed. Peak: the most that was resident in the whole "
        "process, libraries and mapped weights included."
    )
    return page(
        "Tuning with adapters, beside transformers and mlx-lm",
        source(facts, about),
        section(targets(found)),
        markdown(header, rows, left=2),
        "## What was said before the first step, and what was taken",
        markdown("model | tokens | GB said | taken | off | s a step said | taken | off", said),
        "## Left out" if missing else "",
        bullets(missing) if missing else "",
    )


if __name__ == "__main__":
    raise SystemExit(main())
