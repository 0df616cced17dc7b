"""The states before the first token as parameters (S0 tuning, arXiv 2604.01168): the model's weights stay as they are.

The trained states go to a file of states, which `tarnn generate --state-in` and `tarnn serve --state` take.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from tarnn.decoding.opened import Opened
from tarnn.decoding.state_file import save_state
from tarnn.errors import UserError
from tarnn.huggingface.patching.first_state import Start, starting
from tarnn.huggingface.patching.patch import known_layers
from tarnn.models.state import ModelState

NUMBERS = ("S", "h")  # names of what recurrent layers keep, in a program's state


class FirstStates(nn.Module):
    """A model whose recurrences begin from parameters, as the Trainer expects it: called with a batch, it returns a loss.

    Only the first states are its own parameters, so that checkpoints hold these alone.
    """

    def __init__(self, model: Any):
        super().__init__()
        for x in model.parameters():
            x.requires_grad_(False)
        self._unregistered = [model]  # in a list: not a module of ours
        layers, shapes = recurrent_layers(model)
        self.states = nn.ParameterList([nn.Parameter(torch.zeros(shape)) for shape in shapes])
        for layer, S in zip(layers, self.states):
            begin_from(layer, partial(_given, S))

    @property
    def model(self) -> Any:
        """The model whose weights are not trained."""
        return self._unregistered[0]

    @property
    def config(self) -> Any:
        return self.model.config

    def train(self, mode: bool = True) -> "FirstStates":
        self.model.train(mode)
        return super().train(mode)

    def activation_checkpointing_enable(self, **options: Any) -> None:
        self.model.activation_checkpointing_enable(**options)

    def forward(self, **batch: Any) -> Any:
        return self.model(**batch)


def _given(S: Tensor, _: tuple[int, ...]) -> Tensor:
    return S


def recurrent_layers(model: Any) -> tuple[list[nn.Module], list[tuple[int, ...]]]:
    """The layers of a model that have a recurrence, in the order in which they run, and the shapes of their states.

    UserError for a model without such layers, or with several states in a layer.
    """
    layers, shapes, handles = list[nn.Module](), list[tuple[int, ...]](), list[RemovableHandle]()

    def note(layer: nn.Module, shape: tuple[int, ...]) -> None:
        layers.append(layer)
        shapes.append(shape)

    for _, layer in known_layers(model):
        handles += begin_from(layer, partial(note, layer))
    with torch.no_grad():
        model(input_ids=torch.zeros(1, 2, dtype=torch.int64), use_cache=False)
    for handle in handles:
        handle.remove()
    if not layers or len(set(layers)) < len(layers):
        raise UserError(
            f"this {type(model).__name__} has no layer whose first state can be tuned; expected layers with the delta rule, "
            "Mamba-2 or Mamba, with one state each. `tarnn finetune` trains adapters."
        )
    return layers, shapes


def begin_from(layer: nn.Module, start: Start) -> list[RemovableHandle]:
    """Let a layer call its recurrence with the first state that `start` returns, also when checkpointing calls it again."""
    blocks = list[AbstractContextManager[None]]()

    def enter(*_: Any) -> None:
        blocks.append(starting(start))
        blocks[-1].__enter__()

    def leave(*_: Any) -> None:
        blocks.pop().__exit__(None, None, None)

    return [layer.register_forward_pre_hook(enter), layer.register_forward_hook(leave, always_call=True)]


def write_states(path: Path, states: Sequence[Tensor], opened: Opened) -> int:
    """Write a file of states from which texts begin; return its size in bytes. opened: the model as it runs."""
    state = with_states(opened.new_state(1, 0), states)
    return save_state(path, opened, state, None, [])


def with_states(state: ModelState, states: Sequence[Tensor]) -> ModelState:
    """Put states into the layers of a program's state that have one, in order. UserError where they are others."""
    layers, left = list(state.layers), list(states)
    for i, layer in enumerate(layers):
        name = next((x for x in NUMBERS if isinstance(getattr(layer, x, None), Tensor)), None)
        if name is None or layer.grows:
            continue
        held = getattr(layer, name)
        S = left.pop(0) if left else held.new_zeros(())
        S = S.mT if name == "h" and S.ndim > 1 else S  # of a selective scan it lies number by number
        if held.shape != (1, *S.shape):
            raise UserError(
                "the model that was tuned and its program have other states, so no file of states can be written."
            )
        layers[i] = replace(layer, **{name: S[None].to(held.dtype).contiguous()})  # type: ignore[type-var]
    if left:
        raise UserError(
            "the model that was tuned has more states than its program, so no file of states can be written."
        )
    return replace(state, layers=tuple(layers))
