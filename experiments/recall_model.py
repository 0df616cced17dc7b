"""A small softmax model with rotary positions that recalls: what `pretrained.py` converts to ask what is lost of it.

    python experiments/recall_model.py --out runs/recall_model      # stopped or killed, it goes on

Rows are noise with pairs and a needle in it: a pair is a key and its value, side by side; the needle is a marker and four
tokens behind it. All of them come several times in a row, at random distances, and the loss is that of what can be known:
the value behind a key that was there before, the needle's tokens behind its marker. Some rows are a passage again and again:
from pairs alone, two layers take long to find out where to look. OUT holds `model/` (load it with
`from_pretrained`), `checkpoint.pt` and `log.jsonl`.
"""

import argparse
import json
import os
import time
from pathlib import Path
from typing import NamedTuple

import torch
from byte_model import model_of, optimizers
from torch import Tensor

KINDS = 64  # keys, values, tokens of needles, and noise: so many each
KEYS, VALUES, NEEDLE, NOISE = (0, KINDS, 2 * KINDS, 3 * KINDS)  # the first of each; the first of a needle is its marker
CELL, COPIED = 6, 4  # a cell of a row holds a pair or a needle


class Rows(NamedTuple):
    ids: Tensor  # (n, t)
    asked: Tensor  # (n, t), bool: what stands there can be known


def main() -> None:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--out", type=Path, required=True)
    made.add_argument("--minutes", type=float, default=10, help="of processor time")
    made.add_argument("--hidden", type=int, default=128)
    made.add_argument("--layers", type=int, default=2)
    made.add_argument("--context", type=int, default=256)
    train(made.parse_args())


def noise(n: int, length: int, draw: torch.Generator) -> Tensor:
    return torch.randint(NOISE, NOISE + KINDS, (n, length), generator=draw)


def different(n: int, number: int, first: int, draw: torch.Generator) -> Tensor:
    """`number` different tokens of a kind in each of n rows."""
    return first + torch.rand(n, KINDS, generator=draw).argsort(-1)[:, :number]


def needle(n: int, draw: torch.Generator) -> Tensor:
    marker = torch.full((n, 1), NEEDLE)
    copied = NEEDLE + 1 + torch.rand(n, KINDS - 1, generator=draw).argsort(-1)[:, :COPIED]
    return torch.cat([marker, copied], 1)


