"""Classes of one's own that derive from maps that the kernels know: what they compute themselves is what counts."""

import pytest
import torch
from torch import nn

from tarnn import LinearState, hybrid_attention, linear_attention, step
from tarnn.feature_maps import (
    Elu,
    Exp,
    OptimalRandomFeatures,
    PositiveRandomFeatures,
    QueryClusters,
    Relu,
    Reparametrized,
)
from tarnn.feature_maps.base import FeatureMap


class Own(nn.Module):
    """What every derived map here computes."""

    def forward(self, x):
        return (x.sin() + 2).cumsum(-1)


class Forward:
    def forward(self, x):
        return Own()(x)


class Scaled:
    def scaled(self, x):
        return Own()(x), None


class Sides:
    def queries(self, q):
        return Own()(q), None

    def keys(self, k):
        return Own()(k), None


KNOWN = {
    "elu": (Elu, ()),
    "relu": (Relu, ()),
    "exp": (Exp, ()),
    "favor": (PositiveRandomFeatures, (4, 6)),
    "oprf": (OptimalRandomFeatures, (4, 6)),
    "clusters": (QueryClusters, (4, 6)),
}
CHANGES = {"forward": Forward, "scaled": Scaled, "queries and keys": Sides}


def drawn():
    generator = torch.Generator().manual_seed(0)
    shapes = ((2, 3, 9, d) for d in (4, 4, 5))
    return [
        torch.randn(s, generator=generator, dtype=torch.float64, device="cpu").to(torch.get_default_device())
        for s in shapes
    ]


def own(known, change, mixin):
    """A map whose class overrides methods of `known`, in its own body or by a class that stands before it."""
    base, arguments = KNOWN[known]
    if mixin:
        return type("Derived", (CHANGES[change], base), {})(*arguments).double()
    body = {name: x for name, x in vars(CHANGES[change]).items() if not name.startswith("__")}
    return type("Derived", (base,), body)(*arguments).double()


def both_sides(q, k, v, phi):
    decay = torch.full(k.shape[:3], -0.1, dtype=k.dtype, device=k.device)
    return linear_attention(q, k, v, phi, causal=False, log_decay=decay, log_decay_back=decay)


def steps(q, k, v, phi):
    state, outputs = None, []
    for i in range(q.shape[2]):
        o, state = step(*(x[:, :, i : i + 1] for x in (q, k, v)), phi, state)
        outputs.append(o)
    return torch.cat(outputs, 2)


def in_place(q, k, v, phi):
    state = LinearState.zeros(2, 3, 4, 5, dtype=q.dtype, device=q.device)
    return torch.cat([step(*(x[:, :, i : i + 1] for x in (q, k, v)), phi, state, inplace=True)[0] for i in range(9)], 2)


CALLS = {
    "causal": lambda *qkvf: linear_attention(*qkvf, causal=True),
    "not causal": lambda *qkvf: linear_attention(*qkvf, causal=False),
    "both sides": both_sides,
    "steps": steps,
    "in place": in_place,
    "hybrid": lambda q, k, v, phi: hybrid_attention(q, k, v, phi, window=2, causal=True),
}


@pytest.mark.parametrize("mixin", [False, True], ids=["", "mixed in"])
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("known", KNOWN)
def test_what_a_derived_class_overrides_is_computed(known, change, mixin):
    q, k, v = drawn()
    for name, call in CALLS.items():
        found, expected = (call(q, k, v, phi) for phi in (own(known, change, mixin), Own()))
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("base", [Elu, lambda: PositiveRandomFeatures(4, 6, seed=1)], ids=["elu", "favor"])
def test_a_derived_class_can_call_its_parent(base):
    known = base().double()

    class More(type(known)):
        def forward(self, x):
            return super().forward(x) + 1

    class Twice(type(known)):
        def scaled(self, x):
            features, scale = super().scaled(x)
            return 2 * features, scale

    more, twice = (type_(*known._arguments[0], **known._arguments[1]).double() for type_ in (More, Twice))
    q, k, v = drawn()
    expected = linear_attention(known(q) + 1, known(k) + 1, v, "identity", causal=True, normalize=False)
    torch.testing.assert_close(linear_attention(q, k, v, more, causal=True, normalize=False), expected)
    expected = 4 * linear_attention(q, k, v, known, causal=True, normalize=False)
    torch.testing.assert_close(linear_attention(q, k, v, twice, causal=True, normalize=False), expected)


def test_other_exponents_are_computed():
    class Sharper(PositiveRandomFeatures):
        def exponents(self, x):
            return super().exponents(1.5 * x)

    q, k, v = drawn()
    phi, plain = (kind(4, 6, seed=1).double() for kind in (Sharper, PositiveRandomFeatures))
    expected = linear_attention(1.5 * q, 1.5 * k, v, plain, causal=True)
    for wrap in (lambda x: x, lambda x: Reparametrized(x).double()):
        torch.testing.assert_close(linear_attention(q, k, v, wrap(phi), causal=True), expected)


def test_a_derived_class_that_computes_nothing_else_stays_in_the_kernels():
    class Named(PositiveRandomFeatures):
        def extra_repr(self):
            return "mine"

    class Again(Named):
        def exponents(self, x):
            return super().exponents(x)

        def projection(self, dtype):
            return super().projection(dtype)

    q, k, _ = drawn()
    assert Named(4, 6).projected(q, k) is not None
    assert Again(4, 6).projected(q, k) is not None
    assert type("Mine", (Elu,), {}).kernel == "elu"
    assert type("Mine", (Elu,), {"kernel": "relu", "forward": Relu.forward}).kernel == "relu"


class ByName(FeatureMap):
    """One class, whose instances name their function."""

    def __init__(self, kernel):
        super().__init__()
        self.kernel = kernel

    def num_features(self, head_dim):
        return head_dim


def test_two_maps_of_one_class_are_two_maps():
    q, k, v = drawn()
    for call in (CALLS["causal"], CALLS["not causal"], steps, CALLS["causal"]):
        for name, known in (("elu", Elu()), ("relu", Relu()), ("elu", Elu())):
            assert torch.equal(call(q, k, v, ByName(name)), call(q, k, v, known))
