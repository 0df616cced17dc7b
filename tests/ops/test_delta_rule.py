"""The laws of the delta rule: whatever the path, it is the definition; and the traps of its numbers."""

import pytest
import torch
from support.attention_cases import relative_error
from support.delta_calls import DECAYS, HEADS, inputs
from support.drawn_calls import excess
from torch import Tensor

from tarnn import DeltaState, delta_rule, delta_step
from tarnn.ops.delta.definition import normalized, quadratic, recurrent


def definition(given: dict[str, Tensor], state: Tensor | None = None, norm_eps: float | None = 1e-6):
    given = {name: x.double() for name, x in given.items()}
    return recurrent(**given, scale=given["q"].shape[3] ** -0.5, norm_eps=norm_eps, state=state)


@pytest.mark.parametrize("block", range(0, 40, 20))
def test_drawn_calls(block):
    """`python tests/fuzz.py delta` draws thousands."""
    assert [number for number in range(block, block + 20) if excess("delta", number) > 1] == []


@pytest.mark.one_path
@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("decay", DECAYS)
def test_both_forms_of_the_definition_are_the_formula(heads, decay):
    """S_t = (I − β k kᵀ) e^g S + β k vᵀ, as it is written, matrix by matrix."""
    given, mask = inputs(heads, decay, b=1), torch.tensor([[True, True, False, True, True, False, True, True, True]])
    o, S = recurrent(**given, scale=0.3, norm_eps=0.1, key_mask=mask)
    torch.testing.assert_close(quadratic(**given, scale=0.3, norm_eps=0.1, key_mask=mask), o)
    h, g, m = HEADS[heads]
    n, heads = max(g, m), max(h, m)
    q, k = normalized(given["q"], 0.1), normalized(given["k"], 0.1)
    for j in range(heads):
        state, one = torch.zeros(5, 3).double(), j * n // heads
        for i in range(9):
            key, fade = k[0, one * g // n, i], torch.ones(5).double()
            if decay != "none":
                x = given["log_decay"]
                fade = fade * (x[one] if x.ndim == 1 else x[0, one, i]).exp()
            beta = given["beta"][0, one, i]
            if mask[0, i]:
                erase = torch.eye(5).double() - beta * key.outer(key)
                state = erase @ torch.diag(fade) @ state + beta * key.outer(given["v"][0, one * m // n, i])
            torch.testing.assert_close(o[0, j, i], 0.3 * state.T @ q[0, j * h // heads, i])
        torch.testing.assert_close(S[0, one], state)


@pytest.mark.thorough
@pytest.mark.one_path
def test_every_entry_of_the_gradients():
    """In slow mode, of two packed sequences with a state each; as they are, without normalising."""
    given, cuts = inputs("values in groups", "channel", b=1, t=5, d=2, e=2), torch.tensor([0, 3, 5])
    given["k"] *= 0.3

    def f(state: Tensor, *tensors: Tensor):
        more = {"cu_seqlens": cuts, "state": DeltaState(state), "return_state": True}
        o, behind = delta_rule(**dict(zip(given, tensors)), **more)
        return o, behind.S

    assert torch.autograd.gradcheck(
        f, [x.requires_grad_() for x in (torch.randn(2, 4, 2, 2).double(), *given.values())]
    )


# --- traps


def gradients(given: dict[str, Tensor], op) -> list[Tensor]:
    tensors = {name: x.detach().requires_grad_() for name, x in given.items()}
    return torch.autograd.grad(op(tensors).float().square().sum(), list(tensors.values()))


def check(given: dict[str, Tensor], tolerance: float = 2e-6) -> None:
    """Output and gradients in float32 are those of the definition, by their largest entry."""
    normalizing = lambda x: delta_rule(**x, normalize_qk=True)  # noqa: E731
    assert relative_error(normalizing(given), definition(given)[0]) < tolerance
    exact = gradients({name: x.double() for name, x in given.items()}, lambda x: definition(x)[0])
    top = max(x.abs().max().item() for x in exact)
    for x, y in zip(gradients(given, normalizing), exact):
        assert (x - y).abs().max().item() < 5 * tolerance * top


@pytest.mark.parametrize("decay", ["token", "channel"])
@pytest.mark.parametrize("g", [-1.0, -5.0, -90.0, -1e6])
def test_steep_decays_overflow_nowhere(g, decay):
    """e^{−G} would be e^160 after 32 tokens of −5."""
    given = inputs(decay=decay, t=130, dtype=torch.float32)
    given["log_decay"] = given["log_decay"] + g
    check(given)


@pytest.mark.parametrize("decay", ["token", "channel"])
def test_a_reset_is_the_start_of_a_sequence(decay):
    """log_decay = −∞ forgets all, and costs what comes after it no digits."""
    given = inputs(decay=decay, t=100)
    given["log_decay"][:, :, 40] = -torch.inf
    rest = {name: x[:, :, 40:] for name, x in given.items()}
    assert (
        relative_error(delta_rule(**given, normalize_qk=True)[:, :, 40:], delta_rule(**rest, normalize_qk=True)) < 1e-13
    )
    check({name: x.float() for name, x in given.items()})


@pytest.mark.parametrize("beta", [0.5, 1.0, 1.9])
@pytest.mark.parametrize("decay", ["none", "token", "channel"])
def test_keys_that_are_equal_cost_no_digits(beta, decay):
    """The inverse of a chunk's system as a product of powers would be off by 10⁹."""
    given = inputs(decay=decay, t=150, d=16, dtype=torch.float32)
    given["k"] = given["k"][:, :, :1].expand(2, 2, 150, 16).clone()
    given["beta"].fill_(beta)
    check(given, 2e-6 / (2 - beta))  # so many tokens' errors add up


def test_a_key_that_is_reflected_for_ever_loses_digits_as_slowly_as_it_repeats():
    """β = 2 and equal keys keep every rounding error: they add up, and nothing grows."""
    given = inputs(decay="none", t=400, d=16, dtype=torch.float32)
    given["k"] = given["k"][:, :, :1].expand(2, 2, 400, 16).clone()
    given["beta"].fill_(2.0)
    check(given, 400 * 2e-7)


def test_keys_of_zeros_write_nothing():
    given = inputs(decay="none", t=70)
    given["k"][:, :, 20:] = 0
    _, at_20 = delta_rule(**{name: x[:, :, :20] for name, x in given.items()}, normalize_qk=True, return_state=True)
    _, behind = delta_rule(**given, normalize_qk=True, return_state=True)
    assert relative_error(behind.S, at_20.S) < 1e-15
    check({name: x.float() for name, x in given.items()})


def test_beta_replaces_and_reflects():
    """β = 1: Sᵀk is v afterwards. β = 2: what S answered to k is as far beyond v as it was before it. β = 0: nothing."""
    given = inputs(decay="none", t=1)
    key, before = normalized(given["k"], None), torch.randn(2, 2, 5, 3).double()
    key = key / key.norm(dim=-1, keepdim=True)
    answer = lambda S: key @ S  # noqa: E731
    for beta, expected in ((0.0, answer(before)), (1.0, given["v"]), (2.0, 2 * given["v"] - answer(before))):
        x = given | {"k": key, "beta": torch.full((2, 2, 1), beta).double()}
        _, state = delta_rule(**x, state=DeltaState(before), return_state=True)
        torch.testing.assert_close(answer(state.S), expected)


@pytest.mark.parametrize("junk", [torch.nan, 7.0])  # which would be refused elsewhere
@pytest.mark.parametrize("decay", DECAYS)
def test_no_time_passes_at_masked_tokens(decay, junk):
    """On either side and in between: the state is that of the tokens that are left, whatever stands at the others."""
    given, real = inputs(decay=decay, t=90), torch.rand(90) > 0.3
    real[:5] = real[-5:] = False
    _, expected = delta_rule(
        **{n: x if x.ndim == 1 else x[:, :, real] for n, x in given.items()}, normalize_qk=True, return_state=True
    )
    for name in ("k", "v", "beta", *(["log_decay"] if decay in ("token", "channel") else [])):
        given[name][:, :, ~real] = torch.nan if name in "kv" else junk
    o, state = delta_rule(**given, normalize_qk=True, key_mask=real.expand(2, 90), return_state=True)
    assert relative_error(state.S, expected.S) < 1e-12
    assert o.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("heads", ["values in groups", "queries in groups"])
@pytest.mark.parametrize("decay", DECAYS)
def test_a_prompt_in_pieces_has_the_bits_of_the_whole(heads, decay, dtype):
    """Cut at multiples of 64: outputs and states, and with gradients too."""
    given, wide = inputs(heads, decay, t=300, d=16, e=20, dtype=dtype), torch.float32
    given |= {name: given[name].to(wide).clamp(max=2.0) for name in ("beta", "log_decay") if name in given}
    mask = torch.rand(2, 300) > 0.1
    for requires_grad in (False, True):
        given["v"].requires_grad_(requires_grad)
        whole, end = delta_rule(**given, normalize_qk=True, key_mask=mask, return_state=True)
        state, pieces, cuts = None, [], [0, 64, 192, 256, 300]
        for start, stop in zip(cuts, cuts[1:]):
            part = {name: x if x.ndim == 1 else x[:, :, start:stop] for name, x in given.items()}
            o, state = delta_rule(
                **part, normalize_qk=True, key_mask=mask[:, start:stop], state=state, return_state=True
            )
            pieces.append(o)
        assert torch.equal(torch.cat(pieces, 2), whole)
        assert torch.equal(state.S, end.S)
        assert state.S.dtype == wide


@pytest.mark.parametrize("decay", DECAYS)
def test_what_is_not_finite_shows_where_it_is_used_and_nowhere_else(decay):
    """In a query in its own output; in a key, value, β or decay in all of its head from there on. Before it, no bit changes."""
    given = inputs("values in groups", decay, t=75, dtype=torch.float32)
    before = delta_rule(**given, normalize_qk=True)
    assert before.isfinite().all()
    for name in ("q", "k", "v", "beta", *(["log_decay"] if decay in ("token", "channel") else [])):
        for junk in (torch.nan, torch.inf, -torch.inf) if name in "kv" else (torch.nan,):
            for place in (9, 66):
                x = given[name].clone()
                x[(1, 1, place, 2)[: x.ndim]] = junk
                o = delta_rule(**given | {name: x}, normalize_qk=True)
                touched = torch.zeros(before.shape[:3], dtype=torch.bool)
                states = slice(2, 4) if name in "qk" else slice(1, 2)  # states 2 and 3 have key head 1
                touched[1, states, slice(place, place + 1) if name == "q" else slice(place, None)] = True
                assert torch.equal(o[~touched], before[~touched]), (name, junk, place)
                if junk != junk:
                    assert o[touched].isnan().any(-1).all(), (name, place)


# --- memory and steps


def test_backward_keeps_what_was_given_and_few_states():
    """q, k, v, β and log-decay themselves, and one state in 256 tokens."""
    given = {name: x.requires_grad_() for name, x in inputs(b=1, t=1024, d=8, e=8, dtype=torch.float32).items()}
    saved: dict[int, int] = {}

    def pack(x: Tensor) -> Tensor:
        saved[x.data_ptr()] = x.nbytes
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        o = delta_rule(**given, normalize_qk=True)
    states = sum(saved.values()) - sum(x.nbytes for x in given.values())
    assert 0 < states <= 1024 // 256 * 2 * 8 * 8 * 4
    unpacked: list[int] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: unpacked.append(x.data_ptr()) or x):
        o = delta_rule(**given, normalize_qk=True)
    o.sum().backward()
    assert len(unpacked) == len(set(unpacked)) > 0


def test_a_step_into_a_state_that_is_not_contiguous():
    given = inputs(decay="token", t=1)
    S = torch.randn(2, 2, 3, 5).double().mT
    expected, behind = delta_step(**given, state=DeltaState(S.clone()))
    o, state = delta_step(**given, state=DeltaState(S), inplace=True)
    torch.testing.assert_close(o, expected)
    torch.testing.assert_close(S, behind.S)
    assert state.S is S
