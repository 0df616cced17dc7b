"""Linear attention that fades to both sides: its definition, and the laws that tie it to what is known."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings, strategies as st
from support.attention_cases import MAPS, Case, cases, relative_error

from tarnn import feature_maps, linear_attention
from tarnn.ops.features import log_features, raw_features
from tarnn.ops.linear import definition as linear_definition

laws = settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
kinds = st.tuples(st.sampled_from(["head", "token", "channel"]), st.sampled_from([0, 1, 2, 3, 7, 8, 9, 13]))
faded = kinds.flatmap(lambda x: cases(causal=False, decay=x[0], t=x[1], d=5))
T = torch.randn


def attend(case: Case, **more):
    options = {"normalize": case.normalize, **case.options, **more}
    return linear_attention(case.q, case.k, case.v, MAPS[case.feature_map], causal=False, **options)


@pytest.mark.one_path
def test_the_definition_by_hand():
    """Three tokens of weight one and values 1, 10, 100; the second fades by 1/2 forwards and 1/4 backwards, and so on."""
    ones, v = torch.ones(1, 1, 3, 1), torch.tensor([1.0, 10.0, 100.0]).view(1, 1, 3, 1)
    forward, back = (torch.tensor(x).log().view(1, 1, 3) for x in ([0.9, 1 / 2, 1 / 5], [1 / 8, 1 / 4, 0.7]))
    o = linear_definition.quadratic(
        ones, ones, v, causal=False, normalize=False, log_decay=forward, log_decay_back=back
    )
    first, second = 1 + 10 / 8 + 100 / 8 / 4, 1 / 2 + 10 + 100 / 4
    assert o.flatten().tolist() == pytest.approx([first, second, 1 / 2 / 5 + 10 / 5 + 100])


@laws
@given(case=faded)
def test_equals_the_definition(chunks, case):
    assert relative_error(attend(case), case.definition()) < 1e-11


@laws
@given(case=faded)
def test_gradients_equal_those_of_the_definition(case):
    if not case.t:
        return
    tensors = [x.requires_grad_() for x in case.tensors()]
    sent = T(case.b, case.g * case.r, case.t, case.e).double()
    got, expected = (
        torch.autograd.grad(o, tensors, sent, allow_unused=True, materialize_grads=True)
        for o in (attend(case), case.definition())
    )
    scale = max([1e-6, *(x.abs().max().item() for x in expected)])
    for x, y in zip(got, expected):
        assert x.isfinite().all()
        assert (x - y).abs().max().item() < 1e-8 * scale


def drawn(t: int, decay: str = "token", b: int = 1, **choices) -> Case:
    return Case(b=b, g=2, r=2, t=t, causal=False, decay=decay, **choices)


@pytest.mark.parametrize("decay", ["head", "token", "channel"])
@pytest.mark.parametrize("choices", [{}, {"weighted": True, "masked": True}], ids=["plain", "weighted and masked"])
def test_packed_equals_a_loop(decay, choices):
    case, cuts = drawn(19, decay, **choices), [0, 1, 1, 8, 10, 19]
    tensors = [x.requires_grad_() for x in case.tensors()]
    packed = attend(case, cu_seqlens=torch.tensor(cuts, dtype=torch.int32))

    def part(name, x, a, b):
        return x if x.ndim == 1 else x[:, a:b] if name == "key_mask" else x[:, :, a:b]

    alone = []
    for a, b in zip(cuts, cuts[1:]):
        options = {name: part(name, x, a, b) for name, x in case.options.items()}
        q, k, v = (x[:, :, a:b] for x in (case.q, case.k, case.v))
        alone.append(linear_attention(q, k, v, causal=False, **options))
    alone, sent = torch.cat(alone, 2), T(packed.shape).double()
    assert relative_error(packed, alone) < 1e-12
    for x, y in zip(*(torch.autograd.grad(o, tensors, sent) for o in (packed, alone))):
        assert relative_error(x, y) < 1e-9


@pytest.mark.parametrize("decay", ["head", "token", "channel"])
def test_the_same_from_the_other_end(decay):
    """All turned around, and the decays exchanged."""
    case = drawn(23, decay, b=2, masked=True)
    turn = lambda x: x if x.ndim == 1 else x.flip(1 if x.dtype == torch.bool else 2)  # noqa: E731
    forward, back = case.options["log_decay"], case.options["log_decay_back"]
    options = {"log_decay": turn(back), "log_decay_back": turn(forward), "key_mask": turn(case.options["key_mask"])}
    turned = linear_attention(*(turn(x) for x in (case.q, case.k, case.v)), causal=False, **options)
    assert relative_error(turn(turned), attend(case)) < 1e-12


@pytest.mark.parametrize("decay", ["token", "channel"])
def test_between_what_is_known(decay):
    """Nothing comes from behind: causal attention. Nothing fades: attention to both sides."""
    case = drawn(21, decay, b=2)
    forward = case.options["log_decay"]
    causal = linear_attention(case.q, case.k, case.v, causal=True, log_decay=forward)
    nothing = torch.full_like(forward, -torch.inf)
    assert relative_error(attend(case, log_decay_back=nothing), causal) < 1e-12
    zeros = torch.zeros_like(forward)
    both = linear_attention(case.q, case.k, case.v, causal=False)
    assert relative_error(attend(case, log_decay=zeros, log_decay_back=zeros), both) < 1e-12


FEW = [
    feature_maps.PositiveRandomFeatures(5, 8, seed=1),
    feature_maps.make("hedgehog", head_dim=5, num_heads=2),
    feature_maps.Dpfp(2),
    feature_maps.CosFormer(64),
    feature_maps.QueryClusters(5, 4, seed=1),
]


@pytest.mark.parametrize("phi", FEW, ids=lambda x: type(x).__name__)
@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("channels", [False, True])
def test_any_map(phi, normalize, channels):
    """Those whose features have scales of their own, and those of which the kernels know nothing."""
    phi = phi.double()
    q, k, v = T(2, 4, 11, 5).double(), T(2, 2, 11, 5).double(), T(2, 2, 11, 3).double()
    phi = phi.at(torch.arange(11)) if hasattr(phi, "at") else phi
    (fq, q_scale), (fk, k_scale) = raw_features(phi, q, "queries"), raw_features(phi, k, "keys")
    if phi.log_features:
        fq, fk = log_features(phi, q, "queries").exp(), log_features(phi, k, "keys").exp()
    f = fq.shape[-1]
    decays = {name: -T(2, 2, 11, *[f] * channels).abs().double() for name in ("log_decay", "log_decay_back")}
    expected = linear_definition.quadratic(
        fq, fk, v, causal=False, normalize=normalize, key_log_weight=k_scale, **decays
    )
    expected = expected if normalize or q_scale is None else expected * q_scale.exp()[..., None]
    o = linear_attention(q, k, v, phi, causal=False, normalize=normalize, **decays)
    assert relative_error(o, expected) < 1e-10


@pytest.mark.parametrize("towards", [1.0, -1.0])
def test_weights_that_no_float_holds(towards):
    """Log-weights rise or fall by 300 a token, in float32: a query hears one neighbour, or its own key."""
    v, w = T(1, 1, 6, 3), (300.0 * towards * torch.arange(6)).view(1, 1, 6)
    ones, decay = torch.ones(1, 1, 6, 2), torch.full((1, 1, 6), -1000.0)
    o = linear_attention(ones, ones, v, causal=False, key_log_weight=w, log_decay=decay, log_decay_back=decay)
    torch.testing.assert_close(o, v)
    slow = torch.full((1, 1, 6), -1.0)
    o = linear_attention(ones, ones, v, causal=False, key_log_weight=w, log_decay=slow, log_decay_back=slow)
    torch.testing.assert_close(o, v[:, :, -1:].expand_as(v) if towards > 0 else v[:, :, :1].expand_as(v))


@pytest.mark.parametrize("masked", ["none before", "none behind", "none at all"])
@pytest.mark.parametrize("weighted", [False, True])
def test_a_query_with_nothing_on_one_side(masked, weighted):
    """Masked tokens are queries too: of what they see alone, far below one or not."""
    mask = {"none before": [0, 0, 0, 1, 1], "none behind": [1, 1, 0, 0, 0], "none at all": [0] * 5}[masked]
    case = drawn(5)
    case.options["key_mask"] = torch.tensor([mask]).bool()
    if weighted:
        case.options["key_log_weight"] = torch.full((1, 2, 5), -500.0).double()
    o = attend(case)
    assert relative_error(o, case.definition()) < 1e-12
    assert (o == 0).all() == (masked == "none at all")


@pytest.mark.parametrize("feature_map", ["elu", "exp"])
def test_at_masked_tokens_anything_may_stand(feature_map):
    case = drawn(9, masked=True, feature_map=feature_map)
    case.options["key_mask"][:, 3] = False
    before = attend(case)
    for x in (case.k, case.v, case.options["log_decay"], case.options["log_decay_back"]):
        x[:, :, 3] = torch.nan
    assert torch.equal(attend(case), before)


@pytest.mark.parametrize("feature_map", ["elu", "exp"])
def test_packed_sequences_share_no_nan(feature_map):
    case = drawn(9, feature_map=feature_map)
    cu_seqlens = torch.tensor([0, 4, 9])
    before = attend(case, cu_seqlens=cu_seqlens)
    for x in (case.q, case.k, case.v):
        x[:, :, 3] = torch.nan
    x = attend(case, cu_seqlens=cu_seqlens)
    assert torch.equal(x[:, :, 4:], before[:, :, 4:])
    assert x[:, :, :4].isnan().all()
    tensors = [y.requires_grad_() for y in case.tensors()]
    gradients = torch.autograd.grad(attend(case, cu_seqlens=cu_seqlens)[:, :, 4:].sum(), tensors)
    assert all(y[:, :, 4:].isfinite().all() for y in gradients)


class Exported(torch.nn.Module):
    def forward(self, q, k, v, decay):
        return linear_attention(q, k, v, feature_maps.Elu(), causal=False, log_decay=decay, log_decay_back=decay)


@pytest.mark.compile
def test_it_is_exported_for_two_tokens_and_more(device):
    q, k, v = (torch.randn(1, 2, 9, n, device=device) for n in (4, 4, 5))
    given, t = (q, k, v, -torch.rand(1, 2, 9, device=device)), torch.export.Dim("t", min=2)
    program = torch.export.export(Exported(), given, dynamic_shapes=[{2: t}] * 4).module()
    for n in (2, 3, 9):
        short = [x[:, :, :n] for x in given]
        torch.testing.assert_close(program(*short), Exported()(*short))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_loses_no_more_than_its_inputs(dtype):
    """Sums are float32, and rounded once."""
    case = drawn(64, b=2, dtype=dtype)
    o = attend(case)
    assert o.dtype == dtype
    rounded = case.definition().to(dtype)
    assert relative_error(o, case.definition()) < 1.5 * relative_error(rounded, case.definition()) + 1e-6


def test_values_with_heads_of_their_own():
    q, k, v = T(2, 2, 9, 5).double(), T(2, 2, 9, 5).double(), T(2, 6, 9, 3).double()
    decays = {name: -T(2, 6, 9).abs().double() for name in ("log_decay", "log_decay_back")}
    for phi in ("elu", "exp"):
        expected = linear_attention(*(x.repeat_interleave(3, 1) for x in (q, k)), v, phi, causal=False, **decays)
        assert relative_error(linear_attention(q, k, v, phi, causal=False, **decays), expected) < 1e-12


def test_divided_by_one_at_least():
    case = drawn(9, feature_map="identity", normalize="at_least_one")
    assert relative_error(attend(case), case.definition()) < 1e-12


@pytest.mark.one_path
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"log_decay": None}, "two decays.* and log_decay is missing"),
        ({"log_decay_back": None}, "needs causal=True; .* and log_decay_back is missing"),
        ({"causal": True}, "log_decay_back fades later tokens, which causal attention does not see"),
        ({"return_state": True}, "fades to both sides has no state"),
        ({"log_decay_back": torch.zeros(3)}, r"log_decay_back must be \(g,\) = \(2,\).*got \(3,\)"),
        ({"q": T(1, 2, 4, 3)}, "as many keys as queries; got 4 queries and 5 keys"),
        ({"normalize": "at_least_one", "eps": 1e-3}, "takes no eps"),
    ],
)
def test_what_is_wrong_is_said(change, message):
    x = T(1, 2, 5, 3)
    options = {"q": x, "k": x, "v": x, "causal": False, "log_decay": torch.zeros(2), "log_decay_back": torch.zeros(2)}
    with pytest.raises(ValueError, match=message):
        linear_attention(**{**options, **change})
