"""The program of a live model: it is written from the model's config and weights, so nothing else may compute.

Each module is compared with that of a fresh model of the same config, which is built without numbers.
"""

from collections.abc import Callable, Iterable
from copy import deepcopy
from dataclasses import asdict
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_module

from tarnn.checkpoint_keys import CONVERTED, METHOD
from tarnn.decoding.refusal import Refusal
from tarnn.families.by_name import FAMILIES, family_of
from tarnn.families.config import Config
from tarnn.families.converted import NEAR
from tarnn.families.rwkv7 import program_of_weights
from tarnn.families.weights import ADDED, Weights
from tarnn.kernels.cpu.products import WEIGHT_TYPES
from tarnn.models.config import ModelConfig
from tarnn.models.images import ImageModelConfig
from tarnn.models.meta_device import build_on_meta
from tarnn.models.rwkv import RwkvModel
from tarnn.program.instructions import Program

OURS = ("tarnn.", "transformers.", "torch.nn.")  # homes of classes whose modules compute what their families say
# hooks that change no number: they note what is put out for those who ask, or ask for gradients of the embeddings
HARMLESS = (("transformers.utils.output_capturing", ""), ("transformers.modeling_utils", "make_inputs_require_grads"))
NO_NUMBER = (
    "training",
    "padding_idx",
    "gradient_checkpointing",
    "p",
    "end_ids",
    "pad_id",
    "generation_config",
    "name_or_path",
    "vocab_size",
    "peft_config",
)
MARK = "quantization_config"  # of a config, where converted models have the name of their attention
# each gives a fresh converted model the parts that its class does not make
completing: list[Callable[[nn.Module], None]] = []
ATTENTIONS = (None, "eager", "sdpa")  # implementations of softmax over all keys
# of each model: its class, its config, what that said, and the fresh one; building it takes as long as packing a small model
_fresh: WeakKeyDictionary[nn.Module, tuple[type, Any, dict[str, Any], nn.Module]] = WeakKeyDictionary()
KINDS = {ModelConfig: "tarnn", ImageModelConfig: "tarnn_image"}


def program_of(model: nn.Module, *, anywhere: bool = False) -> Program:
    """Write the program of a model of a known family; its weights are shared, not copied.

    anywhere: with zeros for weights, which may be on any device, of any type or without numbers: for the kinds of instruction.

    Raises Refusal, with the place, for a model that was changed since its config built it, or whose weights are elsewhere,
    UserError for weights that are not those of its config, and ProgramError for what programs don't have.
    """
    fields, name, tensors = fields_of(model), type(model).__name__, model.state_dict()
    if anywhere:
        tensors = {key: torch.zeros((), dtype=x.dtype, device="cpu").expand(x.shape) for key, x in tensors.items()}
    else:
        check_numbers(model.parameters())
    if type(model) is RwkvModel:  # its weights say all sizes
        check_unchanged(model, RwkvModel.from_weights(tensors))
        return program_of_weights(Weights.of(tensors, f"this {name}"))
    check_known(model, fields)
    fields, tensors = as_computed(model, fields, tensors)
    config = Config(fields, f"the config of this {name}")
    return family_of(config)(config, Weights.of(tensors, f"this {name}"))


def check_known(model: nn.Module, fields: dict[str, Any]) -> nn.Module:
    """Return a fresh model of the same config. Raises Refusal, with the place, where this one may compute anything else."""
    name = type(model).__name__
    if fields.get("model_type") not in FAMILIES:
        raise Refusal(f"it is made for whole models of known families, not for {name}")
    if not of_ours(model):
        raise Refusal(f"the model ({name}) is of a class that no family knows")
    check_attention(model, fields)
    fresh = fresh_model(model, fields)
    check_unchanged(model, fresh)
    return fresh


def fresh_model(model: Any, fields: dict[str, Any]) -> nn.Module:
    """Build a model of the same config, without numbers; one that was converted gets the parts that `completing` adds.

    A model's is built again where its config is another object, or says something else.
    """
    config, known = model.config, _fresh.get(model)
    if known is not None and known[0] is type(model) and known[1] is config and known[2] == fields:
        return known[3]
    fresh: nn.Module = build_on_meta(type(model), config)
    if fields.get(CONVERTED) is not None:
        for complete in completing:
            with torch.random.fork_rng(devices=()), torch.device("meta"):
                complete(fresh)
    _fresh[model] = type(model), config, deepcopy(fields), fresh
    return fresh


