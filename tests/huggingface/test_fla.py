"""flash-linear-attention's functions and models on a CPU: as its own naive functions, and as themselves in other pieces."""

import importlib
import sys
import warnings

import pytest
import torch
from torch.nn.functional import normalize

from tarnn.huggingface.patching import fla as patching
from tarnn.huggingface.patching.fla import patch_fla, unpatch_fla
from tarnn.ops import low_rank_delta_rule

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # it warns that there is no GPU
    fla = pytest.importorskip("fla", reason="flash-linear-attention is not installed")

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture
def patched():
    with patch_fla():
        yield


def of(path: str):
    """A function of fla as it is now."""
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(f"fla.{module}"), name)


def drawn(b=2, t=37, h=3, d=8, e=5, heads=None) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    n = heads or h
    return {
        "q": torch.randn(b, t, h, d),
        "k": normalize(torch.randn(b, t, h, d), dim=-1),
        "v": torch.randn(b, t, n, e),
        "per_token": -torch.rand(b, t, n),
        "per_channel": -torch.rand(b, t, n, d),
        "beta": torch.rand(b, t, n),
        "S": torch.randn(b, n, d, e),
    }


def close(found, expected, tolerance=2e-5):
    for x, y in zip(found, expected, strict=True):
        torch.testing.assert_close(x, y, rtol=tolerance, atol=tolerance)


def heads_first(*xs):
    return [x.transpose(1, 2) for x in xs]


@pytest.mark.usefixtures("patched")
@pytest.mark.parametrize("name", ["chunk.chunk_gla", "fused_recurrent.fused_recurrent_gla"])
def test_gla(name):
    x = drawn()
    decay = {"g" if "chunk" in name else "gk": x["per_channel"]}
    found = of(f"ops.gla.{name}")(x["q"], x["k"], x["v"], **decay, initial_state=x["S"], output_final_state=True)
    naive = of("ops.gla.naive.naive_recurrent_gla")
    close(found, naive(x["q"], x["k"], x["v"], x["per_channel"], x["S"], True))


@pytest.mark.usefixtures("patched")
@pytest.mark.parametrize("name", ["chunk.chunk_simple_gla", "fused_recurrent.fused_recurrent_simple_gla"])
def test_simple_gla(name):
    x = drawn()
    options = {"initial_state": x["S"], "output_final_state": True}
    found = of(f"ops.simple_gla.{name}")(x["q"], x["k"], x["v"], g=x["per_token"], **options)
    close(
        found, of("ops.simple_gla.naive.naive_recurrent_simple_gla")(x["q"], x["k"], x["v"], x["per_token"], **options)
    )


@pytest.mark.usefixtures("patched")
@pytest.mark.parametrize(
    "name", ["chunk.chunk_retention", "parallel.parallel_retention", "fused_recurrent.fused_recurrent_retention"]
)
def test_retention(name):
    x = drawn()
    found, _ = of(f"ops.retention.{name}")(x["q"], x["k"], x["v"])
    close([found], [of("ops.retention.naive.naive_retention")(*heads_first(x["q"], x["k"], x["v"])).transpose(1, 2)])


@pytest.mark.usefixtures("patched")
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


@pytest.mark.usefixtures("patched")
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


@pytest.mark.usefixtures("patched")
@pytest.mark.parametrize("name", ["chunk.chunk_delta_rule", "fused_recurrent.fused_recurrent_delta_rule"])
def test_delta_rule(name):
    x = drawn()
    found = of(f"ops.delta_rule.{name}")(
        x["q"], x["k"], x["v"], x["beta"], initial_state=x["S"], output_final_state=True
    )
    inputs = heads_first(x["q"], x["k"], x["v"], x["beta"])
    o, S = of("ops.delta_rule.naive.delta_rule_recurrence")(*inputs, x["S"], True)
    close(found, (o.transpose(1, 2), S))


@pytest.mark.usefixtures("patched")
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


@pytest.mark.usefixtures("patched")
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


@pytest.mark.usefixtures("patched")
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


MODELS = {
    "GLA": {"num_heads": 2},
    "GatedDeltaNet": {"num_heads": 2, "head_dim": 16},
    "KDA": {"num_heads": 2, "head_dim": 16},
    "DeltaNet": {"num_heads": 2},
    "RetNet": {"num_heads": 2},
    "RWKV7": {"head_dim": 16},
    "RWKV6": {"num_heads": 2},
    "HGRN2": {"num_heads": 2, "expand_ratio": 32},
    "HGRN": {},
    "LinearAttention": {"num_heads": 2},
}


