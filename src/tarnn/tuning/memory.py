"""Say what a run will take before it starts: memory and minutes, by a forward and a backward pass of few tokens.

What is kept for backward grows in proportion to the tokens of a row: matrices of weights of softmax attention are never kept
whole. With checkpointing it is each layer's input, and, one layer at a time, what that layer keeps; products are computed twice.
"""

import ctypes
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import psutil
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from tarnn.decoding.memory import available_bytes
from tarnn.errors import UserError

FEW, TOKENS = 128, 256  # of the pass that reads the weights from their files, and of the one that is looked at
OF_ADAM = 12  # bytes per trained number: its gradient and two sums in float32
# bytes of float32 logits at a time (`linear_cross_entropy`); beside them a copy in 16 bits, and their softmax
BLOCK = 2**26
AT_ONCE = 1.0  # what a layer's backward pass takes beside what the layer keeps, as a part of that (measured)
# glibc's name of the option, and bytes from which on memory is given back when it is free
MMAP_THRESHOLD, LARGE = -3, 2**22


def give_back_memory() -> None:
    """Let glibc give large blocks back to the system once they are free, from now on.

    By default it keeps those of up to 32 MB for itself. Each layer's input, which is kept, then lies between holes that the
    layer's temporaries left: with 24 layers the holes took more than everything else.
    """
    with suppress(OSError, AttributeError):  # another system, or another library
        ctypes.CDLL(None).mallopt(MMAP_THRESHOLD, LARGE)


@dataclass(frozen=True)
class Cost:
    """Hold bytes: of the process so far, which has the weights mapped; of training; of a row's activations; of its loss.

    seconds: per token.
    """

    held: int
    trained: int
    activations: int
    loss: int
    seconds: float

    @property
    def total(self) -> int:
        return self.held + self.trained + self.activations + self.loss

    @property
    def memory(self) -> str:
        """Say how much memory it is, and what for."""
        row = self.activations + self.loss
        parts = {"weights and program": self.held, "training": self.trained, "a row": row}
        named = ", ".join(f"{name} {x / 1e9:.2f}" for name, x in parts.items())
        return f"{self.total / 1e9:.2f} GB ({named})"


def estimate(model: Any, base: Any, longest: int, checkpointing: bool) -> Cost:
    """Estimate what training on rows of up to `longest` tokens takes.

    model: as it will be trained, without gradients so far. base: the model of transformers in it.
    """
    tokens, config = min(TOKENS, longest), model.config.get_text_config()
    kept_by(model, base, min(FEW, longest))  # and does what is done once
    held = psutil.Process().memory_info().rss
    kept, seconds = kept_by(model, base, tokens)
    layers, weights = config.num_hidden_layers, base.get_output_embeddings().weight
    inputs = layers * config.hidden_size * weights.element_size()
    per_token = (inputs + kept / tokens / layers if checkpointing else kept / tokens) + AT_ONCE * kept / tokens / layers
    numbers = sum(x.numel() for x in model.parameters() if x.requires_grad)
    loss = 3 * min(BLOCK, 4 * longest * config.vocab_size)
    # products of a forward pass count 1; backward 1 for the inputs, and 1 for weights that learn
    backward = 2 if all(x.requires_grad for x in base.parameters()) else 1
    seconds = seconds / tokens * ((2 + backward) / (1 + backward) if checkpointing else 1)
    return Cost(held, OF_ADAM * numbers, int(longest * per_token), loss, seconds)


def kept_by(model: Any, base: Any, tokens: int) -> tuple[int, float]:
    """Return the bytes that a forward pass keeps for its backward pass, and the seconds of both. No gradient is left."""
    known = {x.untyped_storage().data_ptr() for x in (*model.parameters(), *base.parameters())}
    sizes: dict[int, int] = {}

    def note(x: Tensor) -> Tensor:
        storage = x.untyped_storage()
        if storage.data_ptr() not in known:
            sizes[storage.data_ptr()] = storage.nbytes()
        return x

    ids, training = torch.zeros(1, tokens, dtype=torch.int64), model.training
    model.train()
    with torch.random.fork_rng(devices=()):
        begun = time.monotonic()
        with saved_tensors_hooks(note, lambda x: x):
            loss = model(input_ids=ids, labels=ids, use_cache=False)["loss"]
        kept = sum(sizes.values())
        loss.backward()
        seconds = time.monotonic() - begun
    for x in model.parameters():
        x.grad = None
    model.train(training)
    return kept, seconds


def refuse_too_much(cost: Cost, checkpointing: bool) -> None:
    """Raise UserError where a run would take more memory than there is."""
    free = available_bytes()
    if free is not None and cost.total - cost.held > free:
        remedy = "a smaller --length, or a smaller model" if checkpointing else "--checkpointing, or a smaller --length"
        raise UserError(f"this run would take {cost.memory}, and {free / 1e9:.2f} GB are left; choose {remedy}.")
