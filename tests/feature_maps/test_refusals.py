"""What feature maps refuse: expected, got, remedy."""

import pytest
import torch
from torch import nn

from tarnn import feature_maps as maps
from tarnn.feature_maps import as_feature_map, make
from tarnn.feature_maps.by_name import described, map_for

ONES = torch.ones(1, 2, 3, 5)
CUTS = torch.tensor([0, 3], dtype=torch.int32)
REFUSALS = {
    "an offset": (lambda: maps.Polynomial2(-1.0), "offset ≥ 0.*got -1.0"),
    "dpfp": (lambda: maps.Dpfp(0), "nu ≥ 1; got 0"),
    "dpfp of few channels": (lambda: maps.Dpfp(4)(torch.ones(2)), "nu < 2·head_dim = 4; got nu = 4"),
    "odd hedgehog": (lambda: maps.Hedgehog(6, num_features=7), "even num_features.*got 7"),
    "wide hedgehog": (lambda: maps.Hedgehog(6)(ONES), r"head_dim = 6; got \(1, 2, 3, 5\)"),
    "heads of hedgehog": (lambda: maps.Hedgehog(5, num_heads=3)(ONES), r"3 heads needs.*got \(1, 2, 3, 5\)"),
    "taylor": (lambda: maps.Taylor(0.0), "scale above 0; got 0.0"),
    "cosformer": (lambda: maps.CosFormer(0), "max_length ≥ 1; got 0"),
    "no positions": (lambda: maps.CosFormer(4)(ONES), r"pass phi.at\(positions\)"),
    "many positions": (lambda: maps.CosFormer(4).at(torch.arange(5)), "at most 4 positions; got 5"),
    "few positions": (
        lambda: maps.CosFormer(4).at(torch.arange(2))(torch.ones(3, 5)),
        r"told 2 positions; got \(3, 5\)",
    ),
    "a function": (lambda: maps.GeneralizedFeatures("tan"), "function = relu, exp.*of your own; got 'tan'"),
    "epsilon": (lambda: maps.GeneralizedRandomFeatures(4, epsilon=-1.0), "epsilon ≥ 0; got -1.0"),
    "scale": (lambda: maps.PositiveRandomFeatures(4, scale=0.0), "scale above 0; got 0.0"),
    "odd pairs": (lambda: maps.HyperbolicRandomFeatures(4, 7), "num_features must be even; got 7"),
    "odd waves": (lambda: maps.TrigonometricRandomFeatures(4, 7), "num_features must be even; got 7"),
    "sigma": (lambda: maps.GaussianRandomFeatures(4, 8, sigma=0.0), "sigma above 0; got 0.0"),
    "head_dim": (lambda: maps.PositiveRandomFeatures(4)(torch.ones(2, 5)), r"made for head_dim = 4; got \(2, 5\)"),
    "directions": (lambda: maps.PositiveRandomFeatures(6, directions="haar"), "directions = orthogonal.*got 'haar'"),
    "hadamard": (lambda: maps.PositiveRandomFeatures(6, directions="hadamard"), "power of two; got 6"),
    "norms": (lambda: maps.PositiveRandomFeatures(6, norms="one"), "norms = chi, fixed; got 'one'"),
    "seed": (lambda: maps.PositiveRandomFeatures(6, seed=-1), "0 ≤ seed < 2⁶³; got -1"),
    "no features": (lambda: maps.PositiveRandomFeatures(6, 0), "num_features ≥ 1; got 6, 0"),
    "A": (lambda: maps.OptimalRandomFeatures(4, A=0.125), "needs A < 1/8"),
    "fit": (lambda: maps.OptimalRandomFeatures(4, fit="often"), "fit = calibrated, call; got 'often'"),
    "heads": (lambda: maps.SderfFeatures(4, num_heads=0), "num_heads ≥ 1; got 0"),
    "heads of q": (
        lambda: maps.OptimalRandomFeatures(5, num_heads=3).queries(ONES),
        r"3 heads needs.*got \(1, 2, 3, 5\)",
    ),
    "least": (lambda: maps.DataAwareRandomFeatures(4, least=0), "0 < least ≤ 1; got 0"),
    "covariances": (lambda: maps.SderfFeatures(5).fitted(ONES, ONES, cu_seqlens=CUTS), "packed sequences are not kept"),
    "moved": (lambda: maps.Reparametrized(nn.Identity()), "map of softmax's kernel.*got Identity"),
    "moved otherwise": (
        lambda: maps.Reparametrized(maps.OptimalRandomFeatures(4, num_heads=2), num_heads=3),
        r"fitted alike.*\('calibrated', 3\) and \('calibrated', 2\)",
    ),
    "one side": (lambda: maps.Reparametrized(maps.PositiveRandomFeatures(5))(ONES), r"\.queries\(q\) and \.keys\(k\)"),
    "a name": (lambda: make("favour", head_dim=8), "must be one of clusters, .*'favour'. Did you mean 'favor'"),
    "an option": (lambda: make("dpfp", head_dim=8, mu=2), "'dpfp' has no option 'mu'; it takes nu"),
    "a value": (lambda: make("dpfp", head_dim=8, nu="2"), "can't be made with {'nu': '2'}"),
    "no length": (lambda: make("cosformer", head_dim=8), "the longest sequence: max_length="),
    "a name for h": (lambda: make("generalized_random", head_dim=8, h="relu"), "a function of your own, or none"),
    "a class": (lambda: as_feature_map(nn.ReLU, head_dim=8), "a name .*or a module such as"),
    "a number": (lambda: as_feature_map(3, head_dim=8), "got 3"),
    "no name": (lambda: described(as_feature_map(nn.ReLU(), head_dim=8)), "OwnMap has no name.*register"),
    "to be trained": (lambda: map_for("hedgehog", torch.ones(1, 4)), r"to be trained: make it.*Hedgehog\(…\)"),
}


@pytest.mark.refusals
@pytest.mark.parametrize("case", REFUSALS)
def test_what_is_refused(case):
    call, words = REFUSALS[case]
    with pytest.raises(TypeError if case in ("a class", "a number") else ValueError, match=words):
        call()
