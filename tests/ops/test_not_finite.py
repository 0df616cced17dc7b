"""Numbers that are not finite: nothing later changes an earlier output, to the bit, and a NaN shows wherever it is used."""

import pytest
import torch

from tarnn.feature_maps import make
from tarnn.ops import hybrid_attention, hybrid_step, linear_attention, softmax_attention

B, H, G, T, D, E = 2, 4, 2, 75, 5, 7
JUNK = [torch.nan, torch.inf, -torch.inf]
NEAR = {"window": 9, "sinks": 2}


def linear(name):
    phi = make(name, head_dim=D) if name in ("favor", "relu_features") else name
    return lambda q, k, v, **options: linear_attention(q, k, v, phi, **options)


def hybrid(name, **near):
    phi = None if name is None else make(name, head_dim=D)
    return lambda q, k, v, **options: hybrid_attention(q, k, v, phi, **{**NEAR, **near}, **options)


WAYS = {
    **{name: linear(name) for name in ("elu", "relu", "exp", "favor")},
    "signed": lambda q, k, v, **options: linear_attention(q, k, v, "identity", normalize=False, **options),
    "softmax": softmax_attention,
    "weights": lambda q, k, v, **options: softmax_attention(q, k, v, return_weights=True, **options)[0],
    "window": hybrid(None, window=80),
    "hybrid": hybrid("favor"),
    "clusters": hybrid("clusters"),
    "slots": hybrid("favor", slots=3),
}
WEIGHTED = ["elu", "favor", "softmax"]
FADING = ["elu", "favor", "hybrid"]
CALLS = [
    *[(name, ()) for name in WAYS],
    *[(name, ("key_log_weight",)) for name in WEIGHTED],
    *[(name, ("log_decay",)) for name in FADING],
    *[(name, ("key_mask",)) for name in ("elu", "softmax", "weights", "hybrid")],
]


def inputs(options):
    torch.manual_seed(0)
    given = {"q": torch.randn(B, H, T, D), "k": torch.randn(B, G, T, D), "v": torch.randn(B, G, T, E)}
    more = {
        "key_log_weight": torch.randn(B, G, T),
        "log_decay": -0.1 * torch.rand(B, G, T),
        "key_mask": torch.rand(B, T) > 0.2,
    }
    more["key_mask"][:, [0, 9, 66]] = True
    return given | {name: more[name] for name in options}


def same_bits(x, y):
    return torch.equal(x, y) or torch.equal(x.view(torch.int32), y.view(torch.int32))


@pytest.mark.thorough
@pytest.mark.parametrize(("name", "options"), CALLS, ids=lambda x: x if isinstance(x, str) else "-".join(x))
def test_what_is_not_finite_shows_where_it_is_used_and_nowhere_else(name, options):
    """One number, of one row and head, at one position: outputs before it, and of other rows and heads, stay as they are; a NaN
    in a query is in its output, in a key, value, weight or decay in all outputs from its position on."""
    call = WAYS[name]
    before = call(**inputs(options), causal=True)
    assert before.isfinite().all()
    for which in [x for x in ("q", "k", "v", *options) if x != "key_mask"]:
        for junk in JUNK[: 1 if which in ("log_decay", "q") else 3]:
            for place in (9, 66):
                given = inputs(options)
                x = given[which]
                x[(1, 1, place, 3)[: x.ndim]] = junk
                o = call(**given, causal=True)
                touched = torch.zeros(B, H, T, dtype=torch.bool)
                if which == "q":
                    touched[1, 1, place] = True
                else:
                    touched[1, 2:, place:] = True
                real = given.get("key_mask", torch.ones(B, T, dtype=torch.bool))[:, None]
                assert same_bits(o[~touched], before[~touched]), (which, junk, place)
                if junk != junk:
                    assert o[touched & real].isnan().any(-1).all(), (which, place)


@pytest.mark.parametrize("name", ["window 9", "hybrid"])
def test_a_window_forgets_what_has_left_it_unless_features_keep_it(name):
    call = hybrid(None, sinks=0) if name == "window 9" else hybrid("favor", sinks=0)
    given = inputs(())
    before = call(**given, causal=True)
    given["v"][1, 1, 20] = torch.nan
    o = call(**given, causal=True)
    spoilt = o[1, 2:].isnan().any(-1)
    assert spoilt[:, 20:29].all()
    assert not spoilt[:, :20].any()
    assert spoilt[:, 29:].all() if name == "hybrid" else same_bits(o[1, 2:, 29:], before[1, 2:, 29:])


