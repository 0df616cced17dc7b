"""What ops refuse: errors are the caller's friend. Expected, got and remedy are asserted by a few words of each."""

import pytest
import torch

from tarnn import (
    ConvolutionState,
    DeltaState,
    Elu,
    ScanState,
    delta_rule,
    delta_step,
    diagonal_scan,
    diagonal_scan_step,
    hybrid_attention,
    linear_attention,
    selective_scan,
    selective_scan_step,
    short_convolution,
    short_convolution_step,
    softmax_attention,
    step,
)
from tarnn.feature_maps import FeatureMap, Identity
from tarnn.ops import LinearState, low_rank_delta_rule, low_rank_delta_step

pytestmark = [pytest.mark.refusals, pytest.mark.one_path]

x = torch.ones
NAN, HALF = torch.nan, LinearState(x(2, 2, 5, 3), x(2, 2, 5))
object.__setattr__(HALF, "z", None)  # what a runtime type checker would not let pass


class Made(FeatureMap):
    """Features as `make` makes them of queries, and keys as they are."""

    def __init__(self, make):
        super().__init__()
        self.make = make

    def queries(self, q):
        return self.make(q), None

    def scaled(self, x):
        return x, None


ATTENTION = {"q": x(2, 4, 6, 5), "k": x(2, 2, 6, 5), "v": x(2, 2, 6, 3), "causal": True}
ONE = {name: t[:, :, :1] for name, t in ATTENTION.items() if name != "causal"}
HYBRID = ATTENTION | {"feature_map": "elu", "window": 3}
DELTA = {name: ATTENTION[name] for name in "qkv"} | {"beta": x(2, 2, 6)}
DELTA_ONE = {name: t[:, :, :1] for name, t in DELTA.items()}
LOW_RANK = dict.fromkeys("qkab", x(2, 3, 6, 5)) | {"v": x(2, 3, 6, 7)}
DIAGONAL = {"x": x(2, 6, 5), "log_decay": -x(2, 6, 5)}
SELECTIVE = {"x": x(2, 6, 5), "dt": x(2, 6, 5), "A": -x(5, 3), "B": x(2, 6, 3), "C": x(2, 6, 3)}
CONVOLUTION = {"x": x(2, 3, 5), "weight": x(5, 4)}
EXPANDED = ConvolutionState(x(1, 3, 5).expand(2, 3, 5))
TWO, BOUNDS = x(2), "start with 0 | end with the number of packed tokens, 6"


def attention(linear: bool) -> list:
    """What both attentions refuse."""
    refused = [
        ({"q": x(4, 6, 5)}, "four axes each | got q (4, 6, 5) | unflatten"),
        ({"k": x(2, 2, 6, 7)}, "must share b, d | k (2, 2, 6, 7)"),
        ({"v": x(2, 2, 7, 3)}, "k and v also g and s | v (2, 2, 7, 3)"),
        ({"k": x(2, 3, 6, 5), "v": x(2, 3, 6, 3)}, "multiple of key/value heads | got 4 and 3"),
        ({"k": x(2, 2, 5, 5), "v": x(2, 2, 5, 3)}, "as many keys as queries | (2, 2, 5, 5) | pass state="),
        ({"key_mask": x(2, 5).bool()}, "key_mask must be (b, s) = (2, 6) | got (2, 5)"),
        ({"key_mask": x(2, 6)}, "bool, True = attend | got torch.float32 | mask.bool()"),
        ({"v": x(2, 2, 6, 3).double()}, "one floating dtype | torch.float32, torch.float64"),
        ({"cu_seqlens": torch.tensor([0, 6])}, "b = 1 | got b = 2"),
        ({"cu_seqlens": [0, 4]}, "cu_seqlens must be a tensor | got list"),
        ({"key_log_weight": x(2, 4, 6)}, "key_log_weight must be (b, g, s) = (2, 2, 6) | got (2, 4, 6)"),
    ]
    return [(linear_attention if linear else softmax_attention, ATTENTION, *row) for row in refused]


