"""Train an encoder–decoder on pairs of texts, then write the targets of new sources.

    python examples/pairs.py                               # without a file: numbers and their digits reversed
    python examples/pairs.py pairs.tsv --out runs/pairs    # each line: source, tab, target

The folder of --out opens again by `TarnnForConditionalGeneration.from_pretrained(folder)`; --use runs/pairs trains nothing.
"""

import argparse
import random
from pathlib import Path

import torch
from torch import Tensor

from tarnn.models import TarnnForConditionalGeneration, TarnnSeq2SeqConfig

END, IGNORED = 256, -100  # bytes are their own ids; END ends a text and fills rows up


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pairs", nargs="?", type=Path)
    parser.add_argument("--out", type=Path, default=Path("runs/pairs"))
    parser.add_argument("--use", type=Path, help="a trained model's folder")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--ask", nargs="*", default=["2024", "31415"], help="sources to write the targets of")
    options = parser.parse_args()
    torch.manual_seed(0)
    if options.use:
        model = TarnnForConditionalGeneration.from_pretrained(options.use)
    else:
        model = train(read(options.pairs) if options.pairs else numbers(), options.steps)
        model.save_pretrained(options.out)
        print(f"the model is in {options.out}")
    for source in options.ask:
        print(f"{source}\t{target_of(model.eval(), source)}")


def read(path: Path) -> list[tuple[str, str]]:
    """Read sources and targets from lines with a tab between them."""
    rows = (line.split("\t") for line in path.read_text(encoding="utf-8").splitlines() if line.strip())
    return [(row[0], row[-1]) for row in rows]


def numbers() -> list[tuple[str, str]]:
    """Draw numbers, and write their digits backwards."""
    draw = random.Random(0)
    return [(x, x[::-1]) for x in (str(draw.randrange(10**5)) for _ in range(5000))]


def train(pairs: list[tuple[str, str]], steps: int, batch_size: int = 32) -> TarnnForConditionalGeneration:
    """Train a model of two layers; print its loss in nats per byte."""
    config = TarnnSeq2SeqConfig(
        vocab_size=257, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, cross_attention="softmax",
        bos_token_id=END, eos_token_id=END, pad_token_id=END, decoder_start_token_id=END,
    )  # fmt: skip
    model, draw = TarnnForConditionalGeneration(config), random.Random(1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for step in range(1, steps + 1):
        batch = draw.choices(pairs, k=batch_size)
        ids = rows([source.encode() for source, _ in batch], END)
        labels = rows([[*target.encode(), END] for _, target in batch], IGNORED)
        loss = model(input_ids=ids, attention_mask=(ids != END).long(), labels=labels).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % 100 == 0 or step == steps:
            print(f"step {step}: loss {loss.item():.4f}", flush=True)
    return model


def rows(texts: list, fill: int) -> Tensor:
    """Make one tensor of rows, filled up on the right."""
    return torch.nn.utils.rnn.pad_sequence([torch.tensor([*text]) for text in texts], True, fill)


@torch.no_grad()
def target_of(model: TarnnForConditionalGeneration, source: str, longest: int = 200) -> str:
    """Write the likeliest target, byte after byte: the source is read once."""
    state, token = model.read(torch.tensor([[*source.encode()]]), capacity=longest), model.start(1)
    written: list[int] = []
    while len(written) < longest:
        logits, state = model.step(token, state, inplace=True)
        token = logits.argmax(-1)
        if int(token) == END:
            break
        written.append(int(token))
    return bytes(x for x in written if x < 256).decode(errors="replace")


if __name__ == "__main__":
    main()
