"""Errors are the caller's friend: expected, got, remedy."""

import pytest
import torch

from tarnn import feature_maps
from tarnn.feature_maps import Elu
from tarnn.ops import LinearState, linear_attention, softmax_attention, step
from tarnn.ops.linear import arguments

pytestmark = [pytest.mark.refusals, pytest.mark.one_path]


def x(*shape, dtype=torch.float32):
    return torch.ones(*shape, dtype=dtype)


class Made(feature_maps.FeatureMap):
    """Features as `make` makes them of queries, and keys as they are."""

    def __init__(self, make):
        super().__init__()
        self.make = make

    def queries(self, q):
        return self.make(q), None

    def scaled(self, x):
        return x, None


Q, K, V = x(2, 4, 6, 5), x(2, 2, 6, 5), x(2, 2, 6, 3)
BAD = {
    "three axes": ({"q": x(4, 6, 5)}, r"four axes each; got q \(4, 6, 5\).*unflatten"),
    "widths differ": ({"k": x(2, 2, 6, 7)}, r"must share b, d.*k \(2, 2, 6, 7\)"),
    "k and v differ": ({"v": x(2, 2, 7, 3)}, r"k and v also g and s.*v \(2, 2, 7, 3\)"),
    "heads": ({"k": x(2, 3, 6, 5), "v": x(2, 3, 6, 3)}, r"multiple of key/value heads; got 4 and 3"),
    "fewer keys": ({"k": x(2, 2, 5, 5), "v": x(2, 2, 5, 3)}, r"as many keys as queries.*\(2, 2, 5, 5\).*pass state="),
    "mask shape": ({"key_mask": x(2, 5).bool()}, r"key_mask must be \(b, s\) = \(2, 6\); got \(2, 5\)"),
    "mask dtype": ({"key_mask": x(2, 6)}, r"bool, True = attend; got torch.float32.*mask.bool\(\)"),
    "dtypes": ({"v": V.double()}, r"share one floating dtype; got torch.float32, torch.float32, torch.float64"),
    "packed batch": ({"cu_seqlens": torch.tensor([0, 6])}, r"b = 1 .*got b = 2"),
    "log-weight": (
        {"key_log_weight": x(2, 4, 6)},
        r"key_log_weight must be \(b, g, s\) = \(2, 2, 6\).*got \(2, 4, 6\)",
    ),
}
HALF = LinearState(x(2, 2, 5, 3), x(2, 2, 5))
object.__setattr__(HALF, "z", None)  # what a runtime type checker would not let pass
ONLY_LINEAR = {
    "decay shape": ({"log_decay": -x(4)}, r"log_decay must be \(g,\) = \(2,\).*got \(4,\)"),
    "decay channels": ({"log_decay": -x(2, 2, 6, 3)}, r"\(2, 2, 6, 5\), per feature; got \(2, 2, 6, 3\)"),
    "decay, not causal": ({"log_decay": -x(2), "causal": False}, r"needs causal=True"),
    "state": ({"state": LinearState.zeros(2, 4, 5, 3)}, r"state's S must be \(2, 2, 5, 3\).*got \(2, 4, 5, 3\)"),
    "decay of five axes": ({"log_decay": -x(2, 2, 6, 5, 1)}, r"got \(2, 2, 6, 5, 1\)"),
    "half a state": ({"state": HALF}, r"LinearState\(S, z, M\) with S and z"),
    "state dtype": (
        {"state": LinearState.zeros(2, 2, 5, 3).map(torch.Tensor.half)},
        r"in torch.float32 on .*; got .* in torch.float16",
    ),
    "signed map": (
        {"feature_map": feature_maps.Identity()},
        r"Identity may give negative weights.*normalize=False.*Elu",
    ),
    "no map's name": ({"feature_map": "elo"}, r"one of .*, elu, .*; got 'elo'. Did you mean 'elu'\?"),
    "a map to be trained": ({"feature_map": "hedgehog"}, r"parameters to be trained: make it yourself"),
    "a map's class": ({"feature_map": feature_maps.Elu}, r"a module such as tarnn.Elu\(\); got <class"),
    "a map of two widths": ({"feature_map": Made(lambda q: q[..., :3])}, r"as many features; got 3 and 5"),
    "a map to float64": (
        {"feature_map": Made(torch.Tensor.double)},
        r"precision of its input; Made made torch.float64 of torch.float32",
    ),
    "a map to whole numbers": ({"feature_map": Made(torch.Tensor.long)}, r"made torch.int64 of torch.float32"),
    "odd map": ({"feature_map": torch.nn.Flatten()}, r"one token at a time; Flatten took \(2, 4, 6, 5\) to \(2, 120\)"),
}


@pytest.mark.parametrize("name", [*BAD, *ONLY_LINEAR])
def test_linear_attention_says_what_is_wrong(name):
    change, message = {**BAD, **ONLY_LINEAR}[name]
    with pytest.raises((ValueError, TypeError), match=message):
        linear_attention(**{"q": Q, "k": K, "v": V, "causal": True, **change})


@pytest.mark.parametrize("name", BAD)
def test_softmax_attention_says_the_same(name):
    change, message = BAD[name]
    with pytest.raises((ValueError, TypeError), match=message):
        softmax_attention(**{"q": Q, "k": K, "v": V, "causal": True, **change})


@pytest.mark.parametrize("cuts", [[0], [1, 6], [0, 4, 3, 6], [0, 5], [0, 7]])
def test_bad_cu_seqlens(cuts):
    one = [t[:1] for t in (Q, K, V)]
    with pytest.raises(ValueError, match=r"start with 0, never fall, and end with the number of packed tokens, 6; got"):
        linear_attention(*one, causal=True, cu_seqlens=torch.tensor(cuts, dtype=torch.int32))


def test_a_call_that_was_fine_excuses_no_other():
    """Checks of plain calls are skipped where the same call has passed them: same in shapes, dtypes, map, options, state."""

    class Signed(Elu):
        positive = False

    q, k, v = (torch.randn(2, 3, 1, n) for n in (4, 4, 5))
    state = LinearState.zeros(2, 3, 4, 5)
    for _ in range(2):
        linear_attention(q, k, v, Elu(), causal=True)
        step(q, k, v, Elu(), state)
    other = LinearState(state.S.double(), state.z.double())
    wrong = [
        ({"q": q.double()}, "one floating dtype"),
        ({"k": k[:1]}, "must share b"),
        ({"v": v[:, :2]}, "v a multiple of it"),
        ({"q": q[:, :2]}, "multiple of key/value heads"),
        ({"feature_map": Signed()}, "normalize=False"),
        ({"state": other}, "the state's S"),
        ({"state": LinearState(state.S, state.z[:1])}, "the state's z"),
    ]
    for change, sentence in wrong:
        arguments = {"q": q, "k": k, "v": v, "feature_map": Elu(), "state": state} | change
        with pytest.raises((ValueError, TypeError), match=sentence):
            step(**arguments)
        with pytest.raises((ValueError, TypeError), match=sentence):
            linear_attention(**arguments, causal=True)


def test_the_calls_that_are_remembered_are_not_without_bound(monkeypatch):
    monkeypatch.setattr(arguments, "_MOST_FINE", 3)
    for t in range(1, 9):
        q = torch.randn(1, 1, t, 2)
        linear_attention(q, q, q, Elu(), causal=True)
    assert len(arguments._FINE) <= 3