ROWS = [
    *attention(linear=True),
    *attention(linear=False),
    *(
        (
            linear_attention,
            {name: t[:1] if name in "qkv" else t for name, t in ATTENTION.items()},
            {"cu_seqlens": torch.tensor(cuts)},
            BOUNDS,
        )
        for cuts in ([0], [1, 6], [0, 4, 3, 6], [0, 5], [0, 7])
    ),
    *(
        (linear_attention, ATTENTION, *row)
        for row in (
            ({"log_decay": -x(4)}, "log_decay must be (g,) = (2,) | got (4,)"),
            ({"log_decay": -x(2, 2, 6, 3)}, "(2, 2, 6, 5), per feature | got (2, 2, 6, 3)"),
            ({"log_decay": -x(2, 2, 6, 5, 1)}, "got (2, 2, 6, 5, 1)"),
            ({"log_decay": -TWO, "causal": False}, "needs causal=True"),
            ({"state": LinearState.zeros(2, 4, 5, 3)}, "state's S must be (2, 2, 5, 3) | got (2, 4, 5, 3)"),
            ({"state": HALF}, "LinearState(S, z, M) with S and z"),
            ({"state": LinearState.zeros(2, 2, 5, 3).map(torch.Tensor.half)}, "in torch.float32 on | in torch.float16"),
            ({"feature_map": Identity()}, "Identity may give negative weights | normalize=False | Elu"),
            ({"feature_map": "elo"}, "one of | , elu, | got 'elo'. Did you mean 'elu'?"),
            ({"feature_map": "hedgehog"}, "parameters to be trained: make it yourself"),
            ({"feature_map": Elu}, "a module such as tarnn.Elu() | got <class"),
            ({"feature_map": Made(lambda q: q[..., :3])}, "as many features | got 3 and 5"),
            (
                {"feature_map": Made(torch.Tensor.double)},
                "precision of its input | Made made torch.float64 of torch.float32",
            ),
            ({"feature_map": Made(torch.Tensor.long)}, "made torch.int64 of torch.float32"),
            ({"feature_map": torch.nn.Flatten()}, "one token at a time | Flatten took (2, 4, 6, 5) to (2, 120)"),
            ({"k": x(2, 4, 6, 5), "v": x(2, 6, 6, 3)}, "a multiple"),
            ({"k": x(2, 4, 6, 5), "v": x(2, 2, 6, 3)}, "a multiple"),
            ({"k": x(2, 4, 6, 5), "v": x(2, 0, 6, 3)}, "a multiple"),
            ({"v": x(2, 4, 6, 3)}, "one number of heads"),
            ({"k": x(2, 4, 6, 5), "v": x(2, 8, 6, 3), "log_decay": -x(2, 4, 6)}, "(b, g, s) = (2, 8, 6)"),
            ({"normalize": "one"}, "True, False or \"at_least_one\" | got 'one'"),
            ({"normalize": "at_least_one", "eps": 1.0}, "takes no eps"),
            ({"normalize": "at_least_one", "feature_map": "favor"}, "takes the maps that kernels know"),
        )
    ),
    (
        step,
        ONE,
        {"q": x(2, 4, 2, 5), "k": x(2, 2, 2, 5), "v": x(2, 2, 2, 3)},
        "one token | (2, 4, 2, 5) | linear_attention",
    ),
    (step, ONE, {"inplace": True}, "inplace | LinearState.zeros"),
    *(
        (hybrid_attention, HYBRID, *row)
        for row in (
            ({"window": 0}, "window"),
            ({"window": True}, "window must be a whole number"),
            ({"window": 2.5}, "window must be a whole number"),
            ({"sinks": -1}, "sinks"),
            ({"slots": -1}, "slots"),
            ({"inplace": True}, "one token"),
            ({"far_until": -1}, "far_until"),
            ({"softcap": 0.0}, "softcap"),
            ({"softcap": NAN}, "softcap must be"),
            ({"scale": torch.inf}, "scale must be"),
            ({"far_bias": x(3)}, "far_bias must be | got (3,)"),
            ({"log_decay": TWO}, "log_decay must be ≤ 0"),
            ({"causal": False, "return_state": True}, "both sides"),
            ({"causal": "yes"}, "causal must be"),
            ({"cu_seqlens": [0, 4]}, "cu_seqlens must be a tensor | got list"),
            ({"exact_queries": [0]}, "exact_queries must be a tensor"),
            ({"q": x(2, 4, 6, 0), "k": x(2, 2, 6, 0), "feature_map": None}, "a head and a channel"),
        )
    ),
    *(
        (delta_rule, DELTA, *row)
        for row in (
            ({"q": x(4, 6, 5)}, "four axes each | got q (4, 6, 5) | unflatten"),
            ({"k": x(2, 2, 6, 7)}, "must share b and t, and q and k also d | k (2, 2, 6, 7)"),
            ({"v": x(2, 2, 5, 3)}, "must share b and t | v (2, 2, 5, 3) | pass state="),
            ({"q": x(2, 4, 6, 0), "k": x(2, 2, 6, 0)}, "d, which is 1 at least"),
            ({"v": x(2, 3, 6, 3)}, "heads must divide | got h = 4, g = 2, m = 3"),
            ({"v": x(2, 4, 6, 3)}, "heads must divide | got h = 4, g = 2, m = 4"),
            ({"q": x(2, 0, 6, 5), "k": x(2, 0, 6, 5), "v": x(2, 0, 6, 3)}, "got h = 0, g = 0, m = 0"),
            ({"v": x(2, 2, 6, 3).double()}, "share one floating dtype | float32, torch.float64"),
            ({"beta": 0.5}, "beta must be a tensor | got float"),
            ({"beta": x(2, 4, 6)}, "beta must be (b, n, t) = (2, 2, 6) | got (2, 4, 6)"),
            ({"beta": x(2, 2, 6).long()}, "beta must be floating | got torch.int64 | beta.float()"),
            ({"beta": 2.1 * x(2, 2, 6)}, "from 0 to 2 | got 2.1 to 2.1 | not the logits"),
            ({"beta": -x(2, 2, 6)}, "from 0 to 2 | got -1 to -1"),
            ({"beta": torch.tensor([NAN, 3.0] * 12).view(2, 2, 6)}, "from 0 to 2"),
            ({"log_decay": -x(2, 2, 6, 3)}, "(2,), | (2, 2, 6) or | (2, 2, 6, 5) | got (2, 2, 6, 3)"),
            ({"log_decay": -TWO.long()}, "log_decay must be floating"),
            ({"log_decay": 0.1 * x(2, 2, 6)}, "log_decay must be ≤ 0 | got 0.1 | Pass the logarithm"),
            ({"log_decay": x(2, 2, 6, 5)}, "log_decay must be ≤ 0"),
            ({"log_decay": TWO}, "log_decay must be ≤ 0"),
            ({"key_mask": x(2, 5).bool()}, "key_mask must be | = (2, 6) | got (2, 5)"),
            ({"key_mask": x(2, 6)}, "bool, True = attend | got torch.float32"),
            ({"cu_seqlens": torch.tensor([0, 6])}, "b = 1 | got b = 2"),
            ({"scale": NAN}, "scale must be a finite number, or None for 1/√d | got nan"),
            ({"normalize_qk": 0.0}, "normalize_qk must be False, True | or the number above 0 | got 0.0"),
            ({"state": DeltaState.zeros(2, 4, 5, 3)}, "S must be (2, 2, 5, 3) | got (2, 4, 5, 3)"),
            ({"state": DeltaState.zeros(2, 2, 5, 3, dtype=torch.bfloat16)}, "in torch.float32 | got | bfloat16"),
            ({"state": x(2, 2, 5, 3)}, "state must be a DeltaState, which delta_rule returns | got Tensor"),
        )
    ),
    (delta_step, DELTA, {}, "takes one token, q (b, h, 1, d) | got (2, 4, 6, 5) | delta_rule(state=…)"),
    (delta_step, DELTA_ONE, {"inplace": True}, "needs a state to write into | DeltaState.zeros"),
    (delta_step, DELTA_ONE, {"beta": 3 * x(2, 2, 1)}, "from 0 to 2"),
    *(
        (low_rank_delta_rule, LOW_RANK, *row)
        for row in (
            ({"v": x(2, 3, 9, 7)}, "takes q, k, a and b"),
            ({"a": x(2, 6, 5)}, "projection's"),
            ({"a": x(2, 3, 6, 4)}, "takes q, k, a and b"),
            ({"b": x(2, 3, 6, 5).half()}, "share one floating dtype"),
            ({"log_decay": -x(2, 6)}, "log_decay must be (h,)"),
            ({"key_mask": x(2, 6)}, "mask.bool"),
            ({"key_mask": x(2, 5).bool()}, "key_mask must be"),
            ({"cu_seqlens": torch.tensor([0, 6])}, "one packed row"),
            ({"k": 3}, "must be a tensor"),
            ({"state": DeltaState(x(2, 3, 5, 6))}, "fits the model"),
            ({"state": DeltaState(x(2, 3, 5, 7).double())}, "torch.float32"),
        )
    ),
    (low_rank_delta_step, LOW_RANK, {}, "takes one token"),
    (low_rank_delta_step, {name: t[:, :, :1] for name, t in LOW_RANK.items()}, {"inplace": True}, "needs a state"),
    *(
        (diagonal_scan, DIAGONAL, *row)
        for row in (
            ({"x": x(6, 5), "log_decay": x(6, 5)}, "takes x and log_decay (b, t, c) | got x (6, 5)"),
            ({"log_decay": -x(2, 5, 5)}, "log_decay (2, 5, 5)"),
            ({"log_decay": x(2, 6, 5).int()}, "log_decay must be of a floating type | got torch.int32"),
            ({"log_decay": -1.0}, "log_decay must be a tensor | got float"),
            ({"key_mask": x(2, 5).bool()}, "(2, 6) | got (2, 5)"),
            ({"key_mask": x(2, 6)}, "mask.bool()"),
            ({"cu_seqlens": torch.tensor([0, 6])}, "b = 1"),
            ({"x": x(1, 6, 5), "log_decay": -x(1, 6, 5), "cu_seqlens": torch.tensor([0, 5])}, "packed tokens, 6"),
            ({"state": ScanState.zeros(2, 5, 3)}, "h must be (2, 5) in torch.float32 | got (2, 5, 3)"),
            ({"state": ScanState.zeros(2, 5, dtype=torch.half)}, "in torch.float16"),
            ({"state": x(2, 5)}, "must be a ScanState, which a scan returns | got Tensor"),
        )
    ),
    *(
        (selective_scan, SELECTIVE, *row)
        for row in (
            ({"A": -x(3, 5)}, "A (c, n) | A (3, 5)"),
            ({"B": x(2, 5, 3)}, "B (2, 5, 3)"),
            ({"D": x(6, 5)}, "D (6, 5)"),
            ({"state": ScanState.zeros(1, 5, 3)}, "must be (2, 5, 3) | got (1, 5, 3)"),
        )
    ),
    (diagonal_scan_step, DIAGONAL, {}, "takes one token, x (b, 1, c) | diagonal_scan(state=…)"),
    (
        diagonal_scan_step,
        {name: t[:, :1] for name, t in DIAGONAL.items()},
        {"inplace": True},
        "a state to write into | ScanState.zeros",
    ),
    (selective_scan_step, SELECTIVE, {}, "takes one token, x (b, 1, c) | selective_scan(state=…)"),
    (
        selective_scan_step,
        {name: t if name == "A" else t[:, :1] for name, t in SELECTIVE.items()},
        {"inplace": True},
        "a state to write into | ScanState.zeros",
    ),
    *(
        (short_convolution, CONVOLUTION, *row)
        for row in (
            ({"x": x(3, 5)}, "x (b, t, c), three axes | got (3, 5)"),
            ({"weight": x(3, 4)}, "(c, width) with c = 5 | got (3, 4)"),
            ({"weight": x(5, 1, 4)}, "weight[:, 0]"),
            ({"weight": x(5, 0)}, "a width of 1 to 31"),
            ({"weight": x(5, 32)}, "a width of 1 to 31"),
            ({"weight": [1.0]}, "weight must be a tensor | got list"),
            ({"weight": None}, "takes x | and weight"),
            ({"bias": x(4)}, "bias must be (c,) = (5,) | got (4,)"),
            ({"x": x(2, 3, 5).long()}, "x must be of a floating dtype"),
            ({"activation": "gelu"}, "None or \"silu\" | got 'gelu'"),
            ({"causal": 1}, "causal must be True or False | got 1"),
            ({"key_mask": x(3, 5).bool()}, "(b, t)"),
            ({"cu_seqlens": torch.tensor([0, 3])}, "one packed row"),
            ({"x": x(1, 3, 5), "cu_seqlens": torch.tensor([0, 2])}, "end with the number"),
            ({"causal": False, "return_state": True}, "has no state"),
            ({"causal": False, "state": ConvolutionState.zeros(2, 4, 5)}, "has no state"),
            ({"state": ConvolutionState.zeros(2, 5, 5)}, "tokens must be (2, 3, 5) | got (2, 4, 5)"),
            (
                {"state": ConvolutionState.zeros(2, 4, 5, dtype=torch.float64)},
                "in torch.float32 on cpu | in torch.float64",
            ),
            ({"state": x(2, 3, 5)}, "must be a ConvolutionState"),
        )
    ),
    (short_convolution_step, CONVOLUTION, {}, "a step takes one token"),
    (short_convolution_step, CONVOLUTION | {"x": x(2, 1, 5)}, {"inplace": True}, "needs a state to write into"),
    (
        short_convolution_step,
        CONVOLUTION | {"x": x(2, 1, 5)},
        {"inplace": True, "state": EXPANDED},
        "memory of its own for each row",
    ),
]


