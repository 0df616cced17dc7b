"""Whether a model is still what its config builds: what computes a model in another way would leave anything else out."""

import copy
from collections.abc import Iterator
from functools import lru_cache
from typing import Any

from torch import nn
from torch.nn.modules import module as torch_module

from tarnn.models.backbone import Recurrent
from tarnn.models.meta_device import build_on_meta

PLAIN = (bool, int, float, str, tuple, type(None))
OWN = "feature_map"  # of a layer: what it holds is its own, and whoever computes features asks it
UNREAD = {  # by what computes without gradients
    "training",
    "p",
    "inplace",
    "adds_to_residual",
    "padding_idx",
    "scale_grad_by_freq",
    "sparse",
}
# hooks that change no number: they note what is put out for those who ask, or ask for gradients of the embeddings
HARMLESS = (("transformers.utils.output_capturing", ""), ("transformers.modeling_utils", "make_inputs_require_grads"))
# packages that wrap methods of these classes
DECORATORS = ("tarnn", "torch", "transformers", "jaxtyping", "beartype")
CALL = nn.Module.__call__


def change(model: Recurrent, built_as: type[Recurrent]) -> str | None:
    """What of a model differs from a new `built_as(model.config)`, in words, or None.

    Looked at: the modules and their kinds, the shapes of their weights, the numbers and words that they hold, methods and
    hooks put upon them. Not at what feature maps hold, at the values of weights, and at what a method of the model itself does.
    """
    if torch_module._global_forward_hooks or torch_module._global_forward_pre_hooks:
        return "a hook on all modules"
    if nn.Module.__call__ is not CALL:
        return "Module.__call__, which was replaced"
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
    parts = (x for name, module in found.items() if name for x in (module, *_values(module)))
    for kind in dict.fromkeys(map(type, parts)):
        if reason := _patched(kind):
            return reason
    for name, module in found.items():
        differs = _other_shapes if _is_own(name) else _differs
        if name in new and (reason := differs(name, module, new[name])):
            return reason
    return None


def _put_upon(name: str, module: nn.Module) -> str | None:
    """Hooks, and methods of this one instance."""
    place = name or "the model"
    hooks = (*module._forward_hooks.values(), *module._forward_pre_hooks.values())
    if not all(map(_is_harmless, hooks)):
        return f"a hook on {place}"
    if name:  # whoever calls a model's own methods, patched or not, gets here through them
        for key, value in vars(module).items():
            if callable(value) and not isinstance(value, nn.Module) and hasattr(type(module), key):
                return f"{place}.{key}, a method of its own"
    return None


def _is_harmless(hook: Any) -> bool:
    home, name = getattr(hook, "__module__", ""), getattr(hook, "__qualname__", "")
    return any(home == module and part in name for module, part in HARMLESS)


def _patched(kind: type) -> str | None:
    """Methods that were put upon a class after it was made: they have another name, or come from elsewhere."""
    for one in kind.__mro__:
        if one.__module__.partition(".")[0] not in ("tarnn", "torch") or one is nn.Module:
            continue
        for name, method in vars(one).items():
            if not callable(method) or isinstance(method, type) or (name[:2] == "__" and name != "__call__"):
                continue
            if not _is_at_home(method, one, name):
                return f"{one.__name__}.{name}, which was replaced"
    return None


def _is_at_home(method: Any, kind: type, name: str) -> bool:
    method = getattr(method, "__func__", method)  # of a static method
    home = getattr(method, "__module__", None), getattr(method, "__qualname__", None)
    if home != (kind.__module__, f"{kind.__qualname__}.{name}"):
        return False
    if not hasattr(method, "__wrapped__"):
        return True
    globals_of = getattr(method, "__globals__", {})  # functools.wraps copies the names, but not these
    return str(globals_of.get("__name__", "")).partition(".")[0] in DECORATORS


def _values(module: nn.Module) -> list[Any]:
    """The objects of this package that a module holds and that are no modules, such as its `Rotary`."""
    kinds = (x for x in vars(module).values() if not isinstance(x, nn.Module))
    return [x for x in kinds if type(x).__module__.startswith("tarnn.attention.") and hasattr(x, "__dict__")]


def _differs(name: str, module: nn.Module, new: nn.Module) -> str | None:
    if name and not _same_kind(type(module), type(new)):
        return f"{name}, {type(module).__name__} in the place of {type(new).__name__}"
    place = name + "." if name else ""
    if shapes := dict(_shapes(module)).items() ^ dict(_shapes(new)).items():
        return f"the shape of {place}{min(x for x, _ in shapes)}"
    values = _values(new)
    for key, value in vars(new).items():
        found = vars(module).get(key, copy)  # copy: equal to nothing
        if isinstance(value, PLAIN):
            same = key in UNREAD or (isinstance(found, PLAIN) and found == value)
        elif any(value is x for x in values):
            same = type(found) is type(value) and vars(found) == vars(value)
        else:
            continue
        if not same:
            return f"{place}{key}"
    return None


def _other_shapes(name: str, module: nn.Module, new: nn.Module) -> str | None:
    """Of a feature map: its kind; what it may hold or not, such as what was calibrated, has its shape if it is there."""
    if type(module) is not type(new):
        return f"{name}, {type(module).__name__} in the place of {type(new).__name__}"
    found, expected = dict(_shapes(module)), dict(_shapes(new))
    for key in found.keys() & expected.keys():
        if None not in (found[key], expected[key]) and found[key] != expected[key]:
            return f"the shape of {name}.{key}"
    return None


def _same_kind(kind: type, new: type) -> bool:
    """The same, or what this package derives from it for transformers."""
    return kind is new or (
        issubclass(kind, new) and kind.__module__.startswith(("tarnn.models.", "tarnn.huggingface."))
    )


def _shapes(module: nn.Module) -> Iterator[tuple[str, tuple[int, ...] | None]]:
    for name, x in (module._parameters | module._buffers).items():
        yield name, None if x is None else tuple(x.shape)


def _is_own(name: str) -> bool:
    return OWN in name.split(".")


class _Key:
    """A config, to be looked up by what it says."""

    def __init__(self, config: Any):
        self.config, self.text = config, repr(sorted(vars(config).items(), key=lambda x: x[0]))

    def __hash__(self) -> int:
        return hash(self.text)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Key) and other.text == self.text


@lru_cache(maxsize=8)
def _new(kind: type[Recurrent], key: _Key) -> Recurrent:
    """Without numbers, so that keeping it costs little."""
    record = getattr(key.config, "record", None)  # of a config of transformers
    return build_on_meta(kind, copy.deepcopy(key.config) if record is None else record()).eval()
