"""flash-linear-attention's functions on a CPU, by tarnn, against its own naive ones and its references."""

import pytest
import torch
from support.fla import close, drawn, installed, of
from torch.nn.functional import normalize

from tarnn.huggingface.patching.fla import patch_fla
from tarnn.ops import low_rank_delta_rule

installed()
pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(autouse=True)
def patched():
    with patch_fla():
        yield


def heads_first(*xs):
    return [x.transpose(1, 2) for x in xs]


@pytest.mark.parametrize("name", ["chunk.chunk_gla", "fused_recurrent.fused_recurrent_gla"])
def test_gla(name):
    x = drawn()
    decay = {"g" if "chunk" in name else "gk": x["per_channel"]}
    found = of(f"ops.gla.{name}")(x["q"], x["k"], x["v"], **decay, initial_state=x["S"], output_final_state=True)
    naive = of("ops.gla.naive.naive_recurrent_gla")
    close(found, naive(x["q"], x["k"], x["v"], x["per_channel"], x["S"], True))


@pytest.mark.parametrize("name", ["chunk.chunk_simple_gla", "fused_recurrent.fused_recurrent_simple_gla"])
def test_simple_gla(name):
    x = drawn()
    options = {"initial_state": x["S"], "output_final_state": True}
    found = of(f"ops.simple_gla.{name}")(x["q"], x["k"], x["v"], g=x["per_token"], **options)
    close(
        found, of("ops.simple_gla.naive.naive_recurrent_simple_gla")(x["q"], x["k"], x["v"], x["per_token"], **options)
    )


@pytest.mark.parametrize(
    "name", ["chunk.chunk_retention", "parallel.parallel_retention", "fused_recurrent.fused_recurrent_retention"]
)
def test_retention(name):
    x = drawn()
    found, _ = of(f"ops.retention.{name}")(x["q"], x["k"], x["v"])
    close([found], [of("ops.retention.naive.naive_retention")(*heads_first(x["q"], x["k"], x["v"])).transpose(1, 2)])


@pytest.mark.parametrize("state_v_first", [False, True])
@pytest.mark.parametrize("name", ["chunk.chunk_gated_delta_rule", "fused_recurrent.fused_recurrent_gated_delta_rule"])
def test_gated_delta_rule(name, state_v_first):
    x = drawn()
    S = x["S"].mT if state_v_first else x["S"]
    o, after = of(f"ops.gated_delta_rule.{name}")(
        x["q"], x["k"], x["v"], g=x["per_token"], beta=x["beta"], initial_state=S, output_final_state=True,
        state_v_first=state_v_first,
    )  # fmt: skip
    naive = of("ops.gated_delta_rule.naive.naive_recurrent_gated_delta_rule")
    expected = naive(x["q"], x["k"], x["v"], x["beta"], x["per_token"], None, x["S"], True)
    close((o, after.mT if state_v_first else after), expected)


