"""The baseline: it is softmax attention, and its cache is honest."""

import mmap
from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, given, settings, strategies as st
from support.attention_cases import relative_error

from tarnn.ops import KVCache, softmax_attention, softmax_step
from tarnn.ops.softmax import definition as softmax_definition

pytestmark = pytest.mark.one_path


def drawn(seed, b=2, g=2, r=2, t=7, s=7, d=5, e=3):
    generator = torch.Generator(torch.get_default_device()).manual_seed(seed)
    rand = lambda *shape: torch.randn(*shape, generator=generator, dtype=torch.float64)  # noqa: E731
    return rand(b, g * r, t, d), rand(b, g, s, d), rand(b, g, s, e), rand(b, s) > -0.3, rand(b, g, s)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    causal=st.booleans(),
    masked=st.booleans(),
    weighted=st.booleans(),
    r=st.integers(1, 3),
    t=st.sampled_from([0, 1, 2, 7, 13]),
    seed=st.integers(0, 2**31),
)
def test_equals_the_definition(causal, masked, weighted, r, t, seed):
    q, k, v, mask, w = drawn(seed, r=r, t=t, s=t)
    options = {"key_mask": mask if masked else None, "key_log_weight": w if weighted else None}
    got = softmax_attention(q, k, v, causal=causal, **options)
    assert relative_error(got, softmax_definition.softmax(q, k, v, causal=causal, **options)) < 1e-12


def test_queries_that_see_no_key_yield_zeros_and_finite_gradients():
    q, k, v, mask, _ = drawn(0)
    mask[:] = True
    mask[0, :3] = False
    q.requires_grad_()
    o = softmax_attention(q, k, v, causal=True, key_mask=mask)
    assert (o[0, :, :3] == 0).all()
    assert torch.autograd.grad(o.sum(), q)[0].isfinite().all()


@pytest.mark.parametrize("masked", [False, True])
def test_a_cache_filled_in_any_steps_is_the_whole(masked):
    q, k, v, mask, _ = drawn(1)
    mask[:, -1] = True
    mask = mask if masked else None
    whole = softmax_definition.softmax(q, k, v, causal=True, key_mask=mask)
    cache, outputs = KVCache.empty(2, 2, 9, 5, 3, dtype=torch.float64), []
    for a, b in ((0, 3), (3, 4), (4, 6)):
        part = (x[:, :, a:b] for x in (q, k, v))
        o, cache = softmax_attention(
            *part, causal=True, key_mask=None if mask is None else mask[:, a:b], state=cache, return_state=True
        )
        outputs.append(o)
    o, cache = softmax_step(q[:, :, 6:], k[:, :, 6:], v[:, :, 6:], cache)
    assert relative_error(torch.cat([*outputs, o], dim=2), whole) < 1e-12
    assert cache.length == 7
    assert cache.nbytes == 8 * 2 * 2 * 9 * (5 + 3) + masked * 2 * 9
    assert sum(x.nbytes for x in cache.tensors().values()) == 8 * 2 * 2 * 7 * (5 + 3) + masked * 2 * 7


def test_a_cache_in_place_keeps_its_memory_and_says_when_it_is_full():
    q, k, v, _, _ = drawn(2)
    cache = KVCache.empty(2, 2, 7, 5, 3, dtype=torch.float64)
    address = cache.k.data_ptr()
    _, cache = softmax_attention(q, k, v, causal=True, state=cache, return_state=True, inplace=True)
    assert cache.k.data_ptr() == address
    assert torch.equal(cache.k, k)
    with pytest.raises(ValueError, match=r"holds 7 positions, 7 are taken and 1 more.*larger capacity"):
        softmax_step(q[:, :, :1], k[:, :, :1], v[:, :, :1], cache)
    picked = cache.select(torch.tensor([1]))
    assert torch.equal(picked.k, cache.k[1:])
    assert picked.length == 7


@pytest.mark.refusals
def test_a_cache_refuses_what_does_not_fit_and_stays_as_it_was():
    q, k, v, _, _ = drawn(4, b=1)
    cache = KVCache.empty(2, 2, 9, 5, 3, dtype=torch.float64)
    with pytest.raises(ValueError, match=r"takes keys \(2, 2, t, 5\) and values \(2, 2, t, 3\); got \(1, 2, 1, 5\)"):
        softmax_step(q[:, :, :1], k[:, :, :1], v[:, :, :1], cache)
    with pytest.raises(ValueError, match=r"one token.*\(1, 4, 2, 5\)"):
        softmax_step(q[:, :, :2], k[:, :, :2], v[:, :, :2], cache)
    with pytest.raises(TypeError, match=r"holds torch.float64; got torch.float32"):
        cache.append(k.float().expand(2, -1, -1, -1), v.float().expand(2, -1, -1, -1))
    assert cache.length == 0
    assert not cache.k.any()


def test_a_cache_in_bfloat16_is_one_of_rounded_keys_and_values():
    q, k, v, _, _ = (x.float() for x in drawn(5))
    kept = KVCache.empty(2, 2, 9, 5, 3, dtype=torch.bfloat16)
    o, kept = softmax_attention(q, k, v, causal=True, state=kept, return_state=True)
    rounded = [x.bfloat16().float() for x in (k, v)]
    assert torch.equal(o, softmax_attention(q, *rounded, causal=True))
    assert kept.nbytes == 2 * 2 * 2 * 9 * (5 + 3)
    whole = KVCache(*rounded, 7).resized(9)
    last = [x[:, :, -1:] for x in (q, k, v)]
    o, kept = softmax_step(*last, kept)
    expected, whole = softmax_step(last[0], *(x[:, :, -1:] for x in rounded), whole)
    assert torch.equal(o, expected)
    assert torch.equal(kept.v.float(), whole.v)


@pytest.mark.skipif(not hasattr(mmap, "MADV_HUGEPAGE"), reason="large pages are asked for on Linux")
def test_a_long_cache_asks_for_large_pages_and_a_copy_of_it_too(monkeypatch):
    asked = []

    class Memory(mmap.mmap):
        def madvise(self, advice):
            asked.append((len(self), advice))

    monkeypatch.setattr(mmap, "mmap", Memory)
    cache = KVCache.empty(1, 2, 4096, 64)
    copy = replace(cache, length=3).clone()
    assert asked == [(2 * 4096 * 64 * 4, mmap.MADV_HUGEPAGE)] * 4
    assert not copy.k.any()
    assert copy.length == 3
    assert copy.k.data_ptr() != cache.k.data_ptr()
    KVCache.empty(1, 2, 4095, 64)  # a page is more
    KVCache.empty(1, 2, 4096, 64, device="meta")
    monkeypatch.setenv("TARNN_LARGE_PAGES", "off")
    KVCache.empty(1, 2, 4096, 64)
    assert len(asked) == 4
