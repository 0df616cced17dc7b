"""What tuned first states teach: a task that the model half knows, and one that it does not, beside LoRA and beside a prompt.

    python experiments/tune_state.py --threads 1             # about half an hour; killed, it goes on with --resume
    python experiments/tune_state.py --quick

A small model of Qwen3.5's kind (three layers with the gated delta rule, one with softmax attention) is trained on pages of lines
such as `badc>cdab`. Each page has one rule (reverse, sort, next letter …), drawn anew, so the first answer of a page can only
be guessed; later ones follow from those above. Then, for three seeds, 48 lines of one rule tune it with equal steps: the states
before the first token alone, or adapters (LoRA). The rate is the one of --state-rates or --lora-rates with the smallest loss on
16 more lines. Measured is how many new lines are right to the last letter, by the likeliest tokens: before, tuned, and before
with lines of the same examples in front, as many as a page of its training can have. The second task is of two rules one after
the other, which no page had.

S0 tuning: arXiv 2604.01168. Its package, s0-tuning, tunes the same model on the same lines where it is installed: as it is, and
once with the steps, the rate, the factor and the penalty (none) of tarnn's own states.
"""

import importlib.util
import json
import random
import statistics
import sys
import time
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer, Qwen3_5ForCausalLM, Qwen3_5TextConfig
from transformers.models.qwen3_5 import modeling_qwen3_5

import tarnn

sys.path.insert(0, str(Path(__file__).parents[1]))
from scripts.common.options import parse
from scripts.common.results import run
from scripts.common.tables import markdown, mean_and_error, page
from tarnn.data.tokenizers import byte_tokenizer
from tarnn.decoding.opening import open_step
from tarnn.log import silent
from tarnn.tuning.run import tune
from tarnn.tuning.state_run import tune_state
from tarnn.tuning.states import write_states
from tarnn.tuning.task import TuneSettings