@pytest.mark.parametrize("name", ["chunk.chunk_kda", "fused_recurrent.fused_recurrent_kda"])
@pytest.mark.parametrize("lower_bound", [None, -5.0])
@pytest.mark.parametrize("heads", [3, 6])
def test_kda_with_its_gates(name, lower_bound, heads):
    x = drawn(heads=heads)
    raw, A_log, bias = torch.randn(2, 37, heads, 8), torch.randn(heads), torch.randn(heads * 8)
    options = {} if lower_bound is None else {"lower_bound": lower_bound}
    found = of(f"ops.kda.{name}")(
        3 * x["q"], 3 * x["k"], x["v"], g=raw, beta=x["beta"].logit(), A_log=A_log, dt_bias=bias,
        initial_state=x["S"], output_final_state=True, use_qk_l2norm_in_kernel=True, use_gate_in_kernel=True,
        use_beta_sigmoid_in_kernel=True, **options,
    )  # fmt: skip
    gate = of(f"ops.kda.gate.naive_kda_{'' if lower_bound is None else 'lowerbound_'}gate")(raw, A_log, bias, **options)
    q, k = (normalize(y, dim=-1).repeat_interleave(heads // 3, 2) for y in (x["q"], x["k"]))
    expected = of("ops.kda.naive.naive_recurrent_kda")(q, k, x["v"], gate, x["beta"], None, x["S"], True)
    close(found, expected, 5e-5)


@pytest.mark.parametrize("name", ["chunk.chunk_delta_rule", "fused_recurrent.fused_recurrent_delta_rule"])
def test_delta_rule(name):
    x = drawn()
    found = of(f"ops.delta_rule.{name}")(
        x["q"], x["k"], x["v"], x["beta"], initial_state=x["S"], output_final_state=True
    )
    inputs = heads_first(x["q"], x["k"], x["v"], x["beta"])
    o, S = of("ops.delta_rule.naive.delta_rule_recurrence")(*inputs, x["S"], True)
    close(found, (o.transpose(1, 2), S))


def test_rwkv7_and_our_own_op():
    x = drawn()
    alpha = torch.rand_like(x["k"])
    a, b = -x["k"], x["k"] * alpha
    inputs = heads_first(x["q"], x["k"], x["v"], a, b, x["per_channel"])
    o, S = of("ops.generalized_delta_rule.dplr.naive.dplr_recurrence")(*inputs, x["S"], True)
    close([low_rank_delta_rule(*(y.double() for y in inputs[:5]), log_decay=inputs[5].double())], [
        of("ops.generalized_delta_rule.dplr.naive.dplr_recurrence")(*inputs)[0].double()
    ])  # fmt: skip
    options = {"initial_state": x["S"], "output_final_state": True, "scale": 8**-0.5}
    expected = o.transpose(1, 2), S
    close(of("ops.rwkv7.chunk.chunk_rwkv7")(x["q"], x["per_channel"], x["k"], x["v"], a, b, **options), expected)
    tokens = of("ops.rwkv7.fused_recurrent.fused_mul_recurrent_rwkv7")
    close(tokens(x["q"], x["per_channel"], x["k"], x["v"], x["k"], alpha, **options), expected)


@pytest.mark.parametrize("name", ["chunk.chunk_rwkv6", "fused_recurrent.fused_recurrent_rwkv6"])
def test_rwkv6(name):
    x, u = drawn(), torch.randn(3, 8)
    found = of(f"ops.rwkv6.{name}")(
        x["q"], x["k"], x["v"], x["per_channel"], u, scale=1.0, initial_state=x["S"], output_final_state=True
    )
    inputs = heads_first(x["q"], x["k"], x["v"], x["per_channel"])
    o, S = of("ops.rwkv6.recurrent_naive.naive_recurrent_rwkv6")(
        *inputs, u, scale=1.0, initial_state=x["S"], output_final_state=True
    )
    close(found, (o.transpose(1, 2), S))


def test_norms_and_rotations_are_those_of_its_references():
    torch.manual_seed(0)
    x, weight, bias, residual = torch.randn(2, 7, 12), torch.randn(12), torch.randn(12), torch.randn(2, 7, 12)
    for name in ("layer_norm", "rms_norm"):
        ours, theirs = (of(f"modules.norm.layernorm.{name}{end}") for end in ("", "_ref"))
        close([ours(x, weight, bias, eps=1e-3)], [theirs(x, weight, bias, eps=1e-3)])
        close(ours(x, weight, bias, residual, prenorm=True), theirs(x, weight, bias, residual, prenorm=True))
    ours, theirs = of("modules.norm.layernorm.group_norm"), of("modules.norm.layernorm.group_norm_ref")
    close([ours(x, weight, bias, num_groups=3)], [theirs(x, weight, bias, num_groups=3)])
    angles = torch.rand(9, 2)
    x = torch.randn(2, 7, 3, 6)
    for interleaved in (False, True):
        ours = of("modules.rotary.ops.rotary_embedding")(
            x, angles.cos(), angles.sin(), interleaved, seqlen_offsets=torch.tensor([0, 2])
        )
        for row, places in ((0, angles[:7]), (1, angles[2:])):
            expected = of("modules.rotary.ops.rotary_embedding_ref")(x[row], places.cos(), places.sin(), interleaved)
            close([ours[row]], [expected])
    packed = of("modules.rotary.ops.rotary_embedding")(
        x[:1], angles.cos(), angles.sin(), cu_seqlens=torch.tensor([0, 3, 7])
    )
    for start, stop in ((0, 3), (3, 7)):
        places = angles[: stop - start]
        expected = of("modules.rotary.ops.rotary_embedding_ref")(x[0, start:stop], places.cos(), places.sin())
        close([packed[0, start:stop]], [expected])


def test_activations_and_their_gradients():
    torch.manual_seed(0)
    x, y = torch.randn(2, 5, 6).requires_grad_(), torch.randn(2, 5, 6).requires_grad_()
    functional = torch.nn.functional
    pairs = [
        (of("modules.activations.ops.swish")(x), functional.silu(x)),
        (of("modules.activations.ops.sigmoid")(x), x.sigmoid()),
        (of("modules.activations.ops.logsigmoid")(x, 2.0), functional.logsigmoid(x) / 2),
        (of("modules.activations.ops.sqrelu")(x), functional.relu(x).square()),
        (of("modules.activations.ops.swiglu")(x, y), functional.silu(x) * y),
        (of("modules.activations.ops.swiglu_linear")(x, y, y[0], None), (functional.silu(x) * y) @ y[0].T),
    ]
    for found, expected in pairs:
        close([found], [expected])
        gradients = [torch.autograd.grad(o.square().sum(), (x, y), allow_unused=True) for o in (found, expected)]
        close([g for g in gradients[0] if g is not None], [g for g in gradients[1] if g is not None], 1e-4)