def batch(n: int, length: int, draw: torch.Generator) -> Rows:
    """Each of some pairs, and a needle, in three cells of a row."""
    ids, asked, row = noise(n, length, draw), torch.zeros(n, length, dtype=torch.bool), torch.arange(n)
    cells = torch.rand(n, length // CELL, generator=draw).argsort(-1)
    number = (length // CELL - 3) // 4
    keys, values = (
        different(n, number, KEYS, draw),
        torch.randint(VALUES, VALUES + KINDS, (n, number), generator=draw),
    )
    things = [torch.stack([keys[:, i], values[:, i]], 1) for i in range(number)] + [needle(n, draw)]
    for i, thing in enumerate(things):
        for again, cell in enumerate(cells[:, 3 * i : 3 * i + 3].sort(-1).values.T):
            start = CELL * cell + torch.randint(CELL - thing.shape[1] + 1, (n,), generator=draw)
            for j in range(thing.shape[1]):
                ids[row, start + j] = thing[:, j]
                asked[row, start + j] = again > 0 and j > 0
    return Rows(ids, asked)


def repeated(n: int, length: int, draw: torch.Generator) -> Rows:
    """Each row a passage again and again, of a length of its own: what a model learns to look back with."""
    period = torch.randint(8, length // 2, (n, 1), generator=draw)
    ids = torch.randint(4 * KINDS, (n, length), generator=draw)
    place = torch.arange(length)
    return Rows(ids.gather(1, place % period), place > period)


def question(kind: str, n: int, length: int, distance: int, pairs: int = 8, seed: int = 0) -> Rows:
    """Rows that end with a pair or a needle that stood `distance` tokens before. Other pairs stand anywhere."""
    draw = torch.Generator().manual_seed(1000 * distance + seed)
    ids, asked, row = noise(n, length, draw), torch.zeros(n, length, dtype=torch.bool), torch.arange(n)
    keys, values = (different(n, pairs, KEYS, draw), torch.randint(VALUES, VALUES + KINDS, (n, pairs), generator=draw))
    thing = torch.stack([keys[:, 0], values[:, 0]], 1) if kind == "pair" else needle(n, draw)
    last, first = length - thing.shape[1], length - thing.shape[1] - distance
    for start in (first, last):
        ids[:, start : start + thing.shape[1]] = thing
    free = torch.tensor([i for i in range(0, last - 1, 2) if i + 2 <= first or i >= first + thing.shape[1]])
    places = free[torch.rand(n, len(free), generator=draw).argsort(-1)[:, : pairs - 1]]
    for i in range(places.shape[1]):
        ids[row, places[:, i]], ids[row, places[:, i] + 1] = keys[:, i + 1], values[:, i + 1]
    asked[:, last + 1 :] = True
    return Rows(ids, asked)


def right(logits: Tensor, rows: Rows) -> float:
    """The share of what is asked for that is the likeliest token."""
    return (logits[:, :-1].argmax(-1) == rows.ids[:, 1:])[rows.asked[:, 1:]].float().mean().item()


def train(options: argparse.Namespace) -> None:
    options.out.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(0)
    model = model_of(options.hidden, options.layers, options.context)
    made, step, seconds, path = optimizers(model), 0, 0.0, options.out / "checkpoint.pt"
    if path.exists():
        saved = torch.load(path, weights_only=True)
        model.load_state_dict(saved["model"])
        for one, state in zip(made, saved["optimizers"]):
            one.load_state_dict(state)
        step, seconds = saved["step"], saved["seconds"]
    peaks = [group["lr"] for one in made for group in one.param_groups]
    limit, begun = 60 * options.minutes, time.process_time() - seconds

    def save() -> None:
        torch.save(
            {
                "model": model.state_dict(),
                "optimizers": [one.state_dict() for one in made],
                "step": step,
                "seconds": seconds,
            },
            path.with_suffix(".partial"),
        )
        os.replace(path.with_suffix(".partial"), path)
        model.save_pretrained(options.out / "model")
        with torch.no_grad():
            line = {"step": step, "processor_seconds": round(seconds), "loss": round(found.item(), 4)}
            for kind in ("pair", "needle"):
                rows = question(kind, 64, options.context, options.context // 2)
                line[kind] = round(right(model(rows.ids, use_cache=False).logits, rows), 3)
        with (options.out / "log.jsonl").open("a") as log:
            log.write(json.dumps(line) + "\n")
        print(line, flush=True)

    while seconds < limit:
        done = seconds / limit  # short rows first, and passages: what to look for is found there
        length = options.context // (4 if done < 0.2 else 2 if done < 0.4 else 1)
        for peak, group in zip(peaks, (group for one in made for group in one.param_groups)):
            group["lr"] = peak * min(1.0, (step + 1) / 50, 2 * (1 - done) + 0.02)
        make = repeated if done < 0.2 or step % 4 == 0 else batch
        rows = make(4096 // length, length, torch.Generator().manual_seed(step))
        logits = model(rows.ids, use_cache=False).logits[:, :-1][rows.asked[:, 1:]]
        found = torch.nn.functional.cross_entropy(logits, rows.ids[:, 1:][rows.asked[:, 1:]])
        found.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for one in made:
            one.step()
            one.zero_grad()
        step, seconds = step + 1, time.process_time() - begun
        if step % 100 == 0 or seconds >= limit:
            save()


if __name__ == "__main__":
    main()