@pytest.mark.parametrize(
    ("op", "good", "change", "words"), ROWS, ids=[f"{op.__name__}: {words[:40]}" for op, *_, words in ROWS]
)
def test_ops_say_what_was_expected_and_what_they_got(op, good, change, words):
    with pytest.raises((ValueError, TypeError)) as raised:
        op(**good | change)
    assert [word for word in words.split(" | ") if word not in str(raised.value)] == [], raised.value


def test_a_call_that_was_fine_excuses_no_other():
    """Checks of plain calls are skipped where the same call has passed them: same in shapes, dtypes, map, options, state."""

    class Signed(Elu):
        positive = False

    q, k, v = (torch.randn(2, 3, 1, n) for n in (4, 4, 5))
    state = LinearState.zeros(2, 3, 4, 5)
    for _ in range(2):
        linear_attention(q, k, v, Elu(), causal=True)
        step(q, k, v, Elu(), state)
    wrong = [
        ({"q": q.double()}, "one floating dtype"),
        ({"k": k[:1]}, "must share b"),
        ({"v": v[:, :2]}, "v a multiple of it"),
        ({"q": q[:, :2]}, "multiple of key/value heads"),
        ({"feature_map": Signed()}, "normalize=False"),
        ({"state": LinearState(state.S.double(), state.z.double())}, "the state's S"),
        ({"state": LinearState(state.S, state.z[:1])}, "the state's z"),
    ]
    for change, sentence in wrong:
        arguments = {"q": q, "k": k, "v": v, "feature_map": Elu(), "state": state} | change
        for op, causal in ((step, {}), (linear_attention, {"causal": True})):
            with pytest.raises((ValueError, TypeError), match=sentence):
                op(**arguments, **causal)
