"""Sequences packed into rows: found once, at the model, and handed to its layers as `cu_seq_lens_q`.

transformers' flattening collator says by `position_ids` that start anew where a sequence begins, and where it is asked
also by `cu_seq_lens_q` or `seq_idx`. Only the second reaches a linear layer, and some models hand on none of them.
"""

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor
from transformers.masking_utils import create_causal_mask

from tarnn.huggingface.documents import find_documents
from tarnn.huggingface.patching.gaps import find_gaps, telling
from tarnn.huggingface.versions import cache_in

_BOUNDS: ContextVar[Tensor | None] = ContextVar("bounds", default=None)
# whether a caller's bounds last to the end of backward
_OF_A_STEP: ContextVar[bool] = ContextVar("of_a_step", default=False)

LEAKS = {  # text models that mix packed sequences in parts which tarnn doesn't compute
    "Glm5NextTextModel": "selects the keys of its attention",
    "InklingTextModel": "adds a bias by places in the row to its attention",
    "Inkling2TextModel": "adds a bias by places in the row to its attention",
    "Qwen4ExpTextModel": "embeds n-grams of tokens",
}


def bounds_of(arguments: Mapping[str, Any]) -> Tensor | None:
    """The bounds (n + 1,) of the sequences in the rows of this call, all rows end to end; None for whole rows."""
    for name in ("cu_seqlens", "cu_seq_lens_q"):
        if arguments.get(name) is not None:
            return arguments[name]
    return None if torch.compiler.is_compiling() else _BOUNDS.get()


@contextmanager
def packed_step(bounds: Tensor | None) -> Iterator[None]:
    """Let forward and backward within know the bounds, so that layers may be computed again."""
    token = _OF_A_STEP.set(True)
    try:
        with packed_rows(bounds):
            yield
    finally:
        _OF_A_STEP.reset(token)


@contextmanager
def packed_rows(bounds: Tensor | None) -> Iterator[None]:
    """Let functions called within know the bounds, where their layer does not hand on what it is given."""
    token = _BOUNDS.set(bounds)
    try:
        yield
    finally:
        _BOUNDS.reset(token)


def end_to_end(x: Tensor) -> Tensor:
    """All rows of a batch (b, t, …) as one, (1, b·t, …)."""
    return x if len(x) == 1 else x.flatten(0, 1)[None]


def model_with_packed_rows(original: Callable) -> Callable:
    """The forward of a text model: it finds packed rows in its arguments, and refuses padding that no layer can skip."""
    has_positions = "position_ids" in inspect.signature(original).parameters

    def run(self: Any, call: dict[str, Any], bounds: Tensor) -> Any:
        _refuse_leaks(self)
        call["cu_seq_lens_q"] = bounds
        if has_positions and call.get("position_ids") is None:
            call["position_ids"] = _positions(bounds, *_shape(call))
        return original(self, **call)

    return _finding(original, run)


def model_with_packed_masks(original: Callable) -> Callable:
    """Wrap a model whose softmax layers know nothing of positions: give them a mask of packed rows."""

    def run(self: Any, call: dict[str, Any], bounds: Tensor) -> Any:
        positions = _positions(bounds, *_shape(call))
        x = call.get("inputs_embeds")
        x = self.get_input_embeddings()(call["input_ids"]) if x is None else x
        mask = create_causal_mask(self.config, x, None, None, positions)
        call["attention_mask"] = {"full_attention": mask, "linear_attention": None}
        return original(self, **{"position_ids": positions, **call, "cu_seq_lens_q": bounds})

    return _finding(original, run)


def head_with_packed_rows(original: Callable) -> Callable:
    """The forward of a language model that keeps what it is told of packed rows from its text model."""

    def run(self: Any, call: dict[str, Any], bounds: Tensor) -> Any:
        with packed_rows(bounds):
            return original(self, **call)

    return _finding(original, run)


def silent_model_with_packed_rows(original: Callable) -> Callable:
    """The forward of a text model that hands on nothing of it to its layers."""

    def run(self: Any, call: dict[str, Any], bounds: Tensor) -> Any:
        if self.training and self.is_gradient_checkpointing and not _OF_A_STEP.get():
            raise ValueError(
                f"{type(self).__name__} does not tell its layers where packed sequences begin, and gradient checkpointing "
                "calls them again later. Turn gradient checkpointing off, pass the sequences as rows with padding, or call "
                "forward and backward within `packed_step`."
            )
        with packed_rows(bounds):
            return original(self, **call)

    return _finding(original, run)


def _finding(original: Callable, run: Callable[[Any, dict[str, Any], Tensor], Any]) -> Callable:
    names = tuple(inspect.signature(original).parameters)[1:]

    @functools.wraps(original)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        call = dict(zip(names, args, strict=False)) | kwargs
        # while a graph is traced, packed rows must be told by cu_seq_lens_q: positions can't be read
        if torch.compiler.is_compiling() or (x := _tokens(call)) is None or x.device.type != "cpu":
            return original(self, *args, **kwargs)
        if (real := find_gaps(call.get("attention_mask"), cache_in(call), _shape(call))) is not None:
            with telling(real):
                return original(self, *args, **kwargs)
        bounds = _find(call)
        if bounds is None:
            return original(self, *args, **kwargs)
        return run(self, {**call, "use_cache": False}, bounds)

    return forward


def layer_with_packed_rows(original: Callable) -> Callable:
    """The forward of a layer that is told of packed rows, and does not tell all its functions."""

    @functools.wraps(original)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        bounds = kwargs.get("cu_seq_lens_q")
        if bounds is None:
            return original(self, *args, **kwargs)
        with packed_rows(bounds):
            return original(self, *args, **kwargs)

    return forward


def _refuse_leaks(model: Any) -> None:
    """Raise ValueError for models of which other parts mix packed sequences."""
    for name, what in LEAKS.items():
        if type(model).__name__ == name:
            raise ValueError(
                f"{name} {what}, across packed sequences too. Pass the sequences as rows with padding instead."
            )


def _find(call: Mapping[str, Any]) -> Tensor | None:
    positions, mask, shape = call.get("position_ids"), call.get("attention_mask"), _shape(call)
    if shape[1] <= 1:
        return None
    if isinstance(mask, Tensor) and mask.ndim == 2 and mask.all():
        mask = None
    if isinstance(positions, Tensor) and positions.ndim == 3:  # of text, height and width
        positions = positions[0]
    held = cache_in(call)
    if held is not None:  # who passes a cache continues whole rows
        positions = None
    return find_documents(
        shape,
        call,
        cu_seqlens=_BOUNDS.get(),
        position_ids=positions,
        attention_mask=mask,
        cache=held,
        use_cache=call.get("use_cache"),
    ).bounds


def _tokens(call: Mapping[str, Any]) -> Tensor | None:
    x = call.get("input_ids")
    return call.get("inputs_embeds") if x is None else x


def _shape(call: Mapping[str, Any]) -> tuple[int, int]:
    x = _tokens(call)
    assert x is not None
    return x.shape[0], x.shape[1]


def _positions(bounds: Tensor, b: int, t: int) -> Tensor:
    """Positions (b, t) that start anew at each bound."""
    index = torch.arange(b * t, device=bounds.device)
    starts = bounds[torch.searchsorted(bounds.contiguous(), index, right=True, out_int32=True) - 1]
    return (index - starts).view(b, t)
