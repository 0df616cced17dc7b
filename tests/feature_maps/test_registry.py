"""Names of feature maps, and the door where anything becomes a map."""

import copy

import pytest
import torch
from torch import nn

from tarnn import feature_maps
from tarnn.feature_maps import FeatureMap, as_feature_map, make, names, options_of, register
from tarnn.feature_maps.by_name import described, map_for
from tarnn.feature_maps.registry import MAPS

MODEL = {"head_dim": 4, "num_heads": 2, "max_length": 9}


def test_every_map_that_can_be_had_has_a_name():
    bases = {"FeatureMap", "RandomFeatureMap", "OwnMap", "Reparametrized"}  # the last is said by options
    classes = {x for x in feature_maps.__all__ if isinstance(getattr(feature_maps, x), type)} - bases
    assert {MAPS[name].kind.__name__ for name in names()} == classes
    assert names() == sorted(names())


@pytest.mark.parametrize("name", names())
def test_a_made_map_describes_itself(name):
    """From a map back to the name and the options that make the same map."""
    made = make(name, **MODEL)
    found, options, of_model = described(made)
    assert set(options) <= options_of(found)
    assert {key: MODEL[key] for key in of_model} == of_model
    again = make(found, **MODEL | of_model, **options)
    assert repr(again) == repr(made)
    assert [x.shape for x in again.state_dict().values()] == [x.shape for x in made.state_dict().values()]


def test_options_given_in_any_way_are_found_again():
    phi = feature_maps.PositiveRandomFeatures(8, 24, seed=3, directions="iid")
    expected = {"num_features": 24, "seed": 3, "directions": "iid"}
    assert described(phi) == ("favor", expected, {"head_dim": 8})
    assert described(copy.deepcopy(phi)) == described(phi)
    moved = feature_maps.Reparametrized(phi, num_heads=2, balance=False)
    moves = {"centre": True, "balance": False}
    assert described(moved) == ("favor", expected | moves, {"head_dim": 8, "num_heads": 2})


def test_centring_is_an_option_of_maps_of_softmax_only():
    made = make("favor", head_dim=8, num_heads=3, num_features=10, seed=5, centre=True)
    assert isinstance(made, feature_maps.Reparametrized)
    assert (made.centre, made.balance, made.num_heads, made.feature_map.num_draws) == (True, False, 3, 10)
    assert {name for name in names() if "centre" in options_of(name)} == {
        "dark",
        "favor",
        "hyperbolic",
        "smreg",
        "oprf",
        "saderf",
        "sderf",
        "trigonometric",
    }
    with pytest.raises(ValueError, match="'elu' has no option 'centre'; it takes none"):
        make("elu", head_dim=8, centre=True)


def test_a_module_becomes_a_map_and_a_map_stays_itself():
    module = nn.Sequential(nn.Linear(4, 6), nn.Softplus()).double()
    phi = as_feature_map(module, head_dim=4)
    assert isinstance(phi, FeatureMap)
    assert as_feature_map(phi, head_dim=4) is phi
    assert (phi.num_features(4), phi.positive) == (6, True)
    x = torch.randn(2, 3, 5, 4, dtype=torch.float64)
    assert torch.equal(phi(x), module(x))
    assert repr(phi).startswith("Sequential(")


def test_an_undeclared_sign_is_tried_and_a_declared_one_believed():
    class Signed(nn.Module):
        def forward(self, x):
            return x

    class Declared(Signed):
        positive = True

    class Outer(nn.Module):
        """Signed features whose products are never negative."""

        def forward(self, x):
            return (x[..., :, None] * x[..., None, :]).flatten(-2)

    with pytest.warns(UserWarning, match=r"Signed gave negative weights .* pass normalize=False, or declare"):
        as_feature_map(Signed(), head_dim=4).check_positive(4)
    as_feature_map(Declared(), head_dim=4).check_positive(4)
    as_feature_map(Outer(), head_dim=4).check_positive(4)
    state = torch.get_rng_state()
    as_feature_map(Outer(), head_dim=4).num_features(4)
    assert torch.equal(torch.get_rng_state(), state)  # trying draws nothing from the global generator


def test_a_name_given_to_an_op_is_one_map():
    x = torch.randn(1, 2, 3, 8)
    with torch.inference_mode(), torch.device("meta"):
        phi = map_for("favor", x)
    assert phi is map_for("favor", x)
    assert torch.equal(phi.omega, feature_maps.PositiveRandomFeatures(8, seed=0).omega)
    phi(x.requires_grad_()).sum().backward()  # no inference tensor
    assert x.grad.isfinite().all()


def test_a_map_of_ones_own_with_a_name():
    try:

        @register("test_cosh")
        class Cosh(FeatureMap):
            def __init__(self, head_dim: int, sharpness: float = 1.0):
                super().__init__()
                self.head_dim, self.sharpness = head_dim, sharpness

            def num_features(self, head_dim):
                return 2 * head_dim

            def forward(self, x):
                return torch.cat([(self.sharpness * x).exp(), (-self.sharpness * x).exp()], dim=-1)

        assert "test_cosh" in names()
        assert make("test_cosh", head_dim=3, sharpness=0.5).sharpness == 0.5
        assert options_of("test_cosh") == {"sharpness"}
        assert described(Cosh(3, 0.5)) == ("test_cosh", {"sharpness": 0.5}, {"head_dim": 3})
        with pytest.raises(ValueError, match=r"called 'test_cosh' already: .*Cosh"):
            register("test_cosh")(nn.ReLU)
    finally:
        del MAPS["test_cosh"]
