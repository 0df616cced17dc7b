"""Ours against numbers that nothing of ours, and nothing of torch's, has computed: tests/golden/make.py made them."""

import contextlib
import json
from pathlib import Path

import pytest
import torch
from support import features as formulas

from tarnn import feature_maps
from tarnn.attention.rotary import Rotary
from tarnn.kernels.cpu import library
from tarnn.models import LogisticMixture, TarnnConfig
from tarnn.models.block import SwiGlu
from tarnn.models.positions import SinusoidalPositions
from tarnn.ops import LinearState, linear_attention, softmax_attention, step
from tarnn.ops.linear import definition as linear_definition
from tarnn.ops.softmax import definition as softmax_definition

VALUES = json.loads((Path(__file__).parent / "golden" / "values.json").read_text())
ATTENTION, FEATURES = VALUES["attention"], VALUES["features"]
ELEMENTWISE = {
    "identity": feature_maps.Identity,
    "elu": feature_maps.Elu,
    "relu": feature_maps.Relu,
    "squared_relu": feature_maps.SquaredRelu,
    "exp": feature_maps.Exp,
}


def tensor(values):
    return torch.tensor(values, dtype=torch.float64)


def equal(x, expected, rtol=1e-13):
    torch.testing.assert_close(x.double(), tensor(expected), rtol=rtol, atol=1e-15)


@pytest.fixture(params=["compiled", "plain"])
def _computed(request):
    """By the compiled kernels, and in plain PyTorch."""
    if request.param == "compiled" and not library.available():
        pytest.skip(library.status().why)
    with library.disabled() if request.param == "plain" else contextlib.nullcontext():
        yield


def call(case):
    """The feature map and the other options of a call, as the op takes them."""
    options = dict(case["options"])
    for name in {"key_mask", "log_decay", "key_log_weight"} & options.keys():
        options[name] = torch.tensor(options[name]) if name == "key_mask" else tensor(options[name])
    return options.pop("feature_map", "elu"), {"causal": True, **options}


@pytest.mark.usefixtures("_computed")
@pytest.mark.parametrize("case", ATTENTION["linear"], ids=lambda case: case["name"])
def test_linear_attention(case):
    name, options = call(case)
    q, k, v = map(tensor, ATTENTION["inputs"])
    equal(linear_attention(q, k, v, ELEMENTWISE[name](), **options), case["o"])


def can_step(case):
    """A step is causal, and has no mask."""
    return "key_mask" not in case["options"] and case["options"].get("causal", True)


@pytest.mark.usefixtures("_computed")
@pytest.mark.parametrize("case", list(filter(can_step, ATTENTION["linear"])), ids=lambda case: case["name"])
def test_steps(case):
    name, options = call(case)
    q, k, v = map(tensor, ATTENTION["inputs"])
    del options["causal"]
    normalize, outputs = options.pop("normalize", True), []
    weighted = name == "exp" or "key_log_weight" in options
    state = LinearState.zeros(1, 2, 3, 2, log_weights=weighted, dtype=torch.float64)
    for i in range(q.shape[2]):
        now = {n: x if x.ndim == 1 else x[:, :, i : i + 1] for n, x in options.items()}
        one = (x[:, :, i : i + 1] for x in (q, k, v))
        o, state = step(*one, ELEMENTWISE[name](), state, normalize=normalize, **now)
        outputs.append(o)
    equal(torch.cat(outputs, dim=2), case["o"])


@pytest.mark.parametrize("case", ATTENTION["linear"], ids=lambda case: case["name"])
def test_the_definition_that_everything_is_held_against(case):
    name, options = call(case)
    q, k, v = map(tensor, ATTENTION["inputs"])
    (fq, _), (fk, k_scale) = (formulas.elementwise(name, x) for x in (q, k))
    if k_scale is not None:
        options["key_log_weight"] = options.get("key_log_weight", 0) + k_scale
    equal(linear_definition.quadratic(fq, fk, v, **options), case["o"])
    if options.pop("causal"):
        equal(linear_definition.recurrent(fq, fk, v, **options)[0], case["o"])


