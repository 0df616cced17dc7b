"""Losses of language models in training without all logits: head and cross-entropy together, and logits only if they are read."""

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from transformers.loss.loss_utils import ForCausalLMLoss
from transformers.utils import ModelOutput
from transformers.utils.generic import can_return_tuple

from tarnn.decoding.live import own_method, why_watched
from tarnn.huggingface.fused_forward import output_of
from tarnn.huggingface.versions import by_role, cache_name, cache_of
from tarnn.ops.cross_entropy import linear_cross_entropy


def joins_head(model: Any, logits_to_keep: int | Tensor = 0) -> bool:
    """Whether a model that is given labels needs no logits for them: it trains on a CPU, by transformers' own loss, and its head
    is a plain linear layer that nothing watches."""
    if not model.training or not torch.is_grad_enabled() or torch.compiler.is_compiling():
        return False
    head = model.lm_head
    plain = type(head) is nn.Linear and head.bias is None and type(head.weight) is nn.Parameter and head.weight.is_cpu
    if (
        not plain
        or isinstance(logits_to_keep, Tensor)
        or logits_to_keep != 0
        or model.loss_function is not ForCausalLMLoss
    ):
        return False
    return own_method(head) is None and why_watched(head) is None


def loss_of(model: Any, hidden: Tensor, labels: Tensor, arguments: Mapping[str, Any]) -> Tensor:
    """Compute `ForCausalLMLoss` of hidden states (b, t, hidden), in float32. arguments: those of the model's forward."""
    ignored, shifted = arguments.get("ignore_index", -100), arguments.get("shift_labels")
    if shifted is None:
        shifted = pad(labels, (0, 1), value=ignored)[..., 1:]
    options = {"num_items": arguments.get("num_items_in_batch"), "ignore_index": ignored}
    return linear_cross_entropy(hidden, model.lm_head.weight, shifted, **options)


class Unread(NamedTuple):
    """Logits that nobody has read yet."""

    head: nn.Module
    hidden: Tensor

    def read(self) -> Tensor:
        return self.head(self.hidden)


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


def head_with_loss(forward: Callable[..., Any]) -> Callable[..., Any]:
    """`forward` of transformers' language models, by which a training model computes its loss without all logits."""
    names = [name for name in inspect.signature(forward).parameters if name != "self"]
    made, of_cache = reads_late(output_of(forward)), cache_name(forward)

    @can_return_tuple
    @functools.wraps(forward)
    def trains(self: Any, *args: Any, **kwargs: Any) -> Any:
        given = by_role({**dict(zip(names, args)), **kwargs})
        labels, keep = given.pop("labels", None), given.pop("logits_to_keep", 0)
        routers = given.get("output_router_logits") or getattr(self.config, "output_router_logits", False)
        if labels is None or routers or not joins_head(self, keep):
            return forward(self, *args, **kwargs)
        if "cache" in given:
            given[of_cache] = given.pop("cache")
        outputs = self.model(**given)
        return made(
            loss=loss_of(self, outputs.last_hidden_state, labels, given),
            logits=Unread(self.lm_head, outputs.last_hidden_state),
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
            **{of_cache: cache_of(outputs)},
        )

    return trains
