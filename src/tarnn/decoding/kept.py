"""Packed weights that are kept beside a live model, for as long as it has the numbers that were packed.

`generate` packs a model once. Before each text the model is compared with what was packed: its config, its modules, and of each
tensor who it is, where it lies, how many writes torch has counted, and a sample of its numbers, since writes through `.data`, by
fused optimizers and by numpy are not counted. What was packed is freed with the model, before other weights are packed, and when
the model computes in training mode.
"""

from collections.abc import Iterator
from itertools import chain
from threading import RLock
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from tarnn.decoding.from_program import default_format
from tarnn.decoding.fused import checked_program
from tarnn.decoding.live import check_known, fields_of, fresh_model, modules_of
from tarnn.decoding.refusal import Refusal
from tarnn.program.outline import without_weights
from tarnn.program.recording import ProgramError
from tarnn.program.runtime import Runtime

# by the bytes of a number: the integers that have as many, and how many numbers of a long row lie between two of a sample
SAMPLED = {1: (torch.int8, 1021), 2: (torch.int16, 509), 4: (torch.int32, 251), 8: (torch.int64, 127)}


class Trace(NamedTuple):
    """Tell whether a tensor still has its numbers. about: its name, who and where it is, and writes that torch counted."""

    about: tuple[object, ...]
    sample: Tensor


class Kept(NamedTuple):
    """Hold what was packed. weights: the format that was asked for. fresh: a fresh model of the config that it had then."""

    weights: str | None
    fresh: nn.Module
    attention: object
    traces: list[Trace]
    runtime: Runtime

    def fits(self, model: nn.Module, weights: str | None) -> bool:
        """Whether a model still has what was packed. Raises Refusal for one that has no fused step any more."""
        if weights not in (self.weights, self.runtime.weights):
            return False
        if check_known(model, fields_of(model)) is not self.fresh or attention_of(model) != self.attention:
            return False
        tensors = list(tensors_of(model))
        if [(name, id(x)) for name, x in tensors] != [x.about[:2] for x in self.traces]:
            return False  # what came in their place may have no numbers to look at
        if [about(*x) for x in tensors] != [x.about for x in self.traces]:
            return False
        pairs = zip(tensors, self.traces, strict=True)
        return all(torch.equal(sample_of(x), trace.sample) for (_, x), trace in pairs)


_kept: WeakKeyDictionary[nn.Module, Kept] = WeakKeyDictionary()
_lock = RLock()


def kept_runtime(model: nn.Module, weights: str | None = None) -> Runtime:
    """Return a runtime of a model's weights as they are now: the one that is kept, or one that is packed now.

    weights: as `FusedStep` takes them. It shares the table of embeddings with the model. Raises Refusal, with the reason, where
    there is none.
    """
    with _lock:
        kept = _kept.pop(model, None)
        if kept is None or not kept.fits(model, weights):
            kept = None  # freed before there are two
            try:
                kept = packed_now(model, weights)
            except ProgramError as error:
                raise Refusal(str(error)) from error
        _kept[model] = kept
        return kept.runtime


@torch.no_grad()
def packed_now(model: nn.Module, weights: str | None) -> Kept:
    fields = fields_of(model)
    program = checked_program(model)
    fresh = fresh_model(model, fields)  # which it was compared with; another one where the config was written meanwhile
    # before they are packed: what another thread writes meanwhile is a write
    traces = [Trace(about(name, x), sample_of(x).clone()) for name, x in tensors_of(model)]
    runtime = Runtime(program, weights or default_format(program.instructions[0].weights["tokens"].dtype))
    runtime.program = without_weights(program)
    return Kept(weights, fresh, attention_of(model), traces, runtime)


def is_kept(model: nn.Module) -> bool:
    """Whether packed weights are kept of a model."""
    return model in _kept


def forget(model: nn.Module) -> None:
    """Free the packed weights that are kept of a model, but for those that somebody uses."""
    if model in _kept:
        with _lock:
            _kept.pop(model, None)


def attention_of(model: Any) -> object:
    """Return which implementation of attention runs, which the config does not tell."""
    return getattr(getattr(model, "config", None), "_attn_implementation", None)


def tensors_of(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Return parameters and buffers with their places, tied ones with each of theirs."""
    for place, module in modules_of(model).items():
        for name, x in chain(module._parameters.items(), module._buffers.items()):
            if x is not None:
                yield f"{place}.{name}", x


def about(name: str, x: Tensor) -> tuple[object, ...]:
    version = 0 if x.is_inference() else x._version
    return name, id(x), x.data_ptr(), version, x.dtype, tuple(x.shape), x.stride()


def sample_of(x: Tensor) -> Tensor:
    """Return some numbers of a tensor as integers: one of each row of a matrix at least, and of a long one, one a kilobyte."""
    integers, most = SAMPLED[x.element_size()]
    step = max(1, min(most, x.shape[-1] - 1)) if x.ndim > 1 else 1
    x = x.detach().view(integers)
    return x.as_strided((-(-x.numel() // step),), (step,)) if x.is_contiguous() else x.reshape(-1)[::step]
