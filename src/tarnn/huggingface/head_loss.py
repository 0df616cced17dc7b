"""Losses of language models in training without all logits: head and cross-entropy together, and logits only if they are read."""

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import fields
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from transformers.loss.loss_utils import ForCausalLMLoss, ForMaskedLMLoss
from transformers.modeling_utils import slice_logits_to_keep
from transformers.utils import ModelOutput
from transformers.utils.generic import can_return_tuple

from tarnn.decoding.live import own_method, why_watched
from tarnn.huggingface.fused_forward import output_of
from tarnn.huggingface.versions import by_role, cache_name, role
from tarnn.ops.cross_entropy import linear_cross_entropy

JOINS = "joins_head_and_loss"  # what marks a forward that does
_ALONE: ContextVar[bool] = ContextVar("alone", default=False)


@contextmanager
def losses_alone() -> Iterator[None]:
    """Within: a model that does not train makes its loss without all logits, too."""
    token = _ALONE.set(True)
    try:
        yield
    finally:
        _ALONE.reset(token)


def joins_head(model: Any, logits_to_keep: int | Tensor = 0) -> bool:
    """Whether a model that is given labels needs no logits for them: it trains on a CPU, by a loss of transformers that `loss_of`
    computes, and its head is a plain linear layer that nothing watches."""
    if torch.compiler.is_compiling() or not ((model.training and torch.is_grad_enabled()) or _ALONE.get()):
        return False
    head = model.lm_head
    plain = type(head) is nn.Linear and head.bias is None and type(head.weight) is nn.Parameter and head.weight.is_cpu
    if not plain or isinstance(logits_to_keep, Tensor) or logits_to_keep != 0:
        return False
    if model.loss_function not in (ForCausalLMLoss, ForMaskedLMLoss):
        return False
    return own_method(head) is None and why_watched(head) is None


def loss_of(model: Any, hidden: Tensor, labels: Tensor, arguments: Mapping[str, Any]) -> Tensor:
    """Compute the loss function of a model from hidden states (b, t, hidden), in float32. arguments: those of its forward."""
    ignored, shifted = arguments.get("ignore_index", -100), arguments.get("shift_labels")
    if model.loss_function is ForMaskedLMLoss:
        shifted = labels
    elif shifted is None:
        shifted = pad(labels, (0, 1), value=ignored)[..., 1:]
    options = {"num_items": arguments.get("num_items_in_batch"), "ignore_index": ignored}
    return linear_cross_entropy(hidden, model.lm_head.weight, shifted, **options)


class Unread(NamedTuple):
    """Logits that nobody has read yet."""

    head: nn.Module
    hidden: Tensor
    in_float32: bool = False

    def read(self) -> Tensor:
        logits = self.head(self.hidden)
        return logits.float() if self.in_float32 else logits


def loss_and_logits(
    model: Any, hidden: Tensor, labels: Tensor | None, arguments: Mapping[str, Any], logits_to_keep: int | Tensor = 0
) -> tuple[Tensor | None, Any]:
    """Compute one of our models' loss, None without labels, and its logits, `Unread` where the loss needs none."""
    if labels is not None and joins_head(model, logits_to_keep):
        return loss_of(model, hidden, labels, arguments), Unread(model.lm_head, hidden)
    logits = model.lm_head(slice_logits_to_keep(hidden, logits_to_keep))
    if labels is None:
        return None, logits
    return model.loss_function(logits, labels, vocab_size=model.config.vocab_size, **arguments), logits


@functools.cache
def reads_late(kind: type[ModelOutput]) -> Any:
    """The class of outputs whose logits may be given as `Unread`: computed when `.logits` or `["logits"]` is first read."""

    def read(self: Any) -> Tensor | None:
        logits = self.__dict__["logits"]
        if isinstance(logits, Unread):
            self.logits = logits = logits.read()
        return logits

    def keep(self: Any, logits: Any) -> None:
        self.__dict__["logits"] = logits

    def item(self: Any, key: Any) -> Any:
        if isinstance(key, int):
            key = list(self.keys())[key]
        return self.logits if key == "logits" else kind.__getitem__(self, key)

    def reduce(self: Any) -> Any:  # pickled as what transformers returns
        return kind(**{key: self[key] for key in self.keys()}).__reduce__()

    own = {"logits": property(read, keep), "__getitem__": item, "__reduce__": reduce, "__module__": __name__}
    return type(kind.__name__, (kind,), own)


class Head(NamedTuple):
    """Say how a language model of transformers makes its logits, where it is not by `self.lm_head(self.model(…)[0])`.

    hands_on: whether its body gets arguments that its forward does not name. in_float32: logits are. factor: of the logits.
    """

    body: str = "model"
    hands_on: bool = True
    in_float32: bool = False
    factor: Callable[[Any], float] | None = None


def head_with_loss(forward: Callable[..., Any], **how: Any) -> Callable[..., Any]:
    """`forward` of transformers' language models, by which a training model computes its loss without all logits.

    how: what a `Head` says.
    """
    head = Head(**how)
    names = [name for name in inspect.signature(forward).parameters if name != "self"]
    kind, own = output_of(forward), {role(name) for name in names}
    made = reads_late(kind)

    @can_return_tuple
    @functools.wraps(forward)
    def trains(self: Any, *args: Any, **kwargs: Any) -> Any:
        given = by_role({**dict(zip(names, args)), **kwargs})
        labels, keep = given.pop("labels", None), given.pop("logits_to_keep", 0)
        if labels is None or _adds_to_the_loss(self, given) or not joins_head(self, keep):
            return forward(self, *args, **kwargs)
        inputs = {name: x for name, x in given.items() if head.hands_on or name in own}
        if "cache" in inputs:
            inputs[cache_name(forward)] = inputs.pop("cache")
        if "return_dict" in own:
            inputs["return_dict"] = True
        outputs = getattr(self, head.body)(**inputs)
        hidden = outputs.last_hidden_state.to(self.lm_head.weight.dtype)
        if head.factor is not None:  # instead of its logits: the same sums
            hidden = hidden * head.factor(self)
        others = {x.name: getattr(outputs, x.name, None) for x in fields(cast(Any, kind))}
        logits = Unread(self.lm_head, hidden, head.in_float32)
        return made(**{**others, "loss": loss_of(self, hidden, labels, given), "logits": logits})

    trains.__dict__[JOINS] = True  # which functions that wrap this one take over
    return trains


def _adds_to_the_loss(model: Any, given: Mapping[str, Any]) -> bool:
    """Whether a model's loss has other terms: of its routers, or of the size of its logits."""
    routers = given.get("output_router_logits") or getattr(
        model.config.get_text_config(), "output_router_logits", False
    )
    return bool(routers) or getattr(model, "z_loss_coefficient", 0) > 0