LETTERS = "abcdefgh"
RULES = {
    "reverse": lambda x: x[::-1],
    "sort": lambda x: "".join(sorted(x)),
    "next letter": lambda x: "".join(LETTERS[(LETTERS.index(c) + 1) % len(LETTERS)] for c in x),
    "repeat the first": lambda x: x[0] * len(x),
    "swap halves": lambda x: x[len(x) // 2 :] + x[: len(x) // 2],
    "copy": lambda x: x,
}
TASKS = {"reverse": RULES["reverse"], "reverse, next letter": lambda x: RULES["next letter"](x[::-1])}
FULL = {
    "updates": 3000,
    "rows": 16,
    "lines": 12,
    "hidden": 128,
    "word": 4,
    "examples": 48,
    "steps": 60,
    "s0_steps": 20,
    "seeds": [0, 1, 2],
    "tested": 200,
    "rank": 16,
    "state_rates": [1e-2, 1e-1],
    "lora_rates": [1e-3, 5e-3],
    "runs": Path("runs/tune_state"),
    "resume": False,
}
QUICK = {
    "updates": 10,
    "rows": 4,
    "hidden": 32,
    "examples": 6,
    "steps": 3,
    "s0_steps": 1,
    "seeds": [0],
    "tested": 8,
    "rank": 4,
}
QUICK |= {"state_rates": [1e-2], "lora_rates": [1e-3], "runs": Path("runs/tune_state_quick")}


def main() -> int:
    about = {
        "lines": "of a page",
        "word": "letters",
        "examples": "lines to tune on",
        "tested": "lines to measure on",
        "s0_steps": "of s0-tuning as it is",
    }
    options = parse(__file__, __doc__, FULL, QUICK, about=about)
    return run(options, measure, results=[], report=report)


def words(draw: random.Random, options: Any, count: int) -> list[str]:
    return ["".join(draw.choice(LETTERS) for _ in range(options.word)) for _ in range(count)]


def lines(draw: random.Random, options: Any, rule: Any, count: int) -> list[tuple[str, str]]:
    """Lines as (prompt, answer)."""
    return [(f"{word}>", rule(word)) for word in words(draw, options, count)]


def base(options: Any) -> Path:
    """The folder of the model that was trained on pages, made once."""
    folder = options.runs / "base"
    if (folder / "config.json").exists():
        return folder
    torch.manual_seed(0)
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": options.hidden // 4}
    delta = {f"linear_{x}": options.hidden // 4 for x in ("key_head_dim", "value_head_dim")}
    delta |= {"linear_num_key_heads": 4, "linear_num_value_heads": 4}
    config = Qwen3_5TextConfig(
        vocab_size=257,
        hidden_size=options.hidden,
        intermediate_size=2 * options.hidden,
        num_hidden_layers=4,
        max_position_embeddings=4096,
        eos_token_id=256,
        tie_word_embeddings=True,
        **heads,
        **delta,
    )
    model, draw = Qwen3_5ForCausalLM(config), random.Random(0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.01)
    rate = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, options.updates, pct_start=0.05)
    with tarnn.patch_transformers(model):
        for update in range(options.updates):
            pages = [
                lines(draw, options, draw.choice(list(RULES.values())), options.lines) for _ in range(options.rows)
            ]
            ids = torch.tensor([list("".join(f"{x}{y}\n" for x, y in one).encode()) for one in pages])
            labels = ids.masked_fill(~answers(ids, options), -100)
            loss = model(input_ids=ids, labels=labels).loss
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            rate.step()
            optimizer.zero_grad()
            if update % max(1, options.updates // 20) == 0 or update == options.updates - 1:
                print(f"base model, update {update:5}: {loss.item():.4f} nats per letter of an answer", flush=True)
    byte_tokenizer().save_pretrained(folder)
    model.save_pretrained(folder)
    return folder


def answers(ids: torch.Tensor, options: Any) -> torch.Tensor:
    """Where answers stand, and the ends of their lines."""
    place = torch.arange(ids.shape[1]) % (2 * options.word + 2)
    return (place > options.word).expand_as(ids)


def measure(options: Any, results: list[dict[str, Any]], keep: Any) -> None:
    folder, path = base(options), options.out / "tune_state.json"
    if options.resume and path.exists():
        results += json.loads(path.read_text())["results"]
    done = [(x["task"], x["seed"]) for x in results]
    for task, rule in TASKS.items():
        for seed in [x for x in options.seeds if (task, x) not in done]:
            draw = random.Random(seed + 1)
            examples, others = lines(draw, options, rule, options.examples), lines(draw, options, rule, 16)
            tested = lines(draw, options, rule, options.tested)
            files = [written(options.runs / f"{x}.jsonl", some) for x, some in (("train", examples), ("val", others))]
            right = partial(exact, tested=tested)
            shown = "".join(f"{x}{y}\n" for x, y in examples[: options.lines - 1])
            row: dict[str, Any] = {"task": task, "seed": seed, "before": right(tarnn.load(folder))}
            row["prompt"] = right(tarnn.load(folder), before=shown)
            row["state"], row["state_rate"], row["state_seconds"] = best(options, folder, files, "state", right)
            row["lora"], row["lora_rate"], row["lora_seconds"] = best(options, folder, files, "lora", right)
            if importlib.util.find_spec("s0"):
                row["s0_version"] = version("s0-tuning")
                ways = {"s0": {"n_steps": options.s0_steps}}
                if not results:  # once: it takes minutes
                    ours = {"n_steps": options.steps, "lr": row["state_rate"], "alpha": 1.0, "l2_lambda": 0.0}
                    ways["s0_ours"] = ours
                for name, others in ways.items():
                    row[name], row[f"{name}_seconds"] = by_s0(options, folder, examples, right, others)
            print(row, flush=True)
            results.append(row)
            keep()


def written(path: Path, some: list[tuple[str, str]]) -> Path:
    path.write_text("".join(json.dumps({"prompt": x, "completion": f"{y}\n"}) + "\n" for x, y in some))
    return path


def best(options: Any, folder: Path, files: list[Path], kind: str, right: Any) -> tuple[float, float, float]:
    """Tune with each rate; of the one with the smallest loss on the second file return what is right, the rate, and seconds."""
    tried = []
    for rate in options.state_rates if kind == "state" else options.lora_rates:
        begun = time.perf_counter()
        out = options.runs / f"{kind}.run"
        settings = TuneSettings(
            sources=(str(files[0]),), out=out, folder=folder, kind=kind, lora=options.rank if kind == "lora" else None,
            length=1024, steps=options.steps, batch_size=1, learning_rate=rate, val=str(files[1]), overwrite=True,
            eval_every=max(1, options.steps // 6), save_every=max(1, options.steps // 6), device="cpu",
        )  # fmt: skip
        if kind == "state":
            path = options.runs / "tuned.state"
            result, _ = tune_state(settings, path, 1.0, silent, show=False)
            seconds, lm = time.perf_counter() - begun, tarnn.load(folder)
            tried.append((result.validation, right(lm, state=lm.open_state(path)), rate, seconds))
        else:
            result = tune(settings, silent, show=False).result
            seconds = time.perf_counter() - begun
            tried.append((result.validation, right(tarnn.load(folder, adapter=out)), rate, seconds))
    return min(tried)[1:]


def by_s0(options: Any, folder: Path, examples: Any, right: Any, others: dict[str, Any]) -> tuple[float, float]:
    """Let s0-tuning train, with its own settings but for some; return what is right from its states, and seconds."""
    from s0 import S0Config, S0Trainer

    kept, path = modeling_qwen3_5.torch_chunk_gated_delta_rule, options.runs / "s0.state"
    model = Qwen3_5ForCausalLM.from_pretrained(folder).eval()
    trainer = S0Trainer(model, AutoTokenizer.from_pretrained(folder), S0Config(**others))
    modeling_qwen3_5.torch_chunk_gated_delta_rule = by_attribute(model)
    begun = time.perf_counter()
    trainer.train([(f"{prompt}{answer}\n", len(prompt)) for prompt, answer in examples])
    seconds = time.perf_counter() - begun
    modeling_qwen3_5.torch_chunk_gated_delta_rule = kept
    states = trainer._scaled_states()  # by layers, times its factor
    write_states(path, [states[i].detach() for i in sorted(states)], open_step(folder))
    lm = tarnn.load(folder)
    return right(lm, state=lm.open_state(path)), seconds


def by_attribute(model: Any) -> Any:
    """A function in whose place each layer's attribute is called, as up to transformers 5.14: s0-tuning puts its states there.

    Chunks of 16 positions instead of 64, most of which would be padding: the same numbers in less time.
    """
    name, running = "chunk_gated_delta_rule", list[Any]()
    for layer in model.modules():
        if hasattr(layer, name):
            layer.register_forward_pre_hook(lambda layer, _: running.append(layer))
    return lambda *inputs, **options: getattr(running.pop(), name)(*inputs, chunk_size=16, **options)


def exact(lm: Any, tested: list[tuple[str, str]], before: str = "", state: Any = None) -> float:
    """The part of answers that is right to the last letter."""
    begin = lm.read(before) if before else state
    count = 0
    for prompt, answer in tested:
        text = "".join(lm.generate(prompt, state=begin, max_new_tokens=len(answer) + 1, temperature=0))
        count += text == f"{answer}\n"
    return count / len(tested)


def report(options: Any, facts: dict[str, Any], results: list[dict[str, Any]]) -> str:
    ways = {
        "before": "before",
        "prompt": f"{options.lines - 1} lines in front",
        "state": "first states",
        "s0": "first states, s0-tuning",
        "s0_ours": "first states, s0-tuning, settings as tarnn's, one seed",
        "lora": "LoRA",
    }

    def cell(task: str, way: str) -> str | None:
        return mean_and_error([100 * x[way] for x in results if x["task"] == task and way in x], ".1f")

    def seconds(way: str) -> str:
        times = [x[f"{way}_seconds"] for x in results if f"{way}_seconds" in x]
        return f"{statistics.median(times):.0f} s" if times else ""

    rows = [
        [name, *(cell(task, way) for task in TASKS), seconds(way)] for way, name in ways.items() if way in results[0]
    ]
    return page(
        "Tuned first states",
        f"A model of Qwen3.5's kind, {options.hidden} wide, 4 layers, trained here on pages of {len(RULES)} rules. "
        f"{options.examples} lines of one rule tune it in {options.steps} steps, each on all of them: its first states, or "
        f"adapters of rank {options.rank}. Lines right to the last letter, of {options.tested} new ones, in percent: mean and "
        f"standard error of {len(options.seeds)} seeds. A prompt has as many lines as a page of the base model's training.",
        markdown(
            ["", *(f"{x} ({'no page had it' if ',' in x else 'one rule of the pages'})" for x in TASKS), "of tuning"],
            rows,
        ),
        f"Rates with the smallest loss on 16 more lines: first states of {options.state_rates}, LoRA of {options.lora_rates}. "
        f"Seconds: of one tuning, the median of all.",
        *([about_s0(options, results[0]["s0_version"])] if "s0" in results[0] else []),
    )


def about_s0(options: Any, package: str) -> str:
    return (
        f"s0-tuning {package}: {options.s0_steps} steps at 0.001, a penalty on large states, a factor of 0.07; then, with "
        f"settings as tarnn's, {options.steps} steps at the rate that was best there, no penalty, a factor of 1. It puts states "
        "into an attribute of a layer that transformers 5.16 and later lack, so no gradient reaches them; here layers "
        "have that attribute, and chunks of 16 positions instead of 64. tarnn writes the answers from its states."
    )


if __name__ == "__main__":
    sys.exit(main())
