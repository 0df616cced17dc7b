"""Whether a model is still what its config builds: what computes a model in another way would leave anything else out."""

import copy
from collections.abc import Iterator
from functools import lru_cache
from typing import Any

from torch import nn
from torch.nn.modules import module as torch_module

from tarnn.models.recurrent import Recurrent
from tarnn.models.unfilled import unfilled

PLAIN = (bool, int, float, str, tuple, type(None))
OWN = "feature_map"  # of a layer: may be another than the config's, and whoever computes features asks it
# where hooks come from that only note what is put out, for those who ask for it
RECORDS = "transformers.utils.output_capturing"


def change(model: Recurrent, built_as: type[Recurrent]) -> str | None:
    """What of a model differs from a new `built_as(model.config)`, in words, or None.

    Looked at: the modules and their kinds, the shapes of their weights, the numbers and words that they hold, methods and
    hooks put upon them. Not at what feature maps hold, at the values of weights, and at what a method of the model itself does.
    """
    if torch_module._global_forward_hooks or torch_module._global_forward_pre_hooks:
        return "a hook on all modules"
    try:
        new = dict(_new(built_as, _Key(model.config)).named_modules())  # type: ignore[arg-type]
    except Exception as error:  # whatever building raises, of a config that was changed
        return f"what its config says now, of which nothing can be built ({error})"
    found = dict(model.named_modules())
    for name, module in found.items():
        if reason := _put_upon(name, module):
            return reason
    if others := sorted({x for x in found.keys() ^ new.keys() if not _is_own(x)}):
        return f"{others[0]}, which is there or is missing"
    for kind in dict.fromkeys(type(x) for name, x in found.items() if name):
        if reason := _patched(kind):
            return reason
    for name, module in found.items():
        if not _is_own(name) and (reason := _differs(name, module, new[name])):
            return reason
    return None


def _put_upon(name: str, module: nn.Module) -> str | None:
    """Hooks, and methods of this one instance."""
    place = name or "the model"
    hooks = (*module._forward_hooks.values(), *module._forward_pre_hooks.values())
    if any(getattr(x, "__module__", "") != RECORDS for x in hooks):
        return f"a hook on {place}"
    if name:  # whoever calls a model's own methods, patched or not, gets here through them
        for key, value in vars(module).items():
            if callable(value) and not isinstance(value, nn.Module) and hasattr(type(module), key):
                return f"{place}.{key}, a method of its own"
    return None


def _patched(kind: type) -> str | None:
    """Methods that were put upon a class after it was made: they have another name, or come from elsewhere."""
    for one in kind.__mro__[: kind.__mro__.index(nn.Module)]:
        if one.__module__.partition(".")[0] not in ("tarnn", "torch"):
            continue
        for name, method in vars(one).items():
            if callable(method) and not isinstance(method, type) and not name.startswith("__"):
                home = getattr(method, "__module__", None), getattr(method, "__qualname__", None)
                if home != (one.__module__, f"{one.__qualname__}.{name}"):
                    return f"{one.__name__}.{name}, which was replaced"
    return None


def _differs(name: str, module: nn.Module, new: nn.Module) -> str | None:
    if name and not _same_kind(type(module), type(new)):
        return f"{name}, {type(module).__name__} in the place of {type(new).__name__}"
    place = name + "." if name else ""
    if shapes := dict(_shapes(module)).items() ^ dict(_shapes(new)).items():
        return f"the shape of {place}{min(x for x, _ in shapes)}"
    for key, value in vars(new).items():
        if (
            key != "training" and isinstance(value, PLAIN) and vars(module).get(key, copy) != value
        ):  # copy: equal to nothing
            return f"{place}{key}"
    return None


def _same_kind(kind: type, new: type) -> bool:
    """The same, or what this package derives from it for transformers."""
    return kind is new or (issubclass(kind, new) and kind.__module__.startswith("tarnn.models."))


def _shapes(module: nn.Module) -> Iterator[tuple[str, tuple[int, ...] | None]]:
    for name, x in (module._parameters | module._buffers).items():
        yield name, None if x is None else tuple(x.shape)


def _is_own(name: str) -> bool:
    return OWN in name.split(".")


class _Key:
    """A config, to be looked up by what it says."""

    def __init__(self, config: Any):
        self.config, self.text = config, repr(sorted(config.to_dict().items(), key=lambda x: x[0]))

    def __hash__(self) -> int:
        return hash(self.text)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Key) and other.text == self.text


@lru_cache(maxsize=8)
def _new(kind: type[Recurrent], key: _Key) -> Recurrent:
    """Without numbers, so that keeping it costs little."""
    return unfilled(kind, copy.deepcopy(key.config)).eval()
