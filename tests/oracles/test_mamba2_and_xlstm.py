"""Short convolution, grouped values and a denominator of at least one, as the functions of transformers compute them."""

import importlib

import pytest
import torch
from torch.nn.functional import logsigmoid, softplus

from tarnn import ConvolutionState, LinearState, linear_attention, short_convolution, short_convolution_step, step


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


@pytest.fixture(scope="module")
def models():
    """models(name): the module of a family, skipped where transformers lacks it."""
    pytest.importorskip("transformers")

    def find(name):
        return importlib.import_module(f"transformers.models.{name}.modeling_{name}")

    return find


def close(found, expected, rtol=2e-5):
    assert (found - expected).abs().max() <= rtol * expected.abs().max()


@pytest.mark.parametrize("family", ["mamba2", "lfm2", "qwen3_next"])
@pytest.mark.parametrize("activation", [None, "silu"])
def test_convolution(models, family, activation):
    """A prompt, with gradients, and five tokens more, into caches of transformers."""
    module = models(family)
    x, weight, bias = torch.randn(2, 24, 10), torch.randn(10, 4), torch.randn(10)
    inputs = [y.requires_grad_() for y in (x, weight, bias)]
    expected = module.causal_conv1d_fn(x.mT, weight, bias, activation).mT
    o = short_convolution(x, weight, bias, activation=activation)
    close(o, expected)
    sent = torch.randn_like(o)
    for found, right in zip(*(torch.autograd.grad(y, inputs, sent) for y in (o, expected))):
        close(found, right)
    x, weight, bias = (y.detach() for y in inputs)
    cache = x[:, -4:].mT.contiguous()
    ours = ConvolutionState(cache.clone()[..., 1:].mT)  # a view whose channels lie apart
    for _ in range(5):
        token = torch.randn(2, 1, 10)
        expected = module.causal_conv1d_update(token.mT, cache, weight, bias, activation).mT
        o, _ = short_convolution_step(token, weight, bias, activation=activation, state=ours, inplace=True)
        close(o, expected)
        assert torch.equal(ours.tokens, cache[..., 1:].mT)


def test_scan_of_mamba2(models):
    """B and C of two groups, for eight heads: a prompt with its state and its gradients, and a token."""
    module = models("mamba2")
    b, t, h, p, n, groups = 2, 70, 8, 6, 5, 2
    x, dt, A = torch.randn(b, t, h, p), torch.randn(b, t, h), -torch.rand(h)
    B, C, D, bias = torch.randn(b, t, groups, n), torch.randn(b, t, groups, n), torch.randn(h), torch.randn(h)
    inputs = [y.requires_grad_() for y in (x, dt, A, B, C, D, bias)]
    expected, cache = module.mamba2_chunk_scan(
        x, dt, A, B, C, chunk_size=16, D=D, dt_bias=bias, dt_softplus=True, return_final_states=True
    )
    steps = softplus(dt + bias)
    q, k, v = C.transpose(1, 2), B.transpose(1, 2), (x * steps[..., None]).transpose(1, 2)
    decay = (A * steps).transpose(1, 2)
    o, state = linear_attention(q, k, v, "identity", causal=True, normalize=False, log_decay=decay, return_state=True)
    o = o.transpose(1, 2) + D[:, None] * x
    close(o, expected)
    close(state.S, cache.mT)
    sent = torch.randn_like(o)
    for found, right in zip(*(torch.autograd.grad(y, inputs, sent, retain_graph=True) for y in (o, expected))):
        close(found, right, 1e-4)
    q, k, v, decay = (y[:, :, -1:].detach() for y in (q, k, v, decay))
    found, state = step(q, k, v, "identity", state.map(torch.Tensor.detach), normalize=False, log_decay=decay)
    cache = cache.detach()
    spread = (dt.detach()[:, -1, :, None].expand(b, h, p), A.detach()[:, None, None].expand(h, p, n))
    right = module.mamba2_selective_state_update(
        cache, x.detach()[:, -1], *spread, B.detach()[:, -1], C.detach()[:, -1], D.detach()[:, None].expand(h, p),
        dt_bias=bias.detach()[:, None].expand(h, p), dt_softplus=True,
    )  # fmt: skip
    close(found[:, :, 0] + D.detach()[:, None] * x.detach()[:, -1], right)
    close(state.S, cache.mT)


@pytest.mark.parametrize("gates", [0.0, -12.0, 4.0])
def test_mlstm(models, gates):
    """Input gates that are small, so that one divides, and large; a state is handed on to single tokens."""
    module = models("xlstm")
    b, h, t, d, e = 2, 3, 64, 6, 4
    q, k, v = torch.randn(b, h, t, d), torch.randn(b, h, t, d), torch.randn(b, h, t, e)
    igate, fgate = torch.randn(b, h, t) + gates, 3 + torch.randn(b, h, t)
    inputs = [y.requires_grad_() for y in (q, k, v, igate, fgate)]
    expected, (c, n, m) = module.mlstm_chunkwise_native_autograd(
        *inputs, chunk_size=16, return_last_states=True, eps=0.0
    )
    o, state = linear_attention(
        q * d**-0.5, k, v, "identity", causal=True, normalize="at_least_one", log_decay=logsigmoid(fgate),
        key_log_weight=igate, return_state=True,
    )  # fmt: skip
    close(o, expected, 1e-4)
    in_units = (state.M - m.reshape(b, h)).exp()
    close(state.S * in_units[..., None, None], c.reshape(b, h, d, e), 1e-4)
    sent = torch.randn_like(o)
    pairs = zip(*(torch.autograd.grad(y, inputs, sent) for y in (o, expected)))
    for found, right in pairs:
        close(found, right, 1e-3)
    token = [y.detach()[:, :, -1] for y in inputs]
    right, _ = module.mlstm_recurrent_step_native(
        *token[:3], token[3][..., None], token[4][..., None], c.detach().reshape(b, h, d, e),
        n.detach().reshape(b, h, d), m.detach().reshape(b, h, 1), eps=0.0,
    )  # fmt: skip
    one = [y[:, :, None] for y in token]
    before = LinearState(state.S.detach(), state.z.detach(), state.M.detach())
    found, _ = step(
        one[0] * d**-0.5, one[1], one[2], "identity", before, normalize="at_least_one", log_decay=logsigmoid(one[4]),
        key_log_weight=one[3],
    )  # fmt: skip
    close(found[:, :, 0], right, 1e-4)
