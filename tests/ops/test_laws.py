"""What holds for every op that has a state: one suite over all of them. A new op is a row of `OPS`."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from support import scans
from support.decayed_sum import decayed_sum
from torch import Tensor
from torch.nn.functional import normalize

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
        names = {"channels": "log_decay", "rates": "log_decay", "resets": "log_decay", "more beta": "beta"}
        names |= {"more decay": "log_decay", "more weight": "key_log_weight"}
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

    def map(self, f: Callable[[Tensor], Tensor]) -> "Drawn":
        return Drawn(self.case, [f(x) for x in self.inputs], {name: f(x) for name, x in self.options.items()})

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

    def step(self, state: Any) -> tuple[Tensor, Any]:
        if self.case.step is None:
            return self.run(state)
        return self.case.step(*self.inputs, state=state, **self.options)

    def outputs(self, **options: Any) -> Tensor:
        return self.case.op(*self.inputs, **self.options, **options)


FILTERS = torch.randn(6, 4, generator=torch.Generator().manual_seed(0)).double()


def in_heads(convolve: Callable, **options: Any) -> Callable:
    """Convolution of x (b, h, t, d), every head's channels beside one another."""

    def call(x: Tensor, **more: Any) -> Any:
        found = convolve(x.transpose(1, 2).flatten(2), FILTERS, **options, **more)
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
    "softmax": Case(partial(softmax_attention, causal=True), packed_states=False, step=softmax_step),
    "softmax, weighted": Case(partial(softmax_attention, causal=True), options=("key_log_weight",), stateful=False),
    "softmax, both sides": Case(partial(softmax_attention, causal=False), stateful=False),
    "hybrid": Case(
        partial(hybrid_attention, causal=True, window=4, sinks=2, **MAP),
        step=partial(hybrid_step, window=4, sinks=2, **MAP),
    ),
    "hybrid, fading": Case(
        partial(hybrid_attention, causal=True, **MAP, **HYBRID),
        options=("log_decay",),
        step=partial(hybrid_step, **MAP, **HYBRID),
    ),
    "hybrid, both sides": Case(partial(hybrid_attention, causal=False, **MAP, **HYBRID), stateful=False),
    "diagonal scan": Case(
        scans.diagonal_of_heads, inputs=("x",), options=("rates",), step=scans.diagonal_step_of_heads
    ),
    "selective scan": Case(
        scans.selective_of_heads, inputs=("x", "k", "k"), options=("rates",), step=scans.selective_step_of_heads
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
        partial(delta_rule, normalize_qk=0.1), options=("beta", "resets"), step=partial(delta_step, normalize_qk=0.1)
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
    ),
    "a new op": Case(decayed_sum, inputs=("x",)),
}
STATES = {name: case for name, case in OPS.items() if case.stateful}
every_op = pytest.mark.parametrize("case", OPS.values(), ids=OPS)
every_state = pytest.mark.parametrize("case", STATES.values(), ids=STATES)


