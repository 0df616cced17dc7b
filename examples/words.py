"""Train a label for each word of a text, then label new texts.

    python examples/words.py                               # without a file: names, verbs and objects of made-up sentences
    python examples/words.py words.jsonl --out runs/words  # lines {"tokens": ["Ada", "wrote"], "labels": ["NAME", "VERB"]}

The folder of --out opens again by `TarnnForTokenClassification.from_pretrained(folder)`; --use runs/words trains nothing.
"""

import argparse
import json
import random
from pathlib import Path

import torch

from tarnn.models import TarnnConfig, TarnnForTokenClassification

PAD, IGNORED = 256, -100  # bytes are their own ids
Row = tuple[list[str], list[str]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="?", type=Path)
    parser.add_argument("--out", type=Path, default=Path("runs/words"))
    parser.add_argument("--use", type=Path, help="a trained model's folder")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--ask", nargs="*", default=["Bob saw tea"], help="texts to label")
    options = parser.parse_args()
    torch.manual_seed(0)
    if options.use:
        model = TarnnForTokenClassification.from_pretrained(options.use)
    else:
        model = train(read(options.words) if options.words else sentences(), options.steps)
        model.save_pretrained(options.out)
        print(f"the model is in {options.out}")
    for text in options.ask:
        words = text.split()
        print(" ".join(f"{word}/{label}" for word, label in zip(words, labels_of(model.eval(), words))))


def read(path: Path) -> list[Row]:
    """Read words and as many labels from lines of JSON."""
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    return [(row["tokens"], row["labels"]) for row in rows]


def sentences() -> list[Row]:
    """Draw sentences such as: Ada drank tea."""
    words = {"NAME": ["Ada", "Bob", "Eve"], "VERB": ["saw", "drank", "made"], "OBJECT": ["tea", "bread", "maps"]}
    draw = random.Random(0)
    return [([draw.choice(words[label]) for label in words], [*words]) for _ in range(500)]


def train(data: list[Row], steps: int, batch_size: int = 16) -> TarnnForTokenClassification:
    """Train an encoder of two layers; print its loss in nats per word."""
    names = sorted({label for _, labels in data for label in labels})
    config = TarnnConfig(
        vocab_size=257, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, causal=False,
        bos_token_id=PAD, eos_token_id=PAD, pad_token_id=PAD, id2label=dict(enumerate(names)),
        label2id={name: i for i, name in enumerate(names)},
    )  # fmt: skip
    model, draw = TarnnForTokenClassification(config), random.Random(1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for step in range(1, steps + 1):
        ids, labels = [], []
        for words, of_words in draw.choices(data, k=batch_size):
            row, ends = ids_of(words)
            ids.append(row)
            labels.append(torch.full_like(row, IGNORED))
            labels[-1][ends] = torch.tensor([config.label2id[label] for label in of_words])
        filled = torch.nn.utils.rnn.pad_sequence(ids, True, PAD)
        targets = torch.nn.utils.rnn.pad_sequence(labels, True, IGNORED)
        loss = model(input_ids=filled, attention_mask=(filled != PAD).long(), labels=targets).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % 50 == 0 or step == steps:
            print(f"step {step}: loss {loss.item():.4f}", flush=True)
    return model


def ids_of(words: list[str]) -> tuple[torch.Tensor, list[int]]:
    """Return the bytes of words with spaces between them, and the position of the last byte of each word."""
    parts = [(" " * (i > 0) + word).encode() for i, word in enumerate(words)]
    ends = torch.tensor([len(part) for part in parts]).cumsum(0) - 1
    return torch.tensor([*b"".join(parts)]), ends.tolist()


@torch.no_grad()
def labels_of(model: TarnnForTokenClassification, words: list[str]) -> list[str]:
    """Label each word: its last byte has the label."""
    ids, ends = ids_of(words)
    best = model(input_ids=ids[None]).logits[0, ends].argmax(-1)
    return [model.config.id2label[i] for i in best.tolist()]


if __name__ == "__main__":
    main()
