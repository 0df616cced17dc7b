"""Put tarnn's ops into transformers' linear models, all of them or one, and take them out again."""

import importlib
import itertools
import logging
import types
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any
from weakref import ref

import transformers
from torch import nn

from tarnn.huggingface.patching import monkeypatch
from tarnn.huggingface.patching.families import FAMILIES
from tarnn.huggingface.patching.hooks import Family, Hook, arguments_of, with_globals
from tarnn.huggingface.patching.undo import lifted_refusals
from tarnn.huggingface.versions import versions_known

_LOG = logging.getLogger("tarnn")
_NUMBERS = itertools.count()


@dataclass(frozen=True, eq=False)
class Patch:
    """The result of `patch_transformers`. It lasts until `unpatch_transformers`, or, after `with`, until the block ends.

    replaced: family → the functions and methods that are tarnn's now. kept: family → why it stays as it was.
    """

    replaced: dict[str, tuple[str, ...]]
    kept: dict[str, str]
    _number: int = field(repr=False)
    _owners: tuple[ref, ...] = field(repr=False)

    def __enter__(self) -> "Patch":
        return self

    def __exit__(self, *_: object) -> None:
        with monkeypatch.LOCK:
            monkeypatch.release((owner for x in self._owners if (owner := x()) is not None), self._number)

    def __str__(self) -> str:
        names = (
            f"{', '.join(self.replaced) or 'no family'} of transformers {transformers.__version__} computed by tarnn"
        )
        return names + "".join(f"; {name} is not: {why}" for name, why in self.kept.items())


def patch_transformers(model: nn.Module | None = None) -> Patch:
    """Let transformers' linear models use tarnn's ops on a CPU: forward, backward, generation.

        tarnn.patch_transformers()                      # from now on, models that exist and models to come
        with tarnn.patch_transformers(): ...            # for a while
        tarnn.patch_transformers(model)                 # this model alone

    docs/families.md lists the families; their numbers stay the same, within float32's rounding, and become right where
    transformers' are not. Tensors on other devices than a CPU stay with transformers' own functions.

    Without a model, functions in the files of transformers' families and the `forward` of their layers are replaced. With a
    model, its layers get a `forward` of their own; all other models stay as they are. A family is replaced as a whole or, if one
    of its functions has other arguments than those that were tested, not at all. Blocks may be nested; what two calls replaced
    stays until both are undone.

    Returns a Patch, which says what was replaced, what was not and why; the same is logged in one line ("tarnn", of `logging`).
    Raises ValueError for a model without a layer that tarnn knows, one whose family is not as it was tested, a compiled one, and
    one whose layers have a `forward` of their own already.
    """
    with monkeypatch.LOCK:
        number = next(_NUMBERS)
        changes, replaced, kept = _everywhere() if model is None else _within(model)
        for owner, name, value in changes:
            monkeypatch.acquire(owner, name, value, number)
    patch = Patch(replaced, kept, number, tuple({id(owner): ref(owner) for owner, _, _ in changes}.values()))
    surprising = any(x.name in kept and not x.tested for x in FAMILIES)
    _LOG.log(logging.WARNING if surprising else logging.INFO, "%s", patch)
    return patch


def unpatch_transformers(model: nn.Module | None = None) -> None:
    """Undo every `patch_transformers()`, or every `patch_transformers(model)` of this model.

    Models that were patched one by one stay patched without their `model`. Nothing happens where nothing is patched.
    """
    with monkeypatch.LOCK:
        mine = [x for x in monkeypatch.owners() if not isinstance(x, nn.Module)] if model is None else model.modules()
        monkeypatch.release(mine)


Changes = tuple[list[tuple[Any, str, Any]], dict[str, tuple[str, ...]], dict[str, str]]


def _everywhere() -> Changes:
    changes: list[tuple[Any, str, Any]] = []
    replaced, kept = {}, {}
    for family in FAMILIES:
        if (why := _refusal(family)) is not None:
            kept[family.name] = why
            continue
        for hook in family.hooks:
            owner, name = _owner(family, hook)
            changes.append((owner, name, hook.replace(monkeypatch.original(owner, name))))
        changes += lifted_refusals(vars(importlib.import_module(family.path)).values())
        replaced[family.name] = tuple(hook.path for hook in family.hooks)
    return changes, replaced, kept


