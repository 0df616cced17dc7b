"""A byte-level softmax model with rotary positions, trained on novels: what `pretrained.py` converts.

    python experiments/byte_model.py --books FOLDER --out runs/byte_model      # stopped or killed, it goes on

A stock `LlamaForCausalLM` of transformers: bytes are its tokens, 1,024 of them its context. Three rows of ten hold
facts such as [[kqx=dwpa]] between the lines, each of them repeated further on, so that the model learns to look far back
and there is something to lose. With --vocabulary 16384 its tokens are pieces of words (BPE made of the same books), and no facts
are inserted: what `fewer_bits.py` reads. OUT holds `model/` (the running mean of the weights, in bfloat16: load it with
`from_pretrained`), `checkpoint.pt` and `log.jsonl`; both are written every --save-minutes, and training goes on until
--tokens or until it is stopped. Two books are held out.
"""

import argparse
import gzip
import json
import math
import os
import random
import signal
import time
from pathlib import Path

import torch
from tokenizers import ByteLevelBPETokenizer, Tokenizer
from torch import Tensor
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from transformers import LlamaConfig, LlamaForCausalLM

HELD_OUT = ("pride_and_prejudice", "moby_dick")
LETTERS = "abcdefghijklmnopqrstuvwxyz"


def main() -> None:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--books", type=Path, required=True, help="a folder of .txt.gz")
    made.add_argument("--out", type=Path, required=True)
    made.add_argument("--tokens", type=int, default=60_000_000)
    made.add_argument("--short-tokens", type=int, default=2_500_000, help="the first so many in rows of 256")
    made.add_argument("--row-tokens", type=int, default=4096, help="tokens per update")
    made.add_argument("--hidden", type=int, default=256)
    made.add_argument("--layers", type=int, default=4)
    made.add_argument("--context", type=int, default=1024)
    made.add_argument("--vocabulary", type=int, default=256, help="256: bytes; more: pieces of words")
    made.add_argument("--save-minutes", type=float, default=3)
    train(made.parse_args())


def model_of(hidden: int, layers: int, context: int, vocabulary: int) -> LlamaForCausalLM:
    heads = hidden // 32
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=vocabulary,
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


def pieces_of(books: bytes, vocabulary: int, path: Path) -> Tokenizer:
    """A tokenizer of so many pieces, made of the books and kept at `path`."""
    if not path.exists():
        made = ByteLevelBPETokenizer()
        made.train_from_iterator(books.decode().split("\n\n"), vocab_size=vocabulary, show_progress=False)
        path.parent.mkdir(exist_ok=True)
        made.save(str(path))
    return Tokenizer.from_file(str(path))


def facts(generator: random.Random, number: int) -> list[bytes]:
    """Facts with different keys, such as [[kqx=dwpa]]."""
    keys = {"".join(generator.choices(LETTERS, k=3)) for _ in range(number)}
    return [f"[[{key}={''.join(generator.choices(LETTERS, k=4))}]]".encode() for key in sorted(keys)]


def with_facts(text: bytes, generator: random.Random) -> bytes:
    """The text with facts inserted, two or three times each; as long as before."""
    number = generator.randint(1, max(1, len(text) // 100))
    inserted = [fact for fact in facts(generator, number) for _ in range(generator.randint(2, 3))]
    generator.shuffle(inserted)
    cuts = sorted(generator.randrange(len(text)) for _ in inserted)
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)])]
    return b"".join(x for pair in zip(pieces, [*inserted, b""]) for x in pair)[: len(text)]


def batch(books: bytes | list[int], generator: random.Random, rows: int, length: int) -> Tensor:
    """(rows, length) tokens: bytes, of which some rows hold facts, or pieces."""
    found: list[bytes | list[int]] = []
    for _ in range(rows):
        at = generator.randrange(len(books) - length)
        row = books[at : at + length]
        found.append(with_facts(row, generator) if isinstance(row, bytes) and generator.random() < 0.3 else row)
    return torch.tensor([list(x) for x in found])


