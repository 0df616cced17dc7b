"""The recurrence, one token at a time: it is the parallel form, and its state is a value."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from support.attention_cases import Case, cases, relative_error

from tarnn import feature_maps
from tarnn.ops import (
    DeltaState,
    LinearState,
    hybrid_attention,
    hybrid_step,
    linear_attention,
    low_rank_delta_step,
    step,
)

MAPS = {m.kernel: m for m in (feature_maps.Elu(), feature_maps.Relu(), feature_maps.SquaredRelu(), feature_maps.Exp())}


def run(case: Case, state=None, *, inplace=False):
    """Steps through the whole case; the outputs and the last state."""
    outputs = []
    for i in range(case.t):
        options = {n: x if x.ndim == 1 else x[:, :, i : i + 1] for n, x in case.options.items()}
        q, k, v = (x[:, :, i : i + 1] for x in (case.q, case.k, case.v))
        o, state = step(q, k, v, MAPS[case.feature_map], state, normalize=case.normalize, inplace=inplace, **options)
        outputs.append(o)
    return torch.cat(outputs, dim=2), state


@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(case=cases(causal=True, masked=False))
def test_steps_equal_the_definition_and_the_parallel_state(case):
    if not case.t:
        return
    o, state = run(case)
    assert relative_error(o, case.definition()) < 1e-11
    _, expected = linear_attention(
        case.q,
        case.k,
        case.v,
        MAPS[case.feature_map],
        causal=True,
        normalize=case.normalize,
        return_state=True,
        **case.options,
    )
    assert (state.M is None) == (expected.M is None)
    for name, x in state.tensors().items():
        assert relative_error(x, expected.tensors()[name]) < 1e-10


def test_in_place_needs_room_for_log_weights():
    case, state = Case(b=1, g=1, r=1, t=1, weighted=True), LinearState.zeros(1, 1, 5, 3, dtype=torch.float64)
    with pytest.raises(ValueError, match=r"without M has no room.*log_weights=True"):
        run(case, state, inplace=True)


def test_a_step_in_place_is_seen_by_autograd():
    """A state that backward still needs may not be written to unnoticed."""
    case = Case(b=1, g=2, r=1, t=4, weighted=True)
    _, state = run(case)
    q = case.q.clone().requires_grad_()
    o = linear_attention(q, case.k, case.v, causal=True, state=state)
    with torch.no_grad():
        run(Case(b=1, g=2, r=1, t=1, weighted=True), state, inplace=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        o.sum().backward()


@pytest.mark.parametrize("weighted", [False, True])
def test_a_step_in_place_moves_on_the_version_of_all_that_it_writes(weighted):
    state = LinearState.zeros(1, 2, 5, 3, log_weights=weighted, dtype=torch.float64)
    before = [x._version for x in state.tensors().values()]
    run(Case(b=1, g=2, r=1, t=1, weighted=weighted), state, inplace=True)
    assert all(x._version > old for x, old in zip(state.tensors().values(), before))
    with torch.inference_mode():  # whose tensors have no versions
        run(Case(b=1, g=2, r=1, t=1), LinearState.zeros(1, 2, 5, 3, dtype=torch.float64), inplace=True)


@pytest.mark.parametrize("channels", [(), (4,)])
def test_a_batch_of_no_rows_takes_a_step(channels):
    q, decay = torch.zeros(0, 2, 1, 4), torch.zeros(0, 2, 1, *channels)
    assert step(q, q, q, log_decay=decay)[0].shape == q.shape
    state = DeltaState.zeros(0, 2, 4, 4)
    assert low_rank_delta_step(q, q, q, q, q, log_decay=decay, state=state)[0].shape == q.shape


@pytest.mark.parametrize(("rows", "width"), [(0, 4), (2, 0)])
@pytest.mark.parametrize("feature_map", [None, "elu", "favor"])
def test_hybrid_attention_of_no_rows_or_of_values_of_no_width(rows, width, feature_map):
    q, v = torch.zeros(rows, 2, 5, 4), torch.zeros(rows, 2, 5, width)
    options = {"window": 2, "slots": 0 if feature_map is None else 1}
    o, state = hybrid_attention(q, q, v, feature_map, causal=True, return_state=True, **options)
    assert o.shape == v.shape
    one, v = q[:, :, :1], v[:, :, :1]
    assert hybrid_step(one, one, v, feature_map, state, **options)[0].shape == v.shape
