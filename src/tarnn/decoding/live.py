"""The program of a live model: it is written from the model's config and weights, so nothing else may compute.

Each module is compared with that of a fresh model of the same config, which is built without numbers.
"""

from dataclasses import asdict
from typing import Any, cast

import torch
from torch import Tensor, nn

from tarnn.decoding.plan import Refusal, check_no_global_hooks, own_method, why_watched
from tarnn.families.by_name import FAMILIES, family_of
from tarnn.families.config import Config
from tarnn.families.rwkv7 import program_of_weights
from tarnn.families.weights import Weights
from tarnn.models.config import ModelConfig
from tarnn.models.images import ImageModelConfig
from tarnn.models.meta_device import build_on_meta
from tarnn.models.rwkv import RwkvModel
from tarnn.program.instructions import Program

OURS = ("tarnn.", "transformers.", "torch.nn.")  # homes of classes whose modules compute what their families say
NO_NUMBER = (
    "training",
    "padding_idx",
    "gradient_checkpointing",
    "p",
    "end_ids",
    "pad_id",
    "generation_config",
    "name_or_path",
)
ATTENTIONS = (None, "eager", "sdpa")  # implementations of softmax over all keys
KINDS = {ModelConfig: "tarnn", ImageModelConfig: "tarnn_image"}


def program_of(model: nn.Module) -> Program:
    """Write the program of a model of a known family; its weights are shared, not copied.

    Raises Refusal, with the place, for a model that was changed since its config built it, UserError for weights that are not
    those of its config, and ProgramError for what programs don't have.
    """
    fields, name = fields_of(model), type(model).__name__
    if type(model) is RwkvModel:  # its weights say all sizes
        tensors = model.state_dict()
        check_unchanged(model, RwkvModel.from_weights(tensors))
        return program_of_weights(Weights.of(tensors, f"this {name}"))
    if fields.get("model_type") not in FAMILIES:
        raise Refusal(f"it is made for whole models of known families, not for {name}")
    check_attention(model)
    check_unchanged(model, build_on_meta(type(model), cast(Any, model).config))
    config = Config(fields, f"the config of this {name}")
    return family_of(config)(config, Weights.of(model.state_dict(), f"this {name}"))


def fields_of(model: nn.Module) -> dict[str, Any]:
    """Return a model's config as its config.json has it; an empty one for a module without a config."""
    config: Any = getattr(model, "config", None)
    if hasattr(config, "to_dict"):
        return dict(config.to_dict())
    kind = next((kind for x, kind in KINDS.items() if type(config) is x), None)
    return {} if kind is None else {**asdict(config), "model_type": kind}


def check_attention(model: nn.Module) -> None:
    """Raise Refusal for another implementation of attention than softmax over all keys, at the first such module."""
    for place, module in model.named_modules():
        attention = getattr(getattr(module, "config", None), "_attn_implementation", None)
        if attention not in ATTENTIONS:
            what = f"computes {attention} attention, not softmax over all keys"
            raise Refusal(f"{place or 'the model'} ({type(module).__name__}) {what}")


def check_unchanged(model: nn.Module, fresh: nn.Module) -> None:
    """Raise Refusal for a model that may compute anything but what a fresh one does, at the first such module.

    Looked for are hooks, methods of an instance's own, training mode, classes and numbers that a fresh model has not, and
    buffers that are in no checkpoint.
    """
    check_no_global_hooks()
    expected = dict(fresh.named_modules())
    for place, module in model.named_modules():
        if place not in expected:
            raise Refusal(f"{place} ({type(module).__name__}) is not in a model of its config")
        if (why := _difference(module, expected.pop(place))) is not None:
            raise Refusal(f"{place or 'the model'} ({type(module).__name__}) {why}")
    if expected:
        raise Refusal(f"it has no {next(iter(expected))}, which a model of its config has")


def _difference(module: nn.Module, fresh: nn.Module) -> str | None:
    """Return how a module differs from a fresh one, or None."""
    kind = type(module)
    if kind is not type(fresh) or not f"{kind.__module__}.".startswith(OURS):
        return "does not describe itself"
    if (own := own_method(module)) is not None:
        return f"has a method of its own, {own}"
    if (why := why_watched(module)) is not None:
        return why
    for name in {**vars(fresh), **vars(module)}:
        if name.startswith("_") or name in NO_NUMBER or "dropout" in name:
            continue
        if getattr(vars(module).get(name), "computes_the_same", False):
            continue
        if name not in vars(fresh) or not _same(vars(module).get(name), vars(fresh)[name]):
            return f"has another {name} than its config says"
    return _other_buffer(module)


def _other_buffer(module: Any) -> str | None:
    """Compare buffers that are in no checkpoint with those of a fresh module, rounded where the model was."""
    if not (names := sorted(module._non_persistent_buffers_set)):
        return None
    fresh = type(module)(module.config)
    pairs = ((name, getattr(module, name), getattr(fresh, name)) for name in names)
    other = [name for name, mine, its in pairs if not torch.equal(mine, its.to(mine.dtype))]
    return f"has another {other[0]} than its config says" if other else None


def _same(x: Any, y: Any) -> bool:
    """Whether two values of attributes mean the same to a model that computes."""
    if x is y or isinstance(y, nn.Module):
        return True  # modules are compared by themselves
    if type(x) is not type(y):
        return False
    if isinstance(x, Tensor):
        return x.shape == y.shape and (y.is_meta or torch.equal(x, y))
    if isinstance(x, list | tuple):
        return len(x) == len(y) and all(map(_same, x, y))
    if isinstance(x, dict):
        return x.keys() == y.keys() and all(_same(x[name], y[name]) for name in x)
    if callable(x) and hasattr(x, "__qualname__"):
        return (x.__module__, x.__qualname__) == (y.__module__, y.__qualname__)
    if hasattr(x, "__dict__") and not callable(x):
        return _same(vars(x), vars(y))
    return bool(x == y)
