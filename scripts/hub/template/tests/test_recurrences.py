"""Each function against its definition: an error is at most twice the definition's in the same type, both against float64."""

import pytest
import tarnn_recurrences as ours
import torch
from definitions import convolution, delta, scan

LENGTHS = (1, 7, 65, 300)
ROUNDING = {
    torch.float32: 1e-6,
    torch.bfloat16: 1e-2,
    torch.float16: 1e-3,
}  # an error that nobody has to be better than


def drawn(t):
    """name → (our function, the definition, inputs); each function takes inputs and returns o and the last state."""
    torch.manual_seed(t)
    b, h, d, e, c, n = 2, 3, 8, 5, 11, 4
    q, k = torch.randn(2, b, h, t, d)
    v, beta, decay = torch.randn(b, h, t, e), torch.rand(b, h, t), -torch.rand(b, h, t)
    x, filters, fade = torch.randn(b, t, c), torch.randn(c, 4) / 2, -torch.rand(b, t, c)
    dt, A, (B, C) = torch.rand(b, t, c) / 2, -torch.rand(c, n), torch.randn(2, b, t, n)

    def delta_rule(q, k, v, beta, decay):
        o, state = ours.delta_rule(q, k, v, beta, log_decay=decay, normalize_qk=True, scale=1.0, return_state=True)
        return o, state.S

    def short_convolution(x, filters):
        o, state = ours.short_convolution(x, filters, activation="silu", return_state=True)
        return o, state.tokens

    def diagonal_scan(x, fade):
        o, state = ours.diagonal_scan(x, fade, return_state=True)
        return o, state.h

    def selective_scan(x, dt, A, B, C):
        o, state = ours.selective_scan(x, dt, A, B, C, return_state=True)
        return o, state.h

    return {
        "delta": (
            delta_rule,
            lambda *x: delta.recurrent(*x[:4], log_decay=x[4], norm_eps=1e-6, scale=1.0),
            (q, k, v, beta, decay),
        ),
        "convolution": (short_convolution, lambda *x: convolution.convolution(*x, activation="silu"), (x, filters)),
        "diagonal": (diagonal_scan, scan.diagonal_scan, (x, fade)),
        "selective": (selective_scan, scan.selective_scan, (x, dt, A, B, C)),
    }


NAMES = list(drawn(1))
IN_SIXTEEN_BITS = {
    "delta": 3,
    "convolution": 1,
    "diagonal": 1,
    "selective": 1,
}  # the first inputs, that come in 16 bits


def computed(function, inputs, weights):
    """Outputs and gradients, in float64."""
    inputs = [x.detach().clone().requires_grad_() for x in inputs]
    outputs = function(*inputs)
    loss = sum((y.double() * w.double()).sum() for y, w in zip(outputs, weights))
    return [x.detach().double() for x in (*outputs, *torch.autograd.grad(loss, inputs))]


@pytest.mark.kernels_ci
@pytest.mark.parametrize("t", LENGTHS)
@pytest.mark.parametrize("dtype", ROUNDING, ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_forward_and_backward(name, dtype, t):
    ours, definition, inputs = drawn(t)[name]
    count = IN_SIXTEEN_BITS[name]
    inputs = [x.to(dtype) if i < count else x for i, x in enumerate(inputs)]
    weights = [torch.randn_like(y) for y in definition(*(x.double() for x in inputs))]
    exact = computed(definition, [x.double() for x in inputs], weights)
    same_type = computed(definition, inputs, weights) if dtype == torch.float32 else exact
    for result, plain, expected in zip(computed(ours, inputs, weights), same_type, exact):
        scale = expected.abs().max().clamp(min=1.0)
        allowed = 2 * (plain - expected).abs().max() + 4 * ROUNDING[dtype] * scale
        assert (result - expected).abs().max() <= allowed


@pytest.mark.kernels_ci
def test_a_step_continues_a_sequence():
    q, k, v, beta, decay = drawn(9)["delta"][2]
    whole = ours.delta_rule(q, k, v, beta, log_decay=decay, normalize_qk=True)
    head = [x[:, :, :8] for x in (q, k, v, beta)]
    _, state = ours.delta_rule(*head, log_decay=decay[:, :, :8], normalize_qk=True, return_state=True)
    last = [x[:, :, 8:] for x in (q, k, v, beta)]
    o, _ = ours.delta_step(*last, log_decay=decay[:, :, 8:], normalize_qk=True, state=state)
    torch.testing.assert_close(o, whole[:, :, 8:])


@pytest.mark.kernels_ci
def test_what_does_not_fit_is_refused():
    q, k, v, beta, _ = drawn(7)["delta"][2]
    with pytest.raises(ValueError, match="must share b and t"):
        ours.delta_rule(q, k, v[:, :, :3], beta)
    with pytest.raises(ValueError, match="float32, bfloat16 and float16"):
        ours.delta_rule(q.double(), k.double(), v.double(), beta.double())
