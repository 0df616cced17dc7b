"""Every op, as the suites over all of them call it: `test_laws.py` and `test_citizen.py`. A new op is a row of `OPS`."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import normalize

from support import scans
from support.decayed_sum import decayed_sum
from tarnn import (
    Elu,
    PositiveRandomFeatures,
    delta_rule,
    delta_step,
    hybrid_attention,
    linear_attention,
    short_convolution,
    short_convolution_step,
    softmax_attention,
    step,
)
from tarnn.numerics import wide
from tarnn.ops import KVCache, hybrid_step, low_rank_delta_rule, low_rank_delta_step, softmax_step

ROOM = 200  # positions of a cache that is continued
LOW_RANK = ("k", "k", "v", "a and b")
FAVOR = PositiveRandomFeatures(head_dim=5, num_features=7, seed=1).double()
HYBRID = {"window": 4, "sinks": 2, "slots": 3}


@dataclass(frozen=True)
class Case:
    """op(*inputs, causal=True, state=, return_state=, key_mask=, cu_seqlens=, **options of each token)."""

    op: Callable
    inputs: tuple[str, ...] = ("q", "k", "v")
    options: tuple[str, ...] = ()  # tensors with an entry for each token: decays, log-weights
    packed_states: bool = True
    stateful: bool = True
    step: Callable | None = None  # step(*inputs, state=, **options)
    dynamic: bool | None = True  # whether torch compiles it for all sizes at once; None: it makes no whole graph of it
    autocast: bool | None = True  # whether it casts inputs; None: it does not say

    def draw(self, b: int, t: int, seed: int = 0) -> "Drawn":
        generator = torch.Generator().manual_seed(seed)
        rand = lambda *shape: torch.randn(*shape, generator=generator).double()  # noqa: E731
        shapes = {"q": (b, 4, t, 5), "k": (b, 2, t, 5), "v": (b, 2, t, 3), "x": (b, 2, t, 3), "more v": (b, 4, t, 3)}
        inputs = [rand(*shapes[x]) for x in self.inputs if x != "a and b"]
        if "a and b" in self.inputs:  # what reads a state, and where that is written: such that the state stays bounded
            direction = normalize(rand(b, 2, t, 5), dim=-1)
            inputs += [-direction, direction * rand(b, 2, t, 5).sigmoid()]
        options = {
            "log_decay": -rand(b, 2, t).abs(),
            "channels": -rand(b, 2, t, 5).abs(),
            "key_log_weight": 3 * rand(b, 2, t),
        }
        options["resets"] = options["log_decay"].masked_fill(rand(b, 2, t) > 1.5, -torch.inf)
        options["beta"] = 2 * rand(b, 2, t).sigmoid()
        options["more beta"] = 2 * rand(b, 4, t).sigmoid()
        options["more decay"], options["more weight"] = -rand(b, 4, t).abs(), 3 * rand(b, 4, t)
        options["rates"] = -rand(b, 2, t, 3).square()
        options["back"] = -rand(b, 2, t).abs()
        names = {"channels": "log_decay", "rates": "log_decay", "resets": "log_decay", "more beta": "beta"}
        names |= {"more decay": "log_decay", "more weight": "key_log_weight", "back": "log_decay_back"}
        return Drawn(self, inputs, {names.get(x, x): options[x] for x in self.options})


@dataclass(frozen=True)
class Drawn:
    """The inputs and options of a call."""

    case: Case
    inputs: list[Tensor]
    options: dict[str, Tensor]

    @property
    def tensors(self) -> list[Tensor]:
        return [*self.inputs, *self.options.values()]

    def of(self, *tensors: Tensor) -> "Drawn":
        """The same call of these tensors."""
        n = len(self.inputs)
        return Drawn(self.case, list(tensors[:n]), dict(zip(self.options, tensors[n:], strict=True)))

    def map(self, f: Callable[[Tensor], Tensor]) -> "Drawn":
        return self.of(*map(f, self.tensors))

    def part(self, start: int | None, stop: int | None) -> "Drawn":
        return self.map(lambda x: x[:, :, start:stop])

    def rows(self, *which: int) -> "Drawn":
        return self.map(lambda x: x[list(which)])

    def change(self, *where: Any, size: float) -> None:
        """Write other numbers there, in place, such as may stand there."""
        for x in self.tensors:
            x[where] = -size * torch.rand_like(x[where])
        if "beta" in self.options:
            self.options["beta"][where] = torch.rand_like(self.options["beta"][where])

    def run(self, state: Any = None, **options: Any) -> tuple[Tensor, Any]:
        o, state = self.case.op(*self.inputs, state=state, return_state=True, **self.options, **options)
        if isinstance(state, KVCache) and state.capacity < ROOM:
            state = state.resized(ROOM)
        return o, state

    def step(self, state: Any, **options: Any) -> tuple[Tensor, Any]:
        if self.case.step is None:
            return self.run(state)
        return self.case.step(*self.inputs, state=state, **self.options, **options)

    def outputs(self, **options: Any) -> Tensor:
        return self.case.op(*self.inputs, **self.options, **options)


FILTERS, BIAS = torch.randn(6, 5, generator=torch.Generator().manual_seed(0)).split([4, 1], 1)


def in_heads(convolve: Callable, **options: Any) -> Callable:
    """Convolution of x (b, h, t, d), every head's channels beside one another."""

    def call(x: Tensor, **more: Any) -> Any:
        found = convolve(
            x.transpose(1, 2).flatten(2), FILTERS.to(wide(x.dtype)), BIAS[:, 0].to(wide(x.dtype)), **options, **more
        )
        o, *state = found if isinstance(found, tuple) else (found,)
        o = o.unflatten(2, x.shape[1:4:2]).transpose(1, 2)
        return (o, *state) if state else o

    return call


