"""States: all that a sequence so far means to what comes after it, as values with one protocol."""

from dataclasses import dataclass, fields, replace
from typing import ClassVar, TypeVar

import torch
from jaxtyping import Int
from torch import Tensor
from torch.utils import _pytree as pytree

_BRACKETS_TO_DOTS = str.maketrans({"[": ".", "]": None})
Kind = TypeVar("Kind", bound="State")  # (Self is more than runtime type checkers understand)


class State:
    """A frozen bundle of tensors whose first axis counts rows, of numbers, and of other states.

    A subclass is a frozen dataclass (with eq=False) and usually nothing more: its fields are tensors, None,
    numbers, states or tuples of states. It is a pytree, so torch.func, torch.compile and torch.export see
    through it; a field that is None is part of its structure.

    A state is a value: functions return new ones and leave the given one as it was, unless they are asked for
    `inplace=True`. So a state can be kept, forked, reordered for beam search, moved, saved and fed back.

    grows: whether each token makes what is used of it longer.
    """

    grows: ClassVar[bool] = False

    def __init_subclass__(cls, **kwargs) -> None:
        super().__init_subclass__(**kwargs)
        name = f"{cls.__module__}.{cls.__qualname__}"
        pytree.register_pytree_node(
            cls,
            _flatten,
            lambda parts, names: cls(**dict(zip(names, parts, strict=True))),
            serialized_type_name=name,
            flatten_with_keys_fn=_flatten_with_keys,
        )

    def map(self: Kind, f) -> Kind:
        """f applied to each tensor: `state.map(torch.Tensor.detach)`."""
        return pytree.tree_map_only(Tensor, f, self)

    def select(self: Kind, rows: Int[Tensor, " k"]) -> Kind:
        """The rows of the batch that `rows` names, in its order, copied: beams, forks, slots."""

        def chosen(mine):
            if isinstance(mine, State):
                return mine.select(rows)
            return mine.index_select(0, rows.to(mine.device)) if isinstance(mine, Tensor) else mine

        return pytree.tree_map(chosen, self, is_leaf=self._is_part)

    def insert(self: Kind, rows: Int[Tensor, " k"], other: Kind) -> Kind:
        """This state with `other`, which has k rows, in the place of the named rows.

        Raises ValueError for a state of another kind.
        """

        def replaced(mine, theirs):
            if isinstance(mine, State):
                return mine.insert(rows, theirs)
            return mine.index_copy(0, rows.to(mine.device), theirs) if isinstance(mine, Tensor) else mine

        try:
            mine, theirs = self._aligned(other)
            return pytree.tree_map(replaced, mine, theirs, is_leaf=mine._is_part)
        except (ValueError, RuntimeError, IndexError, AttributeError) as error:
            raise ValueError(
                f"a state takes rows from a state of its own kind and shapes; expected {self!r}, got {other!r}. "
                "Make both with the new_state of one model."
            ) from error

    def _aligned(self: Kind, other: Kind) -> tuple[Kind, Kind]:
        """Both in such a form that their tensors differ in the number of rows only."""
        return self, other

    def to(self: Kind, device: torch.device | str) -> Kind:
        """Return the same state on another device."""
        return self.map(lambda x: x.to(device))

    def clone(self: Kind) -> Kind:
        """A copy that shares no memory with this one, contiguous."""
        return self.map(lambda x: x.clone(memory_format=torch.contiguous_format))

    @property
    def nbytes(self) -> int:
        """Bytes that the tensors take, all that was allocated."""
        return sum(x.nbytes for x in pytree.tree_leaves(self) if isinstance(x, Tensor))

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors by name, for files and exports: `S`, or in a model's state `layers.0.S`."""
        found: dict[str, Tensor] = {}
        for path, part in pytree.tree_flatten_with_path(self, is_leaf=self._is_part)[0]:
            name = pytree.keystr(path).translate(_BRACKETS_TO_DOTS).strip(".")
            if isinstance(part, State):
                found |= {f"{name}.{inner}": x for inner, x in part.tensors().items()}
            elif isinstance(part, Tensor):
                found[name] = part
        return found

    def filled(self: Kind, found: dict[str, Tensor]) -> Kind:
        """This state with other tensors, by the names that `tensors()` gives them."""
        return replace(self, **found)  # type: ignore[type-var]

    def _is_part(self, x) -> bool:
        return isinstance(x, State) and x is not self

    def __repr__(self) -> str:
        parts = (f"{name} {tuple(x.shape)} {x.dtype}" for name, x in self.tensors().items())
        return f"{type(self).__name__}({', '.join(parts)})"


def _flatten(state: State) -> tuple[list, list[str]]:
    names = [x.name for x in fields(state) if getattr(state, x.name) is not None]  # type: ignore[arg-type]
    return [getattr(state, name) for name in names], names


def _flatten_with_keys(state: State) -> tuple[list, list[str]]:
    parts, names = _flatten(state)
    return [(pytree.GetAttrKey(name), x) for name, x in zip(names, parts)], names


@dataclass(frozen=True, eq=False, repr=False)
class NoState(State):
    """The state of a layer that remembers nothing."""
