"""`torch.set_default_device` decides where a caller's new tensors lie: what ops compute lies where their inputs do."""

import contextlib

import pytest
import torch

from tarnn import ops
from tarnn.feature_maps import make, names
from tarnn.ops.delta import definition as delta_definition
from tarnn.ops.linear import definition as linear_definition
from tarnn.ops.softmax import definition as softmax_definition


def tensors(t=30, d=8):
    torch.manual_seed(0)
    return {name: torch.randn(2, 2, t, d) for name in "qkv"}


MAPS = sorted(set(names()) - {"cosformer"})
SIGNED = {"identity", "trigonometric", "gaussian", "generalized_gelu"}
MASK = torch.rand(2, 30, generator=torch.Generator().manual_seed(0)) > 0.3
DECAY = torch.full((2, 2, 30), -0.1)


def linear(name):
    phi = make(name, head_dim=8, num_heads=2)

    def attend(q, k, v):
        o, state = ops.linear_attention(
            q, k, v, phi, causal=True, normalize=name not in SIGNED, key_mask=MASK, return_state=True
        )
        one = [x[:, :, :1] for x in (q, k, v)]
        return o, ops.step(*one, phi, state, normalize=name not in SIGNED)[0]

    return attend


def hybrid(causal, watched, **options):
    phi = make("favor", head_dim=8, num_heads=2)

    def attend(q, k, v):
        q, k, v = (x.clone().requires_grad_(watched) for x in (q, k, v))
        o = ops.hybrid_attention(q, k, v, phi, causal=causal, window=4, sinks=2, **options)
        if watched:
            return o.detach(), *torch.autograd.grad(o.sum(), (q, k, v))
        if not causal:
            return (o,)
        _, state = ops.hybrid_attention(q, k, v, phi, causal=True, window=4, sinks=2, return_state=True)
        one = [x[:, :, :1] for x in (q, k, v)]
        return o, ops.hybrid_step(*one, phi, state, window=4, sinks=2)[0]

    return attend


def delta(q, k, v):
    beta, masked = torch.full((2, 2, 30), 0.5, device="cpu"), {"key_mask": MASK, "log_decay": DECAY}
    q, k, v = (x.clone().requires_grad_() for x in (q, k, v))
    o, state = ops.delta_rule(q, k, v, beta, normalize_qk=True, return_state=True, **masked)
    gradients = torch.autograd.grad(o.sum(), (q, k, v))
    one = [x.detach()[:, :, :1] for x in (q, k, v, beta)]
    expected = delta_definition.quadratic(q, k, v, beta, scale=1.0, **masked).detach()
    return o.detach(), *gradients, ops.delta_step(*one, state=state.map(torch.Tensor.detach))[0], expected


def softmax(**options):
    return lambda q, k, v: ops.softmax_attention(q, k, v, return_weights=True, **options)[::2]


def packed(q, k, v):
    row, cuts = [x[:1] for x in (q, k, v)], torch.tensor([0, 7, 30], device="cpu")
    linear = ops.linear_attention(*row, causal=True, cu_seqlens=cuts)
    both = ops.hybrid_attention(*row, "favor", causal=False, window=4, cu_seqlens=cuts)
    return linear, both, ops.softmax_attention(*row, causal=True, cu_seqlens=cuts)


def definitions(q, k, v):
    quadratic = linear_definition.quadratic(q.exp(), k.exp(), v, causal=True, key_mask=MASK, log_decay=DECAY)
    return quadratic, softmax_definition.softmax(q, k, v, causal=True, key_mask=MASK)


CALLS = {
    **{name: linear(name) for name in MAPS},
    "hybrid": hybrid(True, False),
    "hybrid masked": hybrid(True, False, key_mask=MASK),
    "hybrid slots": hybrid(True, False, slots=3),
    "hybrid decay": hybrid(True, False, log_decay=DECAY),
    "hybrid exact": hybrid(True, False, exact_queries=torch.tensor([0])),
    "hybrid both sides": hybrid(False, False, key_mask=MASK),
    "hybrid gradients": hybrid(True, True),
    "delta": delta,
    "softmax": softmax(causal=True, key_mask=MASK),
    "packed": packed,
    "definitions": definitions,
}


@pytest.mark.parametrize("name", CALLS)
def test_a_default_device_moves_no_result(name, path):
    results = []
    for device in (contextlib.nullcontext(), torch.device("meta")):
        given = tensors()
        with device:
            results.append(CALLS[name](**given))
    for x, y in zip(*results):
        assert y.device == x.device
        assert torch.equal(x, y)
