"""The delta rule as others compute it: transformers' functions, flash-linear-attention's, the cases of ONNX's operator.

These were written by others, from other texts: they are no part of the laws, and nothing here is tuned to them. What needs a
package that is not installed is skipped.
"""

import inspect
import math
import warnings

import pytest
import torch
from support.attention_cases import relative_error
from torch import Tensor

from tarnn import DeltaState, LinearState, delta_rule, delta_step, linear_attention

TOLERANCE = 1e-5  # both are float32; theirs, by chunks of 64, has lost a digit or two


def drawn(h: int, m: int, channels: bool, t: int = 150, strength: float = 1.0, seed: int = 0) -> dict[str, Tensor]:
    """As others have them: (b, t, heads, width); decays of `strength` at most."""
    generator = torch.Generator().manual_seed(seed)
    rand = lambda *shape: torch.randn(*shape, generator=generator)  # noqa: E731
    g = -strength * torch.rand(2, t, m, *([16] if channels else []), generator=generator)
    given = {"q": rand(2, t, h, 16), "k": rand(2, t, h, 16), "v": rand(2, t, m, 24), "beta": rand(2, t, m).sigmoid()}
    return given | {"g": g, "state": rand(2, m, 16, 24)}


def ours(given: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """o (b, t, heads, width) and S, of queries and keys that are normalised."""
    q, k, v, beta, g = (given[name].transpose(1, 2) for name in ("q", "k", "v", "beta", "g"))
    state = DeltaState(given["state"])
    o, state = delta_rule(q, k, v, beta, log_decay=g, normalize_qk=True, state=state, return_state=True)
    return o.transpose(1, 2), state.S


def by_steps(given: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    state, outs = DeltaState(given["state"]), []
    for i in range(given["q"].shape[1]):
        q, k, v, beta, g = (given[name][:, i : i + 1].transpose(1, 2) for name in ("q", "k", "v", "beta", "g"))
        o, state = delta_step(q, k, v, beta, log_decay=g, normalize_qk=True, state=state)
        outs.append(o.transpose(1, 2))
    return torch.cat(outs, 1), state.S


def agree(given: dict[str, Tensor], theirs, tolerance: float = TOLERANCE) -> None:
    """Outputs and state, whole and by steps, and the gradients of all that both take."""
    leaves = {name: x.clone().requires_grad_() for name, x in given.items()}
    expected = theirs(leaves)
    for found in (ours(leaves), by_steps(given)):
        for x, y in zip(found, expected):
            assert relative_error(x, y) < tolerance
    send = [torch.cos(torch.arange(x.numel())).view(x.shape) for x in expected]
    found, wanted = (torch.autograd.grad(xs, list(leaves.values()), send) for xs in (ours(leaves), expected))
    for name, x, y in zip(leaves, found, wanted):
        assert relative_error(x, y) < 10 * tolerance, name


FAMILIES = ["qwen3_next", "qwen3_5", "olmo_hybrid"]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("which", ["torch_chunk_gated_delta_rule", "torch_recurrent_gated_delta_rule"])
@pytest.mark.parametrize("m", [2, 4])
def test_transformers_gated_delta_rule(family, which, m):
    function = of_transformers(family, which)
    options = {"output_final_state": True, "use_qk_l2norm_in_kernel": True}
    agree(
        drawn(2, m, channels=False),
        lambda x: function(x["q"], x["k"], x["v"], x["g"], x["beta"], initial_state=x["state"], **options),
    )


@pytest.mark.parametrize("which", ["chunk_kimi_delta_attention", "recurrent_kimi_delta_attention"])
def test_transformers_kimi_delta_attention(which):
    function = of_transformers("kimi_linear", which)
    options = {"output_final_state": True, "use_qk_l2norm_in_kernel": True}
    agree(
        drawn(3, 3, channels=True, t=70, strength=0.5),
        lambda x: function(x["q"], x["k"], x["v"], x["g"], x["beta"], initial_state=x["state"], **options),
    )


def of_transformers(family: str, name: str):
    module = pytest.importorskip(
        f"transformers.models.{family}.modeling_{family}", reason=f"transformers has no {family}"
    )
    if not hasattr(module, name):
        pytest.skip(f"this version of transformers has no {name} in {family}")
    return inspect.unwrap(getattr(module, name))  # where fla is installed, the wrapper would call it, GPU or not


@pytest.mark.parametrize("which", ["recurrent", "chunk"])
@pytest.mark.parametrize("strength", [0.1, 1.0, 10.0])
def test_fla_gated_delta_rule(which, strength):
    naive = fla("gated_delta_rule.naive")
    function = getattr(naive, f"naive_{which}_gated_delta_rule")

    def theirs(x: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        q, k = unit(x["q"]), unit(x["k"])
        by_name = {"g": x["g"], "beta": x["beta"], "initial_state": x["state"], "output_final_state": True}
        return function(q, k, x["v"], **by_name)

    agree(drawn(3, 3, channels=False, t=128, strength=strength), theirs)


@pytest.mark.parametrize("which", ["recurrent", "chunk"])
@pytest.mark.parametrize("m", [2, 4])
def test_fla_kimi_delta_attention(which, m):
    function = getattr(fla("kda.naive"), f"naive_{which}_kda")

    def theirs(x: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        by_name = {"g": x["g"], "beta": x["beta"], "initial_state": x["state"], "output_final_state": True}
        return function(unit(x["q"]), unit(x["k"]), x["v"], **by_name)

    agree(drawn(2, m, channels=True, t=64, strength=0.5), theirs)


def test_fla_delta_rule():
    function = fla("delta_rule.naive").delta_rule_recurrence
    given = drawn(3, 3, channels=False, t=60)
    q, k, v, beta = (given[name].transpose(1, 2) for name in ("q", "k", "v", "beta"))
    expected, S = function(unit(q), unit(k), v, beta, given["state"], True)
    o, state = delta_rule(q, k, v, beta, normalize_qk=True, state=DeltaState(given["state"]), return_state=True)
    assert relative_error(o, expected) < TOLERANCE
    assert relative_error(state.S, S) < TOLERANCE


def unit(x: Tensor) -> Tensor:
    return x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt()


@pytest.fixture(autouse=True)
def quietly():
    with warnings.catch_warnings():  # fla says that there is no GPU
        warnings.simplefilter("ignore")
        yield


def fla(module: str):
    return pytest.importorskip(f"fla.ops.{module}", reason="flash-linear-attention is not installed")


# --- ONNX: LinearAttention of opset 27, all four of its rules

RULES = [
    "linear", "gated", "gated_per_head_decay", "delta", "gated_delta", "gated_delta_beta_scalar", "gated_delta_gqa",
    "gated_delta_mqa", "decode_step", "prefill_with_past", "no_past_explicit_zeros", "explicit_scale", "fp16",
    "linear_t1_no_past",
]  # fmt: skip


@pytest.mark.parametrize("name", RULES)
def test_cases_of_onnx(name):
    collect = pytest.importorskip("onnx.backend.test.case.node", reason="onnx is not installed")
    cases = {case.name: case for case in collect.collect_testcases("LinearAttention")}
    case = cases.get(f"test_linear_attention_{name}")
    if case is None:
        pytest.skip("this version of onnx has no such case")
    (node,) = case.model.graph.node
    ((inputs, outputs),) = case.data_sets
    given = dict(zip([x for x in node.input if x], (torch.from_numpy(x.copy()) for x in inputs)))
    options = {x.name: x.i or x.f or x.s.decode() for x in node.attribute}
    o, S = as_onnx(options, **given)
    expected, expected_S = (torch.from_numpy(x.copy()) for x in outputs)
    eps = torch.finfo(expected.dtype).eps
    assert o.dtype == expected.dtype
    assert relative_error(o, expected) < 20 * eps
    assert relative_error(S, expected_S) < 20 * eps


def as_onnx(
    options: dict, query: Tensor, key: Tensor, value: Tensor, past_state=None, decay=None, beta=None
) -> tuple[Tensor, Tensor]:
    """ONNX's operator by ours: (b, t, heads·width) in and out."""
    h, g = options["q_num_heads"], options["kv_num_heads"]
    split = lambda x, heads: x.unflatten(-1, (heads, -1)).transpose(1, 2)  # noqa: E731
    q, k, v = split(query, h), split(key, g), split(value, g)
    d = q.shape[-1]
    scale = options.get("scale") or 1 / math.sqrt(d)
    if decay is not None:
        decay = split(decay, g)
        decay = decay[..., 0] if decay.shape[-1] == 1 else decay
    if beta is not None:
        beta = beta.transpose(1, 2).expand(-1, g, -1)
        state = None if past_state is None else DeltaState(past_state.float())
        o, state = delta_rule(q, k, v, beta, log_decay=decay, scale=scale, state=state, return_state=True)
        return o.transpose(1, 2).flatten(2), state.S
    state = (
        None
        if past_state is None
        else LinearState(past_state.float(), past_state.new_zeros(past_state.shape[:3]).float())
    )
    how = {"causal": True, "normalize": False, "log_decay": decay, "state": state, "return_state": True}
    o, state = linear_attention(scale * q, k, v, "identity", **how)
    return o.transpose(1, 2).flatten(2), state.S