def optimizers(model: LlamaForCausalLM) -> list[torch.optim.Optimizer]:
    """Muon for the matrices of the layers, AdamW for the rest."""
    inside = [p for name, p in model.named_parameters() if p.ndim == 2 and ".layers." in name]
    others = [p for name, p in model.named_parameters() if p.ndim != 2 or ".layers." not in name]
    return [
        torch.optim.Muon(inside, lr=1e-2, weight_decay=0.01, adjust_lr_fn="original"),
        torch.optim.AdamW(others, lr=2e-3, betas=(0.9, 0.95), weight_decay=0.0),
    ]


@torch.no_grad()
def bits(model: torch.nn.Module, text: bytes | list[int], context: int, rows: int = 16) -> float:
    """Bits per token of rows that are spread over a text."""
    step = (len(text) - context) // rows
    ids = torch.tensor([list(text[i * step : i * step + context]) for i in range(rows)])
    return sum(model(input_ids=x, labels=x, use_cache=False).loss.item() for x in ids.split(4)) / (
        math.ceil(rows / 4) * math.log(2)
    )


def train(options: argparse.Namespace) -> None:
    options.out.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(0)
    model = model_of(options.hidden, options.layers, options.context, options.vocabulary)
    mean = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.99))
    made, tokens, seconds = optimizers(model), 0, 0.0
    peaks = [group["lr"] for one in made for group in one.param_groups]
    path = options.out / "checkpoint.pt"
    if path.exists():
        saved = torch.load(path, weights_only=True)
        model.load_state_dict(saved["model"])
        mean.load_state_dict(saved["mean"])
        for one, state in zip(made, saved["optimizers"]):
            one.load_state_dict(state)
        tokens, seconds = saved["tokens"], saved["seconds"]
    files = sorted(options.books.glob("*.txt.gz"))
    books = b"\n\n".join(read(x) for x in files if x.name.removesuffix(".txt.gz") not in HELD_OUT)
    unseen = read(options.books / f"{HELD_OUT[0]}.txt.gz")
    if options.vocabulary > 256:
        pieces = pieces_of(books, options.vocabulary, options.out / "model" / "tokenizer.json")
        books, unseen = pieces.encode(books.decode()).ids, pieces.encode(unseen.decode()).ids
    print(f"{model.num_parameters() / 1e6:.2f} M parameters, {len(books):,} tokens; from token {tokens:,}", flush=True)

    def save() -> None:
        parts = {"model": model.state_dict(), "mean": mean.state_dict()}
        torch.save(
            {**parts, "optimizers": [one.state_dict() for one in made], "tokens": tokens, "seconds": seconds},
            path.with_suffix(".partial"),
        )
        os.replace(path.with_suffix(".partial"), path)
        LlamaForCausalLM.from_pretrained(
            None, config=model.config, state_dict=mean.module.state_dict(), dtype=torch.bfloat16
        ).save_pretrained(options.out / "model")
        line = {
            "tokens": tokens,
            "processor_seconds": round(seconds),
            "training_loss": round(loss, 4),
            "bits_per_token": round(bits(mean.module, unseen, options.context), 4),
        }
        with (options.out / "log.jsonl").open("a") as log:
            log.write(json.dumps(line) + "\n")
        print(line, flush=True)

    stopped, loss, saved_at = False, math.nan, time.monotonic()

    def stop(*_) -> None:
        nonlocal stopped
        stopped = True

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, stop)
    while tokens < options.tokens and not stopped:
        begun = time.process_time()
        length = 256 if tokens < options.short_tokens else options.context
        ids = batch(books, random.Random(tokens), options.row_tokens // length, length)
        share = min(1.0, (tokens + 1) / 500_000, math.sqrt(10_000_000 / (tokens + 1)))  # of the learning rate
        groups = [group for one in made for group in one.param_groups]
        for group, peak in zip(groups, peaks):
            group["lr"] = peak * share
        with torch.autocast("cpu", torch.bfloat16, enabled=torch.cpu._is_avx512_bf16_supported()):
            found = model(input_ids=ids, labels=ids, use_cache=False).loss
        found.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for one in made:
            one.step()
            one.zero_grad()
        mean.update_parameters(model)
        tokens += ids.numel()
        loss = found.item() if math.isnan(loss) else 0.95 * loss + 0.05 * found.item()
        seconds += time.process_time() - begun
        if time.monotonic() - saved_at > 60 * options.save_minutes:
            save()
            saved_at = time.monotonic()
    save()


if __name__ == "__main__":
    main()