ELU, BY_NAME, EXP, MAP = ({"feature_map": x} for x in (Elu(), "identity", "exp", FAVOR))
OPS = {
    "linear": Case(partial(linear_attention, causal=True, **ELU), step=partial(step, **ELU)),
    "linear, resets": Case(
        partial(linear_attention, causal=True, **ELU), options=("resets",), step=partial(step, **ELU)
    ),
    "linear, channels": Case(
        partial(linear_attention, causal=True, normalize=False, **BY_NAME),
        options=("channels",),
        step=partial(step, normalize=False, **BY_NAME),
    ),
    "linear, weighted": Case(
        partial(linear_attention, causal=True, **MAP),
        options=("log_decay", "key_log_weight"),
        step=partial(step, **MAP),
    ),
    "linear, grouped values": Case(
        partial(linear_attention, causal=True, normalize=False, **BY_NAME),
        inputs=("k", "k", "more v"),
        options=("more decay",),
        step=partial(step, normalize=False, **BY_NAME),
    ),
    "linear, grouped values, weighted": Case(
        partial(linear_attention, causal=True, **EXP),
        inputs=("k", "k", "more v"),
        options=("more decay", "more weight"),
        step=partial(step, **EXP),
    ),
    "linear, grouped values, both sides": Case(
        partial(linear_attention, causal=False, **ELU), inputs=("k", "k", "more v"), stateful=False
    ),
    "linear, at least one": Case(
        partial(linear_attention, causal=True, normalize="at_least_one", **BY_NAME),
        options=("log_decay", "key_log_weight"),
        step=partial(step, normalize="at_least_one", **BY_NAME),
    ),
    "linear, both sides": Case(
        partial(linear_attention, causal=False, **EXP), options=("key_log_weight",), stateful=False
    ),
    "linear, both sides, fading": Case(
        partial(linear_attention, causal=False, **ELU),
        options=("log_decay", "back", "key_log_weight"),
        stateful=False,
        dynamic=None,
    ),
    "softmax": Case(
        partial(softmax_attention, causal=True), packed_states=False, step=softmax_step, autocast=None, dynamic=False
    ),
    "softmax, weighted": Case(
        partial(softmax_attention, causal=True),
        options=("key_log_weight",),
        stateful=False,
        autocast=None,
        dynamic=False,
    ),
    "softmax, both sides": Case(partial(softmax_attention, causal=False), stateful=False, dynamic=False),
    "hybrid": Case(
        partial(hybrid_attention, causal=True, window=4, sinks=2, **MAP),
        step=partial(hybrid_step, window=4, sinks=2, **MAP),
        dynamic=None,
    ),
    "hybrid, fading": Case(
        partial(hybrid_attention, causal=True, **MAP, **HYBRID),
        options=("log_decay",),
        step=partial(hybrid_step, **MAP, **HYBRID),
        dynamic=None,
    ),
    "hybrid, both sides": Case(partial(hybrid_attention, causal=False, **MAP, **HYBRID), stateful=False, dynamic=None),
    "diagonal scan": Case(
        scans.diagonal_of_heads, inputs=("x",), options=("rates",), step=scans.diagonal_step_of_heads, autocast=False
    ),
    "selective scan": Case(
        scans.selective_of_heads,
        inputs=("x", "k", "k"),
        options=("rates",),
        step=scans.selective_step_of_heads,
        autocast=False,
    ),
    "delta of low rank": Case(low_rank_delta_rule, inputs=LOW_RANK, step=low_rank_delta_step),
    "delta of low rank, channels": Case(
        low_rank_delta_rule, inputs=LOW_RANK, options=("channels",), step=low_rank_delta_step
    ),
    "delta of low rank, resets": Case(
        low_rank_delta_rule, inputs=LOW_RANK, options=("resets",), step=low_rank_delta_step
    ),
    "convolution": Case(
        in_heads(short_convolution, activation="silu"),
        inputs=("x",),
        step=in_heads(short_convolution_step, activation="silu"),
    ),
    "convolution, both sides": Case(in_heads(short_convolution, causal=False), inputs=("x",), stateful=False),
    "delta": Case(
        partial(delta_rule, normalize_qk=True), options=("beta",), step=partial(delta_step, normalize_qk=True)
    ),
    "delta, resets": Case(
        partial(delta_rule, normalize_qk=0.1),
        options=("beta", "resets"),
        step=partial(delta_step, normalize_qk=0.1),
        dynamic=False,
    ),
    "delta, channels": Case(
        partial(delta_rule, normalize_qk=True),
        options=("beta", "channels"),
        step=partial(delta_step, normalize_qk=True),
    ),
    "delta, grouped values": Case(
        partial(delta_rule, normalize_qk=True, scale=2.0),
        inputs=("k", "k", "more v"),
        options=("more beta",),
        step=partial(delta_step, normalize_qk=True, scale=2.0),
        dynamic=False,
    ),
    "a new op": Case(decayed_sum, inputs=("x",), autocast=None),
}
STATES = {name: case for name, case in OPS.items() if case.stateful}
every_op = pytest.mark.parametrize("case", OPS.values(), ids=OPS)
every_state = pytest.mark.parametrize("case", STATES.values(), ids=STATES)


def close(x: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(x, expected, rtol=1e-9, atol=1e-9)