def _within(model: nn.Module) -> Changes:
    if not isinstance(model, nn.Module):
        raise TypeError(f"patch_transformers takes a model of transformers, or nothing; got {type(model).__name__}.")
    changes: list[tuple[Any, str, Any]] = []
    replaced = {}
    for family, layer in known_layers(model):
        if family.name not in replaced and (why := _refusal(family)) is not None:
            raise ValueError(f"{type(model).__name__} stays as it is: {why}.")
        functions = {
            x.path: x.replace(monkeypatch.original(*_owner(family, x))) for x in family.hooks if "." not in x.path
        }
        for hook in _methods(family, layer):
            own = with_globals(monkeypatch.original(*_owner(family, hook)), functions)
            method: Any = hook.replace(own)
            method.computes_the_same = True  # so the fused step takes the layer
            changes.append((layer, hook.path.partition(".")[2], types.MethodType(method, layer)))
        replaced[family.name] = tuple(hook.path for hook in family.hooks)
    if not changes:
        known = ", ".join(family.name for family in FAMILIES)
        raise ValueError(f"{type(model).__name__} has no layer that tarnn computes. Known families: {known}.")
    _refuse_changed(model, changes)
    files = {family.path for family in FAMILIES}
    changes += lifted_refusals(x for x in model.modules() if type(x).__module__ in files)
    return changes, replaced, {}


def known_layers(model: nn.Module) -> Iterator[tuple[Family, nn.Module]]:
    """The layers that `patch_transformers` replaces, each with its family."""
    by_file = {family.path: family for family in FAMILIES}
    for layer in model.modules():
        family = by_file.get(type(layer).__module__)
        if family is not None and any(_methods(family, layer)):
            yield family, layer


def _methods(family: Family, layer: nn.Module) -> Iterator[Hook]:
    return (hook for hook in family.hooks if hook.path.partition(".")[0] == type(layer).__name__)


def _refuse_changed(model: nn.Module, changes: list[tuple[Any, str, Any]]) -> None:
    if any(hasattr(x, "_orig_mod") or getattr(x, "_compiled_call_impl", None) is not None for x in model.modules()):
        raise ValueError("this model was compiled already. Patch the model itself first, then compile it.")
    for layer, name, _ in changes:
        if name in vars(layer) and layer not in monkeypatch.owners():
            raise ValueError(
                f"a {type(layer).__name__} of this model has a {name} of its own already, as hooks of accelerate set it. "
                "Patch the model before that, or call patch_transformers() without a model."
            )


def _owner(family: Family, hook: Hook) -> tuple[Any, str]:
    """The module or class that has the hook's function, and its name there."""
    module = importlib.import_module(family.path)
    first, _, method = hook.path.partition(".")
    return (getattr(module, first), method) if method else (module, first)


def _refusal(family: Family) -> str | None:
    """Why a family stays as it is: None, or what differs from what was tested, and which version works."""
    here, tested = f"transformers {transformers.__version__}", f"transformers {family.tested or versions_known()}"
    try:
        importlib.import_module(family.path)
    except ImportError as error:
        return f"{here} can't load it ({error}); it was tested with {tested}"
    for hook in family.hooks:
        try:
            function = monkeypatch.original(*_owner(family, hook))
        except AttributeError:
            return f"{here} has no {family.module}.{hook.path}, as {tested} has"
        if (found := arguments_of(function)) != hook.arguments:
            differs = _difference(found.split(), hook.arguments.split())
            return f"{hook.path} of {here} {differs}; tarnn was tested with {tested}"
    return None


def _difference(found: list[str], tested: list[str]) -> str:
    """Which arguments a function has and should not, and the other way round."""
    new, gone = [x for x in found if x not in tested], [x for x in tested if x not in found]
    parts = [f"has new arguments ({', '.join(new)})"] * bool(new) + [f"lacks some ({', '.join(gone)})"] * bool(gone)
    return " and ".join(parts) or "has its arguments in another order"
