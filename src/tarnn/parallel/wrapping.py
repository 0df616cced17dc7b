"""The context in which ops take stretches of sequences, from outside: ops, layers and models know nothing of it.

While it is entered, functions in the places of `_places` stand in for those that compute ops and count positions, and modules
that would need to know more of a sequence than their own stretch are refused by name.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import wraps
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook

from tarnn.attention import linear as linear_layer, rotary
from tarnn.models.backbone import Backbone
from tarnn.models.rwkv import RwkvModel
from tarnn.ops import hybrid_attention, linear_attention, softmax_attention
from tarnn.ops.registration import Op
from tarnn.parallel import linear, recurrences, softmax, window
from tarnn.parallel.agreement import agree, looks, telling
from tarnn.parallel.collectives import gather_plain
from tarnn.parallel.group import Ranks, active, among, refuse

_OUTSIDE = "Call it outside of tarnn.parallel.sequence."


@contextmanager
def sequence(group: Any = None) -> Iterator[Ranks]:
    """Within this context, ops take and return this rank's stretch of every sequence.

        with tarnn.parallel.sequence(group):
            loss = loss_of(layers(stretch))      # stretch (b, t of this rank, …)
            loss.backward()

    Stretches follow one another in the order of ranks, and may differ in length. All ranks make the same calls with the same
    weights, forward and backward. Tensors with a time axis are stretches: q, k, v, key_mask, log_decay, key_log_weight, and
    outputs. All else is of the whole sequence, the same on every rank: `cu_seqlens` bounds whole packed sequences, `state` is
    what came before the first rank's stretch, and a returned state is that after the last rank's. A gradient is that of the
    sum of the ranks' losses, with regard to what this rank was given: those of weights have to be summed over ranks, as
    DistributedDataParallel does. Layers of `tarnn.attention` work as they are.

    Compiled functions run as if they were not: graphs don't hold what ranks exchange.

    group: a process group of torch.distributed, or one dimension of a device mesh (FSDP2's, accelerate's); None: all processes.
    Raises NotImplementedError for what has no form over ranks, such as whole models and steps: see docs/parallel.md.
    """
    ranks = Ranks(group)
    if ranks.size == 1:
        with among(None):
            yield ranks
        return
    with torch.compiler.set_stance("force_eager"), _wrapped(), among(ranks), telling(ranks):
        yield ranks


_installed = False


@contextmanager
def _wrapped() -> Iterator[None]:
    """Put the functions of `_places` in their places, unless an outer context has."""
    global _installed
    if _installed:
        yield
        return
    with ExitStack() as stack:
        for owner, name, function in _places():
            whole = getattr(owner, name)
            stack.callback(setattr, owner, name, whole)
            setattr(owner, name, _around(function, whole))
        stack.callback(register_module_forward_pre_hook(_refuse_module).remove)
        _installed = True
        try:
            yield
        finally:
            _installed = False


def _around(over_ranks: Callable, whole: Callable) -> Callable:
    """Call one function where ranks share sequences, else the other, which it replaces."""

    @wraps(whole)
    def function(*args: Any, **options: Any) -> Any:
        ranks = active()
        return whole(*args, **options) if ranks is None else over_ranks(ranks, whole, *args, **options)

    return function


def _places() -> list[tuple[Any, str, Callable]]:
    """Owner and name of what is replaced, and by what: function(ranks, what it replaces, *its arguments)."""
    to_linear, to_softmax, to_hybrid = (
        sys.modules[function.__module__] for function in (linear_attention, softmax_attention, hybrid_attention)
    )
    return [
        (Op, "__call__", recurrences.compute_op),
        (Op, "step", _refuse_step),
        (to_linear, "compute_attention", linear.compute_attention),
        (to_linear, "attend_both_sides", _refuse_decay_back),
        (to_softmax, "compute_attention", softmax.compute_attention),
        (to_hybrid, "compute_attention", window.compute_attention),
        (to_hybrid, "hybrid_attention", _refuse_step),  # as `hybrid_step` finds it; others have the function itself
        (rotary, "positions_in", _positions),
        (linear_layer, "positions_in", _positions),
        (Backbone, "embed", _refuse_model),
        (RwkvModel, "_read", _refuse_model),
    ]


def _positions(
    ranks: Ranks,
    whole: Callable,
    attention_mask: Tensor | None,
    cu_seqlens: Tensor | None,
    past: int,
    num_tokens: int,
    device: Any,
) -> Tensor:
    """Count the positions of this rank's tokens from the first rank on."""
    facts = {"the op": "positions", "past": past, "attention_mask": looks(attention_mask, 1)}
    offset = agree(ranks, num_tokens, facts).offset
    if attention_mask is None:
        return whole(None, cu_seqlens, past + offset, num_tokens, device)
    real = attention_mask.long()
    before = gather_plain(ranks, real.sum(-1, keepdim=True))[: ranks.rank].sum(0)
    return (real.cumsum(-1) - 1 + before).clamp(min=0)[:, -num_tokens:]


# --- what is refused


def _refuse_step(*_: Any, **__: Any) -> NoReturn:
    refuse("a step of one token", "It is one that all ranks have: take steps outside of tarnn.parallel.sequence.")


def _refuse_decay_back(*_: Any, **__: Any) -> NoReturn:
    refuse("linear attention with log_decay_back", "Leave the decays out, or call it with whole sequences.")


_MODELS = (
    "It counts positions and shifts labels by itself. Build it of layers of tarnn.attention, and shift labels before you cut "
    "them; or call it outside of tarnn.parallel.sequence, with whole sequences."
)
_MODULES = {  # by class, a module's own or a base
    "transformers.modeling_utils.PreTrainedModel": _MODELS,
    "tarnn.models.rwkv.RwkvModel": _MODELS,
    "tarnn.models.frames.Frames": _OUTSIDE,
    "tarnn.attention.rwkv7.Rwkv7TimeMixing": _OUTSIDE,
    "tarnn.attention.rwkv7_layer.Rwkv7Attention": _OUTSIDE,
}


def _refuse_model(ranks: Ranks, whole: Callable, model: nn.Module, *_: Any, **__: Any) -> NoReturn:
    refuse(type(model).__name__, _MODELS)


def _refuse_module(module: nn.Module, inputs: Any) -> None:
    """Raise NotImplementedError for modules that read tokens of other ranks by themselves."""
    if active() is None:
        return
    name = type(module).__name__
    for kind in type(module).__mro__:
        if (remedy := _MODULES.get(f"{kind.__module__}.{kind.__qualname__}")) is not None:
            refuse(name, remedy)
    if getattr(module, "fits_by_call", False):
        refuse(
            f"a map that is fitted by the call, here of {name},",
            'Make it with fit="calibrated", and calibrate it before.',
        )
    if getattr(module, "calibration", None) is not None:
        refuse("calibration", "Calibrate on one process, outside of tarnn.parallel.sequence; then share the weights.")
