"""A hook: one function or method of transformers, what replaces it, and the arguments with which that was tested."""

import functools
import inspect
import types
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from torch import Tensor

from tarnn.huggingface.versions import role


class Hook(NamedTuple):
    """A replacement in a family's file; `path` is a function's name, or "Class.method"."""

    path: str
    replace: Callable[[Callable], Callable]  # the original → what stands there instead
    arguments: str  # names of the original's arguments, as `arguments_of` writes them


class Family(NamedTuple):
    """One architecture: its name, its folder in `transformers.models`, and what is replaced in its file."""

    name: str
    module: str
    hooks: tuple[Hook, ...]
    tested: str = ""  # versions of transformers, where they are fewer than tarnn's

    @property
    def path(self) -> str:
        return f"transformers.models.{self.module}.modeling_{self.module}"


def arguments_of(function: Callable) -> str:
    """The names of a function's arguments, in order; a cache by its new name."""
    kinds: dict[Any, str] = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}
    return " ".join(kinds.get(x.kind, "") + role(x.name) for x in inspect.signature(function).parameters.values())


def on_cpu(adapter: Callable) -> Callable[[Callable], Callable]:
    """Replace a function for tensors on a CPU; others stay with the original, which may have kernels of its own there."""

    def replace(original: Callable) -> Callable:
        @functools.wraps(original)
        def run(first: Tensor, *args: Any, **kwargs: Any) -> Any:
            return (adapter if first.device.type == "cpu" else original)(first, *args, **kwargs)

        return run

    return replace


def with_globals(function: Callable, names: Mapping[str, Any]) -> Callable:
    """A copy of a function that looks some of its global names up in `names`; decorators around it are copied too."""
    if not isinstance(function, types.FunctionType):
        raise TypeError(f"{function!r} is no Python function")
    scope, cells = function.__globals__, function.__closure__
    inner = getattr(function, "__wrapped__", None)
    if inner is None:
        # without __name__, torch.compile looks names up here, not in the module of that name
        scope = {name: value for name, value in {**scope, **names}.items() if name != "__name__"}
    else:
        within = with_globals(inner, names)
        cells = tuple(types.CellType(within) if cell.cell_contents is inner else cell for cell in cells or ())
    copy = types.FunctionType(function.__code__, scope, function.__name__, function.__defaults__, cells)
    copy.__kwdefaults__, copy.__annotations__ = function.__kwdefaults__, function.__annotations__
    if inner is not None:
        copy.__wrapped__ = within  # type: ignore[attr-defined]
    return copy