@pytest.mark.parametrize("which", ["k", "v"])
@pytest.mark.parametrize("sinks", [0, 2])
def test_states_of_hybrid_attention_keep_what_is_not_finite(which, sinks):
    """Through the ring, the sinks and the sums; in steps and in calls that go on."""
    phi, near = make("favor", head_dim=D), {"window": 9, "sinks": sinks}
    for place in (1, 30, 38):
        given = inputs(())
        given[which][:, :, place] = torch.nan
        whole = hybrid_attention(**given, feature_map=phi, causal=True, **near)
        first, rest = ({n: x[:, :, cut] for n, x in given.items()} for cut in (slice(0, 40), slice(40, T)))
        _, state = hybrid_attention(**first, feature_map=phi, causal=True, return_state=True, **near)
        o = hybrid_attention(**rest, feature_map=phi, causal=True, state=state, **near)
        assert whole[:, :, place:].isnan().any(-1).all()
        assert o.isnan().any(-1).all()
        for t in range(40, T):
            now = {n: x[:, :, t : t + 1] for n, x in given.items()}
            o, state = hybrid_step(**now, feature_map=phi, state=state, inplace=True, **near)
            assert o.isnan().any(-1).all()


def test_a_step_with_a_query_that_is_nan_shows_it():
    given = inputs(())
    for phi in (None, make("favor", head_dim=D)):
        first = {n: x[:, :, :40] for n, x in given.items()}
        _, state = hybrid_attention(**first, feature_map=phi, causal=True, return_state=True, **NEAR)
        now = {n: x[:, :, 40:41] for n, x in given.items()}
        o, _ = hybrid_step(**(now | {"q": torch.full_like(now["q"], torch.nan)}), feature_map=phi, state=state, **NEAR)
        assert o.isnan().all()


def test_attention_to_both_sides_shows_it_in_its_row_alone():
    for name in ("elu", "softmax", "weights", "hybrid", "slots"):
        given = inputs(())
        before = WAYS[name](**given, causal=False)
        given["v"][1, 1, 20] = torch.nan
        o = WAYS[name](**given, causal=False)
        assert o[1, 2:].isnan().any(-1).all()
        assert same_bits(o[0], before[0])
        assert same_bits(o[1, :2], before[1, :2])


@pytest.mark.parametrize("name", ["elu", "softmax", "hybrid"])
def test_what_stands_at_masked_keys_is_absent(name):
    given = inputs(("key_mask",))
    before = WAYS[name](**given, causal=True)
    for which in ("k", "v"):
        given[which].masked_fill_(~given["key_mask"][:, None, :, None], torch.nan)
    assert same_bits(WAYS[name](**given, causal=True), before)


PATTERNS = [0x7FC00000, 0x7FC00001, 0x7F800001, -0x400000, -0x3FFFFF, 0x7FFFFFFF]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", ["elu", "exp", "favor"])
def test_a_nan_of_any_bits_stays_one(name, dtype):
    """Exponentials are made of bits: a NaN with low bits set became a number."""
    for bits in PATTERNS:
        given = {n: x.to(dtype) for n, x in inputs(()).items()}
        nan = torch.tensor([bits], dtype=torch.int32).view(torch.float32)
        if dtype == torch.float64:
            nan = torch.tensor(
                [((bits & 0xFFFFFFFF) >> 31 << 63 | 0x7FF << 52 | (bits & 0x7FFFFF)) - (1 << 64) * (bits < 0)]
            ).view(dtype)
        assert nan.isnan().all()
        given["k"][:, :, 20] = nan
        assert WAYS[name](**given, causal=True)[:, :, 20:].isnan().all(), hex(bits)


@pytest.mark.parametrize("junk", JUNK)
@pytest.mark.parametrize("name", ["elu", "favor", "clusters"])
def test_packed_sequences_keep_what_is_not_finite_to_themselves(name, junk):
    q, k, v = (x[:1] for x in inputs(()).values())
    phi, cuts = make(name, head_dim=D), torch.tensor([0, 20, 20, 45, T])
    decay = -0.1 * torch.rand(1, G, T)
    options = {"causal": True, "cu_seqlens": cuts}
    before = linear_attention(q, k, v, phi, log_decay=decay, **options)
    key, fade = k.clone(), decay.clone()
    key[:, :, 30, 3] = junk
    fade[:, :, 30] = torch.nan
    for spoilt in (
        linear_attention(q, key, v, phi, log_decay=decay, **options),
        linear_attention(q, k, v, phi, log_decay=fade, **options),
    ):
        assert same_bits(spoilt[:, :, :30], before[:, :, :30])
        assert same_bits(spoilt[:, :, 45:], before[:, :, 45:])
