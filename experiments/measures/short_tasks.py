"""Four tasks that a processor learns in minutes: copying, ListOps, reviews read byte by byte, and pixels.

Two are a decoder's, which sees what stands before, and two an encoder's, which sees both sides. A batch is a function of the
seed and of the step's number. Copying and ListOps are generated; reviews and images are read from a folder.
"""

import argparse
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import copy_task
import torch
from torch import Tensor, nn

from measures import long_range
from scripts.common.image_bits import bits_per_dim
from tarnn.data.examples import PaddedRows
from tarnn.huggingface.image_config import TarnnImageConfig
from tarnn.models import TarnnConfig, TarnnForCausalLM, TarnnForImageGeneration, TarnnForSequenceClassification
from tarnn.tasks.images import read_images

Keys = dict[str, Any]


class Task(NamedTuple):
    build: Callable[[Keys], nn.Module]  # a model, from keys of its config
    loss: Callable[[nn.Module, int, int], Tensor]  # of the batch of a seed and a step
    score: Callable[[nn.Module], float]  # of what is held out
    unit: str
    guess: float  # the score of who knows how often each answer comes, and nothing else
    margin: float  # two standard errors of such a score: what is no better than `guess` by that has learned nothing
    causal: bool
    length: int  # of the longest sequence
    more_is_better: bool = True


def draw_for(seed: int, step: int) -> torch.Generator:
    return torch.Generator().manual_seed((seed << 32) + step)


def copying(options: argparse.Namespace) -> Task:
    """A separator, up to length/2 − 1 random symbols out of 10, the separator, the same symbols: those are to be known."""
    longest = options.copy_length // 2 - 1
    held_out = copy_task.draw(torch.Generator().manual_seed(1), options.test_rows // 8, longest)
    counted = held_out[1][:, 1:] != -100

    def build(keys: Keys) -> nn.Module:
        return TarnnForCausalLM(TarnnConfig(vocab_size=copy_task.SYMBOLS + 1, **keys))

    def loss(model: nn.Module, seed: int, step: int) -> Tensor:
        draw = draw_for(seed, step)
        symbols = int(torch.randint(1, longest + 1, (), generator=draw))
        ids, labels = copy_task.draw(draw, options.batch_size, symbols)
        return model(input_ids=ids, labels=labels, use_cache=False).loss

    def score(model: nn.Module) -> float:
        guessed = model(input_ids=held_out[0], use_cache=False).logits[:, :-1].argmax(-1)
        return 100 * (guessed == held_out[0][:, 1:])[counted].double().mean().item()

    share = 1 / copy_task.SYMBOLS
    return Task(
        build, loss, score, "symbols right, %", 100 * share, margin(share, int(counted.sum())), True, 2 * longest + 2
    )


def listops(options: argparse.Namespace) -> Task:
    """The value of an expression such as [MAX 4 [MED 1 5 9 ] 2 ]."""
    return classification(long_range.listops(options), options.list_lengths[1], options.batch_size)


def reviews(options: argparse.Namespace) -> Task:
    """Whether a review is a good one, from its first bytes."""
    return classification(long_range.text(options), options.text_length, options.text_batch)


def classification(data: long_range.Rows, length: int, batch_size: int) -> Task:
    train, test = (PaddedRows(x, {"input_ids": data.num_ids - 1}) for x in (data.train, data.test))

    def build(keys: Keys) -> nn.Module:
        config = TarnnConfig(
            vocab_size=data.num_ids, pad_token_id=data.num_ids - 1, num_labels=data.num_classes, **keys
        )
        return TarnnForSequenceClassification(config)

    def loss(model: nn.Module, seed: int, step: int) -> Tensor:
        rows = torch.randint(len(train), (batch_size,), generator=draw_for(seed, step))
        return model(**train.__getitems__(rows.tolist())).loss

    guess = long_range.guess(data)
    return Task(
        build,
        loss,
        lambda model: long_range.accuracy(model, test),
        "right, %",
        guess,
        margin(guess / 100, len(test)),
        False,
        length,
    )


def pixels(options: argparse.Namespace) -> Task:
    """Each pixel of a handwritten digit, from those before it."""
    train, test = (read_images(f"{options.mnist}:{part}") for part in ("train", "test"))
    test = test.take(slice(options.test_rows // 8))
    height, width, channels = train.pixels.shape[1:]
    images, tested = torch.from_numpy(train.pixels), torch.from_numpy(test.pixels).flatten().long()
    shares = (torch.bincount(images[:1000].flatten().long(), minlength=256) + 1).double()
    nats = -(shares / shares.sum()).log()[tested]

    def build(keys: Keys) -> nn.Module:
        keys = {name: value for name, value in keys.items() if name not in ("causal", "position")}
        sizes = {"image_height": height, "image_width": width, "num_channels": channels}
        return TarnnForImageGeneration(TarnnImageConfig(**sizes, **keys))

    def loss(model: nn.Module, seed: int, step: int) -> Tensor:
        rows = torch.randint(len(images), (options.image_batch,), generator=draw_for(seed, step))
        return model(images[rows]).loss

    def score(model: nn.Module) -> float:
        return torch.cat(list(bits_per_dim(model, test))).mean().item()

    error = 2 * nats.std().item() / math.sqrt(len(nats)) / math.log(2)
    guess = nats.mean().item() / math.log(2)
    return Task(
        build, loss, score, "bits per pixel", guess, error, True, height * width * channels, more_is_better=False
    )


def margin(share: float, number: int) -> float:
    """Two standard errors of a share of so many answers, in per cent."""
    return 200 * math.sqrt(share * (1 - share) / number)


TASKS: dict[str, Callable[[argparse.Namespace], Task]] = {
    "copying": copying,
    "listops": listops,
    "reviews": reviews,
    "pixels": pixels,
}
