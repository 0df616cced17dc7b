"""Decays per channel that fade channels in turns, and keys whose log-weights are far below an early one's."""

import pytest
import torch

from tarnn import LinearState, linear_attention, step
from tarnn.feature_maps import Elu, Exp
from tarnn.ops.linear import definition as linear_definition

T = 5


def drawn(device):
    """Of two channels one fades by e^−200 at the second token, the other at the third; the fourth key counts e^−150."""
    v = torch.arange(7.0, 7 + T, device=device)[None, None, :, None]
    w = torch.tensor([0.0, -300, -300, -150, -300], device=device)[None, None]
    decay = torch.zeros(1, 1, T, 2, device=device)
    decay[..., 1, 0] = decay[..., 2, 1] = -200
    return torch.zeros(1, 1, T, 2, device=device), v, w, decay


def steps(q, k, v, phi, key_log_weight, log_decay, state=None, **options):
    outputs = []
    for i in range(q.shape[2]):
        q_i, k_i, v_i, w, decay = (x[:, :, i : i + 1] for x in (q, k, v, key_log_weight, log_decay))
        o, state = step(q_i, k_i, v_i, phi, state, key_log_weight=w, log_decay=decay, **options)
        outputs.append(o)
    return torch.cat(outputs, 2), state


def in_parts(q, k, v, phi, key_log_weight, log_decay):
    state, outputs = None, []
    for part in (slice(0, 2), slice(2, 3), slice(3, 5)):
        q_i, k_i, v_i, w, decay = (x[:, :, part] for x in (q, k, v, key_log_weight, log_decay))
        options = {"causal": True, "key_log_weight": w, "log_decay": decay, "state": state, "return_state": True}
        o, state = linear_attention(q_i, k_i, v_i, phi, **options)
        outputs.append(o)
    return torch.cat(outputs, 2), state


def whole(q, k, v, phi, key_log_weight, log_decay):
    options = {"causal": True, "key_log_weight": key_log_weight, "log_decay": log_decay, "return_state": True}
    return linear_attention(q, k, v, phi, **options)


def in_place(q, k, v, phi, key_log_weight, log_decay):
    state = LinearState.zeros(1, 1, 2, 1, log_features=True, device=q.device)
    return steps(q, k, v, phi, key_log_weight, log_decay, state, inplace=True)


@pytest.mark.parametrize("way", [whole, in_parts, steps, in_place])
def test_a_late_key_counts_though_an_early_one_was_heavier(way, device):
    k, v, w, decay = drawn(device)
    expected = linear_definition.quadratic(
        k.double() + 1, k.double() + 1, v.double(), causal=True, key_log_weight=w.double(), log_decay=decay.double()
    )
    o, _ = way(k, k, v, Elu(), w, decay)
    torch.testing.assert_close(o.double(), expected, rtol=1e-5, atol=1e-5)


def from_zeros(q, k, v, phi, key_log_weight, log_decay):
    state = LinearState.zeros(1, 1, 2, 1, log_features=True, device=q.device)
    return linear_attention(q, k, v, phi, causal=True, log_decay=log_decay, state=state, return_state=True)


def from_nothing(q, k, v, phi, key_log_weight, log_decay):
    return linear_attention(q, k, v, phi, causal=True, log_decay=log_decay, return_state=True)


one_maximum = pytest.mark.xfail(reason="exponential features have one maximum per head", raises=AssertionError)


@pytest.mark.parametrize("way", [from_zeros, in_place, pytest.param(from_nothing, marks=one_maximum)])
def test_so_do_exponential_features_where_the_state_has_a_maximum_for_each(way, device):
    """Whose scales are log-weights, too."""
    _, v, w, decay = drawn(device)
    k = w[..., None].expand(1, 1, T, 2)
    expected = linear_definition.quadratic(
        torch.ones_like(k).double(), k.double().exp(), v.double(), causal=True, log_decay=decay.double()
    )
    o, _ = way(torch.zeros_like(k), k, v, Exp(), torch.zeros_like(w), decay)
    torch.testing.assert_close(o.double(), expected, rtol=1e-5, atol=1e-5)