def model_of(name: str):
    models = importlib.import_module("fla.models")
    torch.manual_seed(0)
    config = getattr(models, f"{name}Config")(
        hidden_size=64, num_hidden_layers=2, vocab_size=50, intermediate_size=96, **MODELS[name]
    )
    model = getattr(models, f"{name}ForCausalLM")(config)
    with torch.no_grad():
        for x in model.parameters():
            if not x.any():  # what starts as zero would hide what comes before it
                x.normal_(std=0.3)
    return model.eval()


every_model = pytest.mark.parametrize("name", MODELS)


@every_model
@pytest.mark.usefixtures("patched")
def test_a_model_continued_is_the_whole(name):
    model, ids = model_of(name), torch.randint(50, (2, 75))
    with torch.no_grad():
        whole = model(ids).logits
        out = model(ids[:, :70], use_cache=True)
        close([out.logits], [whole[:, :70]], 1e-4)
        for i in range(70, 75):
            out = model(ids[:, i : i + 1], past_key_values=out.past_key_values, use_cache=True)
            close([out.logits[:, 0]], [whole[:, i]], 1e-4)


@every_model
@pytest.mark.usefixtures("patched")
def test_a_row_padded_on_the_left_is_the_row_alone(name):
    model, ids, mask = model_of(name), torch.randint(50, (2, 20)), torch.ones(2, 20, dtype=torch.int64)
    mask[1, :6] = 0
    with torch.no_grad():
        padded = model(ids, attention_mask=mask).logits
        close([padded[0], padded[1, 6:]], [model(ids[:1]).logits[0], model(ids[1:, 6:]).logits[0]], 1e-4)


@pytest.mark.parametrize("name", [x for x in MODELS if x not in ("LinearAttention", "HGRN")])  # fla does not pack these
@pytest.mark.usefixtures("patched")
def test_packed_rows_have_the_gradients_of_rows_alone(name):
    model, ids, cuts = model_of(name).train(), torch.randint(50, (1, 30)), [0, 11, 12, 30]
    packed = model(ids, cu_seqlens=torch.tensor(cuts)).logits
    alone = torch.cat([model(ids[:, i:j]).logits for i, j in zip(cuts, cuts[1:])], 1)
    close([packed], [alone], 1e-4)
    weights = list(model.parameters())
    gradients = [torch.autograd.grad(x.square().sum(), weights) for x in (packed, alone)]
    for x, y in zip(*gradients):
        torch.testing.assert_close(x, y, rtol=1e-3, atol=1e-3 * float(y.abs().max()) + 1e-6)


@pytest.mark.usefixtures("patched")
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


@pytest.mark.parametrize("name", ["GLA", "RWKV7"])
def test_a_model_made_before_runs_too(name):
    model, ids = model_of(name), torch.randint(50, (1, 9))
    with patch_fla(), torch.no_grad():
        close([model(ids).logits], [model_of(name)(ids).logits])


@pytest.mark.usefixtures("patched")
def test_the_loss_is_torchs():
    model, ids = model_of("GLA"), torch.randint(50, (2, 9))
    labels = ids.masked_fill(torch.rand(2, 9) < 0.3, -100)
    out = model(ids, labels=labels)
    expected = torch.nn.functional.cross_entropy(out.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
    close([out.loss], [expected])


def test_functions_are_fla_s_own_again():
    path = "ops.gla.chunk.chunk_gla"
    original, layer = of(path), importlib.import_module("fla.layers.gla")
    with patch_fla():
        ours = of(path)
        assert layer.chunk_gla is ours is not original
        with patch_fla():
            assert of(path) is ours
        assert of(path) is ours
    assert layer.chunk_gla is of(path) is original
    patch_fla()
    patch_fla()
    unpatch_fla()
    assert of(path) is original
    x = drawn()
    with pytest.raises(RuntimeError, match="driver"):  # its registry has no use for ours either: there is no GPU
        of("ops.kda.chunk.chunk_kda")(x["q"], x["k"], x["v"], x["per_channel"], x["beta"])


def test_another_version_is_refused_by_name(monkeypatch):
    monkeypatch.setattr(fla, "__version__", "0.7.1")
    with pytest.raises(ValueError, match=r"0\.6\.0.*0\.7\.1"):
        patch_fla()
    assert not patching._replaced


def test_what_tarnn_does_not_compute_is_refused():
    x = drawn()
    with patch_fla():
        with pytest.raises(ValueError, match="without gv="):
            of("ops.gla.fused_recurrent.fused_recurrent_gla")(x["q"], x["k"], x["v"], gv=x["v"])
        with pytest.raises(ValueError, match="one β per token"):
            of("ops.delta_rule.fused_recurrent.fused_recurrent_delta_rule")(x["q"], x["k"], x["v"], x["v"])


def test_without_fla_a_sentence_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "fla", None)
    with pytest.raises(ImportError, match="pip install flash-linear-attention"):
        patch_fla()
