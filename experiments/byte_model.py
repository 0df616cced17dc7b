"""A byte-level softmax model with rotary positions, trained on novels: what `pretrained.py` converts.

    python experiments/byte_model.py --books FOLDER --out runs/byte_model      # killed, it goes on

A stock `LlamaForCausalLM` of transformers: bytes are its tokens. Three rows of ten hold facts such as [[kqx=dwpa]] between the
lines, each of them repeated further on, so that the model learns to look far back and there is something to lose. OUT holds
`model/` (load it with `from_pretrained`) and the checkpoint. Two books are held out.
"""

import argparse
import gzip
import math
import random
import sys
from pathlib import Path

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

sys.path.insert(0, str(Path(__file__).parents[1]))
from scripts.common.loop import train

HELD_OUT = ("pride_and_prejudice", "moby_dick")
LETTERS = "abcdefghijklmnopqrstuvwxyz"


def main() -> None:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--books", type=Path, required=True, help="a folder of .txt.gz")
    made.add_argument("--out", type=Path, required=True)
    made.add_argument("--steps", type=int, default=15_000)
    made.add_argument("--row-tokens", type=int, default=4096, help="bytes per update")
    made.add_argument("--hidden", type=int, default=256)
    made.add_argument("--layers", type=int, default=4)
    made.add_argument("--context", type=int, default=1024)
    made.add_argument("--learning-rate", type=float, default=2e-3)
    options = made.parse_args()
    torch.manual_seed(0)
    model, files = model_of(options.hidden, options.layers, options.context), sorted(options.books.glob("*.txt.gz"))
    books = b"\n\n".join(read(x) for x in files if x.name.removesuffix(".txt.gz") not in HELD_OUT)
    unseen = read(options.books / f"{HELD_OUT[0]}.txt.gz")
    step = (len(unseen) - options.context) // 16
    held_out = torch.tensor([list(unseen[i * step : i * step + options.context]) for i in range(16)])

    def loss(model, step: int) -> Tensor:
        ids = batch(books, random.Random(step), options.row_tokens // options.context, options.context)
        return model(input_ids=ids, labels=ids, use_cache=False).loss

    def measure(model) -> dict[str, float]:
        nats = [float(model(input_ids=x, labels=x, use_cache=False).loss) for x in held_out.split(4)]
        return {"bits_per_byte": sum(nats) / len(nats) / math.log(2)}

    every = max(1, options.steps // 20)
    train(options.out, model, loss, options.steps, every=every, learning_rate=options.learning_rate, measure=measure)
    model.save_pretrained(options.out / "model")


def model_of(hidden: int, layers: int, context: int) -> LlamaForCausalLM:
    heads = hidden // 32
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=256,
            hidden_size=hidden,
            intermediate_size=hidden * 11 // 4,
            num_hidden_layers=layers,
            num_attention_heads=heads,
            num_key_value_heads=heads // 2,
            max_position_embeddings=context,
            tie_word_embeddings=True,
            bos_token_id=None,
            eos_token_id=None,
        )
    )


def read(path: Path) -> bytes:
    with gzip.open(path) as file:
        return file.read()


def with_facts(text: bytes, generator: random.Random) -> bytes:
    """The text with facts inserted, two or three times each; as long as before."""
    keys = {"".join(generator.choices(LETTERS, k=3)) for _ in range(generator.randint(1, max(1, len(text) // 100)))}
    facts = [f"[[{key}={''.join(generator.choices(LETTERS, k=4))}]]".encode() for key in sorted(keys)]
    inserted = [fact for fact in facts for _ in range(generator.randint(2, 3))]
    generator.shuffle(inserted)
    cuts = sorted(generator.randrange(len(text)) for _ in inserted)
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)])]
    return b"".join(x for pair in zip(pieces, [*inserted, b""]) for x in pair)[: len(text)]


def batch(books: bytes, generator: random.Random, rows: int, length: int) -> Tensor:
    """(rows, length) bytes, of which some rows hold facts."""
    found = []
    for _ in range(rows):
        at = generator.randrange(len(books) - length)
        row = books[at : at + length]
        found.append(list(with_facts(row, generator) if generator.random() < 0.3 else row))
    return torch.tensor(found)


if __name__ == "__main__":
    main()
