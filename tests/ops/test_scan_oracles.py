"""Scans against the functions that transformers' models call, which have no state to begin with: that is shown, too."""

import importlib

import pytest
import torch
from support.scans import draw
from torch.nn.functional import silu, softplus

from tarnn import ScanState, diagonal_scan, selective_scan, selective_scan_step
from tarnn.huggingface.versions import as_called, cache_of

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.one_path


def modeling(family):
    return importlib.import_module(f"transformers.models.{family}.modeling_{family}")


def close(found, expected):
    torch.testing.assert_close(found, expected, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("family", ["mamba", "falcon_mamba", "jamba", "zamba"])
def test_mamba_as_transformers_computes_it(family):
    """Its scan takes (b, c, t) and makes dt and the gate itself; here they are the caller's."""
    module = modeling(family)
    scan = draw("selective", 2, 37, 19, 16).map(lambda x: x.float())
    x, raw, A, B, C, D = scan.tensors.values()
    bias, z = torch.randn(19), torch.randn(2, 37, 19)
    expected, end = module.mamba_selective_scan(
        x.mT, raw.mT, A, B.mT, C.mT, D=D, z=z.mT, delta_bias=bias, delta_softplus=True, return_last_state=True
    )
    o, state = selective_scan(x, softplus(raw + bias), A, B, C, D, return_state=True)
    close((o * silu(z)).mT, expected)
    close(state.h, end)
    token = [tensor[:, 0] for tensor in (x, raw, B, C, z)]
    updated = end.clone()
    expected = module.mamba_selective_state_update(
        updated, token[0], token[1], A, token[2], token[3], D, z=token[4], dt_bias=bias, dt_softplus=True
    )
    o, state = selective_scan_step(
        x[:, :1], softplus(raw[:, :1] + bias), A, B[:, :1], C[:, :1], D, state=ScanState(end)
    )
    close(o[:, 0] * silu(token[4]), expected)
    close(state.h, updated)


def test_gradients_are_those_of_transformers():
    scan = draw("selective", 2, 21, 5, 4).map(lambda x: x.float())
    ours, theirs = scan.leaves(), scan.leaves()
    x, dt, A, B, C, D = theirs.tensors.values()
    expected = modeling("mamba").mamba_selective_scan(x.mT, dt.mT, A, B.mT, C.mT, D=D).mT
    sent = torch.randn(expected.shape)
    right = theirs.gradients((expected,), [sent])
    for name, gradient in ours.gradients((ours.ours()[0],), [sent]).items():
        close(gradient, right[name])


def test_rg_lru_as_transformers_computes_it():
    """Its loop over tokens, with resets: there the decay is −∞."""
    loop = modeling("recurrent_gemma").RecurrentGemmaRglru._rnn_scan
    x, log_decay, h = torch.randn(2, 33, 19), -torch.rand(2, 33, 19), torch.randn(2, 19)
    reset = torch.rand(2, 33, 1) > 0.8
    expected, end = loop(None, x, log_decay.exp(), reset, h)
    o, state = diagonal_scan(x, log_decay.masked_fill(reset, -torch.inf), state=ScanState(h), return_state=True)
    close(o, expected)
    close(state.h, end)


def test_a_continued_mamba_of_transformers_forgets_its_state():
    """Several tokens after a cache begin at zero in transformers' scan; ours goes on. (One token is right in both.)"""
    torch.manual_seed(0)
    config = transformers.MambaConfig(vocab_size=31, hidden_size=16, state_size=8, num_hidden_layers=2)
    model = transformers.MambaForCausalLM(config).eval()
    ids = torch.randint(31, (1, 24))
    with torch.no_grad():
        for layer in model.backbone.layers:  # or what a state says would drown
            layer.mixer.x_proj.weight.normal_()
        whole = model(ids).logits

        def continued(at):
            cache = cache_of(model(ids[:, :-at], use_cache=True))
            return model(ids[:, -at:], **as_called(model.forward, cache), use_cache=True).logits

        close(continued(1), whole[:, -1:])
        assert (continued(6) - whole[:, -6:]).abs().max() > 0.01

    scan = draw("selective", 1, 24, 8, 4)
    whole, _ = scan.ours()
    _, h = scan.part(None, -6).ours()
    torch.testing.assert_close(scan.part(-6, None, h).ours()[0], whole[:, -6:])
