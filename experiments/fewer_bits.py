"""What weights of fewer bits, and a head of fewer bits, cost a trained model on text that it has not seen.

    python experiments/fewer_bits.py --model runs/byte_model/model --books FOLDER      # three minutes; experiments/results/
    python experiments/fewer_bits.py --model runs/piece_model/model --books FOLDER --out runs/fewer_bits.pieces

A model that `byte_model.py` trained, of bytes or of pieces of words, opened by `tarnn.load` in each format; activations are
rounded as in generation. It reads rows of the two books that training held out. What its head reads then goes through the head
kept in several ways, in plain PyTorch: as it is, in bfloat16, in int8 with a factor per row, and in int8 with a factor per 32
weights; where the head is in int8, what it reads is in bytes too.
"""

import gzip
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

sys.path.insert(0, str(Path(__file__).parents[1]))
import tarnn
from experiments.byte_model import HELD_OUT
from scripts.common.options import parse
from scripts.common.results import run
from scripts.common.tables import markdown, page, source
from tarnn.decoding.lm import LM
from tarnn.kernels.cpu.products import FORMATS

FULL = {"model": Path, "books": Path, "rows": 24, "length": 1024}
QUICK = {"rows": 2, "length": 16}
ABOUT = {
    "model": "a folder of a model of bytes, or with a tokenizer.json",
    "books": "a folder of .txt.gz",
    "rows": "of both books together",
    "length": "tokens of a row",
}
HEADS = {"float32": None, "bfloat16": None, "int8": 0, "int8 by 32": 32}  # how many weights have a factor; 0: a row


def main() -> int:
    options = parse(__file__, __doc__, FULL, QUICK, about=ABOUT)
    with torch.no_grad():
        return run(options, measure, report=report)


def measure(options, found: dict[str, Any], keep: Callable[[], None]) -> None:
    for weights in FORMATS:
        lm = tarnn.load(options.model, weights)
        runtime = lm.opened.step
        head = runtime.program.instructions[-1].weights["weight"].float()
        kept = {name: (x, size is not None) for name, size in HEADS.items() for x in [rounded(head, name, size)]}
        rows, num_bytes = held_out(lm, options.books, options.rows, options.length)
        nats, counted = dict.fromkeys(HEADS, 0.0), 0
        for ids in rows:
            _, hidden, _ = runtime.with_hidden(ids, runtime.new_state(1, len(ids)))
            for name, (weight, in_bytes) in kept.items():
                logits = (as_bytes(hidden[:-1]) if in_bytes else hidden[:-1]) @ weight.T
                nats[name] += cross_entropy(logits.float(), ids[1:], reduction="sum").item()
            counted += len(ids) - 1
        found[weights] = {
            "bits": {name: x / math.log(2) / counted for name, x in nats.items()},
            "bytes": runtime.packed.block.numel(),
            "of_the_head": head.numel(),
        }
        found["vocabulary"], found["bytes_per_token"] = len(head), num_bytes / counted
        print(weights, found[weights], flush=True)
        keep()


def rounded(head: Tensor, name: str, size: int | None) -> Tensor:
    """The head as `name` keeps it. size: how many weights of a row have one factor, 0: all."""
    if size is None:
        return head.to(getattr(torch, name)).float()
    groups = head.unflatten(-1, (-1, size or head.shape[-1]))
    factor = groups.abs().amax(-1, keepdim=True) / 127
    return ((groups / factor).round() * factor).nan_to_num().flatten(-2)


def as_bytes(x: Tensor) -> Tensor:
    """Each row in 256 levels from its least number to its greatest, as the fused step reads it."""
    least, most = x.aminmax(dim=-1, keepdim=True)
    step = (most - least) / 255
    return ((x - least) / step).round() * step + least


def held_out(lm: LM, books: Path, rows: int, length: int) -> tuple[Tensor, int]:
    """(rows, length) tokens, the same number from each book, and the bytes that they stand for."""
    found, num_bytes = [], 0
    for name in HELD_OUT:
        with gzip.open(books / f"{name}.txt.gz") as file:
            text = file.read()
        for start in torch.linspace(len(text) // 10, len(text) - 8 * length, rows // len(HELD_OUT)).long().tolist():
            ids = lm.ids(text[start : start + 8 * length].decode(errors="ignore"))[:length]
            found.append(ids)
            num_bytes += len(lm.decode(ids[1:].tolist()).encode())
    return torch.stack(found), num_bytes


def report(options, facts: dict[str, Any], found: dict[str, Any]) -> str:
    formats = {weights: found[weights] for weights in FORMATS if weights in found}
    best = formats["float32"]["bits"]["float32"]
    said = (
        f"{options.rows} rows of {options.length:,} tokens from {' and '.join(HELD_OUT)}; {found['vocabulary']:,} kinds of "
        f"tokens, {found['bytes_per_token']:.2f} bytes each. Bits per token and their change against float32, by how the head is "
        "kept. The bytes are those of the packed weights with a head in bfloat16, but in the first row."
    )
    rows = [
        [weights, f"{x['bytes']:,}", *(f"{y:.4f} ({100 * (y / best - 1):+.3f} %)" for y in x["bits"].values())]
        for weights, x in formats.items()
    ]
    heads = [f"head in {name}" for name in HEADS]
    return page("Weights of fewer bits", source(facts, said), markdown(["weights", "bytes", *heads], rows))


if __name__ == "__main__":
    sys.exit(main())