@pytest.mark.usefixtures("_computed")
def test_state():
    q, k, v = map(tensor, ATTENTION["inputs"])
    state = linear_attention(q, k, v, feature_maps.Elu(), causal=True, return_state=True)[1]
    equal(state.S, ATTENTION["state"]["S"])
    equal(state.z, ATTENTION["state"]["z"])


@pytest.mark.usefixtures("_computed")
def test_gradients():
    case = ATTENTION["gradients"]
    options = [tensor(case[n]) for n in ("log_decay", "key_log_weight")]
    leaves = [x.requires_grad_() for x in (*map(tensor, ATTENTION["inputs"]), *options)]
    log_decay, weight = leaves[3:]
    o = linear_attention(*leaves[:3], feature_maps.Elu(), causal=True, log_decay=log_decay, key_log_weight=weight)
    for x, expected in zip(torch.autograd.grad(o, leaves, tensor(case["grad"])), case["found"], strict=True):
        torch.testing.assert_close(x, tensor(expected), rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("case", ATTENTION["softmax"], ids=["causal", "full", "masked"])
def test_softmax_attention(case):
    q, k, v = map(tensor, ATTENTION["inputs"])
    mask = None if case["key_mask"] is None else torch.tensor(case["key_mask"])
    o = softmax_attention(q, k, v, causal=case["causal"], key_mask=mask)
    equal(o, case["o"])
    equal(softmax_definition.softmax(q, k, v, causal=case["causal"], key_mask=mask), case["o"])


RANDOM = {
    "positive": feature_maps.PositiveRandomFeatures,
    "hyperbolic": feature_maps.HyperbolicRandomFeatures,
    "optimal": feature_maps.OptimalRandomFeatures,
    "trigonometric": feature_maps.TrigonometricRandomFeatures,
    "relu": feature_maps.GeneralizedRandomFeatures,
}


@pytest.mark.parametrize("name", RANDOM)
def test_features_of_a_given_projection(name):
    x, omega = tensor(FEATURES["x"]), tensor(FEATURES["omega"])
    options = {"A": FEATURES["A"]} if name == "optimal" else {}
    phi = RANDOM[name](3, 8 if name in ("hyperbolic", "trigonometric") else 4, seed=0, **options).double()
    phi.omega.copy_(omega)
    equal(phi(x), FEATURES[name])
    if name != "trigonometric":
        value, scale = formulas.projected(name, x, omega, FEATURES["A"])
        equal(value if scale is None else value * scale.exp()[:, None], FEATURES[name])


def test_dpfp():
    equal(feature_maps.Dpfp(nu=2)(tensor(FEATURES["x"])), FEATURES["dpfp"])


def test_positions():
    case = VALUES["positions"]
    places = torch.tensor([case["positions"]])
    rotation = Rotary(6).rotation(places, torch.float64)
    torch.testing.assert_close(
        rotation.apply(tensor(case["x"])[None, None])[0, 0], tensor(case["rotary"]), rtol=0, atol=1e-10
    )
    found = SinusoidalPositions(6)(places)[0]  # in float32
    torch.testing.assert_close(found, tensor(case["sinusoidal"]).float(), rtol=0, atol=1e-7)


def test_swiglu():
    case = VALUES["swiglu"]
    block = SwiGlu(TarnnConfig(hidden_size=4, num_attention_heads=2, intermediate_size=5)).double()
    for name in ("gate", "up", "down"):
        getattr(block, f"{name}_proj").weight.data = tensor(case[name])
    equal(block(tensor(case["x"])), case["out"])


def test_logistic_mixture():
    case = VALUES["logistic_mixture"]
    values = torch.tensor(case["values"])
    theta = tensor(case["parameters"])[:, None].expand(-1, len(values), -1)
    equal(LogisticMixture(3).log_prob(theta, values.expand(4, -1)), case["log_prob"], rtol=1e-12)
