"""Linformer is softmax attention to projected keys and values, and agrees with a package that computes it."""

import pytest
import torch

from experiments.rivals.linformer import SHARED, Linformer


@pytest.mark.parametrize("shared", SHARED)
@pytest.mark.parametrize("t", [9, 5])
@torch.no_grad()
def test_linformer_is_its_formula(shared, t):
    layer = Linformer(12, 3, causal=False, length=9, projected=4, shared=shared).double()
    x = torch.randn(2, t, 12, dtype=torch.float64)
    q, k, v = (f(x).unflatten(-1, (3, 4)) for f in (layer.q_proj, layer.k_proj, layer.v_proj))
    heads = []
    for h in range(3):
        E, F = (y[h if shared == "none" else 0, :, :t] for y in (layer.E, layer.F))
        weights = (q[:, :, h] @ (E @ k[:, :, h]).mT / 2).softmax(-1)
        heads.append(weights @ (F @ v[:, :, h]))
    torch.testing.assert_close(layer(x), layer.o_proj(torch.cat(heads, -1)))
    assert (layer.E is layer.F) == (shared == "keys and values")


def test_what_linformer_refuses():
    with pytest.raises(ValueError, match="Linformer is defined for encoders"):
        Linformer(12, 3, causal=True, length=9)
    with pytest.raises(ValueError, match="shared must be one of 'none', 'heads', 'keys and values'; got 'layers'"):
        Linformer(12, 3, causal=False, length=9, shared="layers")
    with pytest.raises(ValueError, match=r"made for up to 9 tokens; got 10\. Pass length=10 or more"):
        Linformer(12, 3, causal=False, length=9)(torch.randn(1, 10, 12))


@pytest.mark.parametrize("share_kv", [False, True])
@torch.no_grad()
def test_linformer_agrees_with_the_package(share_kv):
    package = pytest.importorskip("linformer")
    theirs = package.linformer.LinformerSelfAttention(12, 9, k=4, heads=3, share_kv=share_kv).double()
    ours = Linformer(
        12, 3, causal=False, length=9, projected=4, shared="keys and values" if share_kv else "heads"
    ).double()
    pairs = [
        (ours.q_proj, theirs.to_q),
        (ours.k_proj, theirs.to_k),
        (ours.v_proj, theirs.to_k if share_kv else theirs.to_v),
    ]
    for our, their in pairs:
        our.weight.copy_(their.weight)
    ours.o_proj = theirs.to_out
    ours.E.copy_(theirs.proj_k.T)
    ours.F.copy_((theirs.proj_k if share_kv else theirs.proj_v).T)
    x = torch.randn(2, 9, 12, dtype=torch.float64)
    torch.testing.assert_close(ours(x), theirs(x))