def as_computed(
    model: Any, fields: dict[str, Any], tensors: dict[str, Tensor]
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return config and tensors as the attention needs them that runs: a converted model may compute softmax again."""
    kind = getattr(model.config, "_attn_implementation", None)
    if fields.get(CONVERTED) is None:
        return fields, tensors
    if kind in NEAR:
        return {**fields, MARK: {"quant_method": METHOD, "attention": kind}}, tensors
    fields = {name: x for name, x in fields.items() if name not in (CONVERTED, MARK)}
    return fields, {name: x for name, x in tensors.items() if ADDED not in name}


def has_family(model: nn.Module) -> bool:
    """Whether there are programs of models of this kind."""
    return fields_of(model).get("model_type") in FAMILIES


def fields_of(model: nn.Module) -> dict[str, Any]:
    """Return a model's config as its config.json has it; an empty one for a module without a config."""
    config: Any = getattr(model, "config", None)
    if hasattr(config, "to_dict"):
        return dict(config.to_dict())
    kind = next((kind for x, kind in KINDS.items() if type(config) is x), None)
    return {} if kind is None else {**asdict(config), "model_type": kind}


def of_ours(module: nn.Module) -> bool:
    """Whether a module's class is one that families know."""
    return f"{type(module).__module__}.".startswith(OURS)


def check_attention(model: nn.Module, fields: dict[str, Any]) -> None:
    """Raise Refusal for an implementation of attention that is neither softmax over all keys nor what the config says of a
    converted model, at the first such module."""
    converted = fields.get(CONVERTED) is not None
    for place, module in modules_of(model).items():
        attention = getattr(vars(module).get("config"), "_attn_implementation", None)
        if attention in NEAR and not converted:
            what = f"computes {attention} and has no options (tarnn.conversion.set_options gives it some)"
            raise Refusal(f"{place or 'the model'} ({type(module).__name__}) {what}")
        if attention not in NEAR and attention not in ATTENTIONS:
            what = f"computes {attention} attention, not softmax over all keys"
            raise Refusal(f"{place or 'the model'} ({type(module).__name__}) {what}")


def modules_of(model: nn.Module) -> dict[str, nn.Module]:
    """Return each module once, by its place and in the order of `named_modules`, which takes ten times as long."""
    found: dict[str, nn.Module] = {}
    seen: set[nn.Module] = set()

    def walk(place: str, module: nn.Module) -> None:
        seen.add(module)
        found[place] = module
        for name, part in module._modules.items():
            if part is not None and part not in seen:
                walk(f"{place}.{name}" if place else name, part)

    walk("", model)
    return found


def check_numbers(weights: Iterable[Tensor]) -> None:
    """Raise Refusal for weights of a type that kernels don't read, on another device, or that are no plain numbers."""
    weights = list(weights)
    if any((type(x) is not nn.Parameter and type(x.data) is not Tensor) or x.layout != torch.strided for x in weights):
        raise Refusal("its weights are sharded, or kept in another way than as numbers")
    other = next((x for x in weights if not x.is_cpu or x.dtype not in WEIGHT_TYPES), None)
    if other is not None:
        types = "float32, bfloat16, float16"
        raise Refusal(f"its weights must be of {types}, on a CPU; some are {other.dtype}, on {other.device}")


def check_unchanged(model: nn.Module, fresh: nn.Module) -> None:
    """Raise Refusal for a model that may compute anything but what a fresh one does, at the first such module.

    Looked for are hooks, methods of an instance's own, training mode, classes and numbers that a fresh model has not, and
    buffers that are in no checkpoint.
    """
    check_no_global_hooks()
    expected = modules_of(fresh)
    for place, module in modules_of(model).items():
        if place not in expected:
            raise Refusal(f"{place} ({type(module).__name__}) is not in a model of its config")
        if (why := _difference(module, expected.pop(place))) is not None:
            raise Refusal(f"{place or 'the model'} ({type(module).__name__}) {why}")
    if expected:
        raise Refusal(f"it has no {next(iter(expected))}, which a model of its config has")


def _difference(module: nn.Module, fresh: nn.Module) -> str | None:
    """Return how a module differs from a fresh one, or None."""
    kind = type(module)
    if kind is not type(fresh):
        other = f"of {kind.__module__}, " if kind.__name__ == type(fresh).__name__ else ""
        return f"is {other}not the {type(fresh).__name__} that the config calls for"
    if not of_ours(module):
        return "is of a class that no family knows"
    if (own := own_method(module)) is not None:
        return f"has a method of its own, {own}"
    if (why := why_watched(module)) is not None:
        return why
    mine, its = vars(module), vars(fresh)
    for name in mine if mine.keys() == its.keys() else {**its, **mine}:
        if name.startswith("_") or (value := mine.get(name)) is its.get(name, mine):
            continue
        if name in NO_NUMBER or "dropout" in name or getattr(value, "computes_the_same", False):
            continue
        if name not in its or not _same(value, its[name]):
            return f"has another {name} than its config says"
    return _other_buffer(module)


def check_no_global_hooks() -> None:
    """Raise Refusal where there are hooks that any module calls."""
    if torch_module._global_forward_hooks or torch_module._global_forward_pre_hooks:
        raise Refusal("there is a hook on all modules")


def own_method(module: nn.Module) -> str | None:
    """Return the name of a method that this instance has in place of its class's, as offloading libraries do it."""
    for name, value in vars(module).items():
        if not callable(value) or isinstance(value, nn.Module) or not hasattr(type(module), name):
            continue
        if not getattr(value, "computes_the_same", False):
            return name
    return None


def why_watched(module: nn.Module) -> str | None:
    """Return why a module may compute something else than its class says: a hook, or training mode."""
    hooks = (*module._forward_hooks.values(), *module._forward_pre_hooks.values())
    if not all(map(_is_harmless, hooks)):
        return "has a hook"
    # others do the same in training: transformers leaves a new head so
    return "is in training mode" if module.training and not isinstance(module, nn.Linear | nn.Embedding) else None


def _is_harmless(hook: Any) -> bool:
    home, name = getattr(hook, "__module__", ""), getattr(hook, "__qualname__", "")
    return any(home == module and part in name for module, part in HARMLESS)


def _other_buffer(module: Any) -> str | None:
    """Compare buffers that are in no checkpoint with those of a fresh module, rounded where the model was."""
    names = sorted(module._non_persistent_buffers_set)
    if not names or not hasattr(module, "config"):
        return None
    if any(getattr(module, name).is_meta for name in names):
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
    if isinstance(x, partial):
        return _same((x.func, x.args, x.keywords), (y.func, y.args, y.keywords))
    if callable(x) and hasattr(x, "__qualname__"):
        return (x.__module__, x.__qualname__) == (y.__module__, y.__qualname__)
    if hasattr(x, "__dict__") and not callable(x):
        return _same(vars(x), vars(y))
    return bool(x == y)