def close(x: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(x, expected, rtol=1e-9, atol=1e-9)


@every_state
@pytest.mark.parametrize("cuts", [(3, 3, 8), (1, 66)], ids=str)
def test_prefix_then_rest_is_the_whole(case, chunks, cuts):
    """Outputs, and what comes behind; in any pieces, empty ones too."""
    drawn, bounds = case.draw(2, cuts[-1] + 4), [0, *cuts, cuts[-1] + 4]
    (whole, end), state, pieces = drawn.run(), None, []
    for start, stop in zip(bounds, bounds[1:]):
        o, state = drawn.part(start, stop).run(state)
        pieces.append(o)
    close(torch.cat(pieces, 2), whole)
    more = case.draw(2, 3, seed=1)
    close(more.run(state)[0], more.run(end)[0])


@every_state
def test_token_by_token_is_the_whole(case):
    """Outputs and gradients, by the op's own step where it has one."""
    drawn = case.draw(2, 13).map(lambda x: x.requires_grad_())
    first, state = drawn.part(0, 1).run()
    pieces = [first]
    for i in range(1, 13):
        o, state = drawn.part(i, i + 1).step(state)
        pieces.append(o)
    found, expected = torch.cat(pieces, 2), drawn.run()[0]
    close(found, expected)
    gradients = [torch.autograd.grad(x.square().sum(), drawn.tensors) for x in (found, expected)]
    for x, y in zip(*gradients):
        close(x, y)


@every_state
def test_gradients_pass_through_a_state(case):
    def gradients(attend):
        drawn = case.draw(2, 9).map(lambda x: x.requires_grad_())
        return torch.autograd.grad(attend(drawn)[:, :, 4:].square().sum(), drawn.tensors)

    def handed_over(drawn):
        first, state = drawn.part(0, 4).run()
        return torch.cat([first, drawn.part(4, None).run(state)[0]], 2)

    for x, expected in zip(gradients(handed_over), gradients(lambda drawn: drawn.run()[0])):
        close(x, expected)


@every_op
@pytest.mark.parametrize("cuts", [[0, 3, 5, 5, 12], [0, 7, 70]], ids=str)
def test_packed_is_a_loop(case, chunks, cuts):
    """Outputs, gradients, and states, which are continued as a batch."""
    drawn = case.draw(1, cuts[-1]).map(lambda x: x.requires_grad_())
    pieces = [drawn.part(start, stop) for start, stop in zip(cuts, cuts[1:])]
    packed, loop = drawn.outputs(cu_seqlens=torch.tensor(cuts)), torch.cat([x.outputs() for x in pieces], 2)
    close(packed, loop)
    expected = torch.autograd.grad(loop.square().sum(), drawn.tensors)
    for x, y in zip(torch.autograd.grad(packed.square().sum(), drawn.tensors), expected):
        close(x, y)
    if case.stateful and case.packed_states:
        _, states = drawn.run(cu_seqlens=torch.tensor(cuts))
        more = case.draw(len(pieces), 3, seed=1)
        alone = [more.rows(i).run(x.run()[1])[0] for i, x in enumerate(pieces)]
        close(more.run(states)[0], torch.cat(alone))


@every_op
def test_padded_is_cut(case, chunks):
    """On the right in row 0, on the left in row 1; whatever stands there reaches no output, no state and no gradient."""
    real = torch.ones(2, 11, dtype=torch.bool)
    real[0, 8:] = False
    real[1, :3] = False
    drawn = case.draw(2, 11)
    junk = drawn.map(lambda x: x.clone().requires_grad_())
    for x in junk.inputs:
        x.data.masked_fill_(
            ~real[:, None, :, None], torch.nan if x is not junk.inputs[0] or len(junk.inputs) == 1 else 3
        )
    padded = junk.outputs(key_mask=real)
    gradients = torch.autograd.grad(padded.transpose(1, 2)[real].square().sum(), junk.tensors)
    for row, there in ((0, slice(0, 8)), (1, slice(3, None))):
        cut = drawn.rows(row).part(there.start, there.stop).map(lambda x: x.clone().requires_grad_())
        o = cut.outputs()
        close(padded[row : row + 1, :, there], o)
        if case.stateful:
            more = case.draw(2, 3, seed=1)
            _, state = junk.run(key_mask=real)
            close(more.run(state)[0][row : row + 1], more.rows(row).run(cut.run()[1])[0])
        for x, y in zip(gradients, torch.autograd.grad(o.square().sum(), cut.tensors)):
            close(x[row : row + 1, :, there], y)
    assert all((x.transpose(1, 2)[~real] == 0).all() for x in gradients)


@every_state
@pytest.mark.parametrize("t", [9, 70])
def test_nothing_later_changes_an_output_not_even_a_bit(case, chunks, t):
    drawn, cut = case.draw(2, t), t - 4
    before = drawn.outputs()[:, :, :cut]
    drawn.change(slice(None), slice(None), slice(cut, None), size=100)
    assert torch.equal(drawn.outputs()[:, :, :cut], before)


@every_op
def test_rows_of_a_batch_do_not_mix(case, chunks):
    drawn = case.draw(3, 9)
    before = drawn.outputs()
    drawn.change(1, size=10)
    after = drawn.outputs()
    assert torch.equal(after[[0, 2]], before[[0, 2]])
    assert not torch.equal(after[1], before[1])


@every_state
def test_a_state_is_a_value(case):
    """It can be kept, forked and continued twice; rows are picked from it; a call leaves it as it was."""
    _, state = case.draw(2, 6).run()
    kept, more = state.clone(), case.draw(3, 4, seed=1)
    forked = more.run(state.select(torch.tensor([1, 0, 1])))[0]
    alone = [more.rows(i).run(state.select(torch.tensor([row])))[0] for i, row in enumerate((1, 0, 1))]
    close(forked, torch.cat(alone))
    for name, x in state.tensors().items():
        assert torch.equal(x, kept.tensors()[name]), name
