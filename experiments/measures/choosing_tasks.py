"""What `choosing.py` trains on: novels byte by byte, pairs to be recalled, and symbols to be copied.

A batch is a function of the seed and of the step's number. What is held out is the same for all.
"""

import argparse
import gzip
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from measures.short_tasks import copying, draw_for
from scripts.common.results import Unmeasured
from tarnn.models import TarnnConfig, TarnnForCausalLM

SYMBOLS = 64  # of keys, and as many of values
IGNORED = -100


class Task(NamedTuple):
    build: Callable[[dict[str, Any]], nn.Module]  # a model, from keys of its config
    loss: Callable[[nn.Module, int, int], Tensor]  # of the batch of a seed and a step
    measure: Callable[[nn.Module], dict[str, float]]  # of what is held out: "score", and what else is known
    more_is_better: bool = True


def books(options: argparse.Namespace) -> Task:
    """Each byte of a novel from those before it; the score is bits per byte of another novel."""
    training, unseen = texts(options)
    rows = unseen[: len(unseen) // options.context * options.context].view(-1, options.context)

    def loss(model: nn.Module, seed: int, step: int) -> Tensor:
        starts = torch.randint(len(training) - options.context, (options.batch_size,), generator=draw_for(seed, step))
        ids = torch.stack([training[i : i + options.context] for i in starts.tolist()]).long()
        return model(input_ids=ids, labels=ids, use_cache=False).loss

    def measure(model: nn.Module) -> dict[str, float]:
        parts = [x.long() for x in rows.split(options.batch_size)]
        nats = sum(len(x) * float(model(input_ids=x, labels=x, use_cache=False).loss) for x in parts)
        return {"score": nats / len(rows) / math.log(2)}

    return Task(lambda keys: TarnnForCausalLM(TarnnConfig(vocab_size=256, **keys)), loss, measure, False)


def texts(options: argparse.Namespace) -> tuple[Tensor, Tensor]:
    """All books but one, end to end, and the first bytes of that one, which is not trained on."""
    files = {x.name.split(".")[0]: x for x in sorted(options.books.glob("*.txt*"))}
    if options.unseen not in files or len(files) < 2:
        raise Unmeasured(
            f"--books {options.books} should hold two books or more as .txt or .txt.gz, {options.unseen} among them; it has "
            f"{', '.join(files) or 'none'}."
        )
    content = {
        name: gzip.decompress(x.read_bytes()) if x.suffix == ".gz" else x.read_bytes() for name, x in files.items()
    }
    unseen = content.pop(options.unseen)[: options.validation_bytes]
    training, held_out = (
        torch.from_numpy(np.frombuffer(x, np.uint8).copy()) for x in (b"\n".join(content.values()), unseen)
    )
    return training, held_out


def recall(options: argparse.Namespace) -> Task:
    """The value that stood behind each key, among 8 to 64 pairs; the score is the mean over the numbers of pairs, in per cent.

    Batches have from one pair on, as often 1 to 8 as 8 to 64, and equally many tokens: from many pairs alone, models
    are slow to find out where to look. Associative recall with many queries (Arora et al. 2023, arXiv 2312.04927).
    """
    if max(options.pairs) > SYMBOLS:
        raise Unmeasured(f"there are {SYMBOLS} keys; --pairs takes numbers up to that, got {max(options.pairs)}")
    most, tokens = max(options.pairs), options.recall_batch * options.copy_length
    tests = {n: pairs(torch.Generator().manual_seed(n), options.test_rows, n) for n in options.pairs}

    def loss(model: nn.Module, seed: int, step: int) -> Tensor:
        draw = draw_for(seed, step)
        number = round(most ** torch.rand((), generator=draw).item())
        ids, labels = pairs(draw, max(1, tokens // (4 * number)), number)
        return model(input_ids=ids, labels=labels, use_cache=False).loss

    def measure(model: nn.Module) -> dict[str, float]:
        shares = {str(n): right(model, *test) for n, test in tests.items()}
        return {"score": sum(shares.values()) / len(shares), **shares}

    return Task(lambda keys: TarnnForCausalLM(TarnnConfig(vocab_size=2 * SYMBOLS, **keys)), loss, measure)


def pairs(draw: torch.Generator, rows: int, number: int) -> tuple[Tensor, Tensor]:
    """(ids, labels), each (rows, 4 · number): different keys with their values, then the same pairs in another order.

    Labels are the second values.
    """
    keys = torch.rand(rows, SYMBOLS, generator=draw).argsort(-1)[:, :number]
    values = torch.randint(SYMBOLS, 2 * SYMBOLS, (rows, number), generator=draw)
    order = torch.rand(rows, number, generator=draw).argsort(-1)
    again = torch.stack([keys.gather(1, order), values.gather(1, order)], -1).flatten(1)
    first = torch.stack([keys, values], -1).flatten(1)
    labels = torch.where(again >= SYMBOLS, again, IGNORED)
    return torch.cat([first, again], 1), torch.cat([torch.full_like(first, IGNORED), labels], 1)


def right(model: nn.Module, ids: Tensor, labels: Tensor) -> float:
    """How many of the labels the model finds, in per cent."""
    found = [model(input_ids=x, use_cache=False).logits[:, :-1].argmax(-1) for x in ids.split(32)]
    asked = labels[:, 1:] != IGNORED
    return 100 * (torch.cat(found) == labels[:, 1:])[asked].double().mean().item()


def copied(options: argparse.Namespace) -> Task:
    """The symbols of the first half of a sequence, in its second half: `copy_task.py`."""
    sizes = {"copy_length": options.copy_length, "batch_size": options.recall_batch, "test_rows": 8 * options.test_rows}
    task = copying(argparse.Namespace(**sizes))
    return Task(task.build, task.loss, lambda model: {"score": task.score(model)})
