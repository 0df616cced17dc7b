"""Calls that the compiled kernels are tried with: every mode, of any size and dtype."""

from dataclasses import replace

from fuzz import judge

from support.fuzz_calls import KERNEL_DTYPES, WIDEST, Drawn
from tarnn.kernels.cpu import library

CALL = Drawn(
    number=0, seed=0, b=2, g=2, r=2, t=41, s=41, d=17, e=33, dtype=WIDEST, feature_map="elu", causal=True,
    normalize=True, masked=False, junk="", decay="none", weighted=False, options_narrow=False, spread=1.0,
    way="whole", layouts=("contiguous",) * 4, state_grads=True, tiny_chunks=False, threads=1,
)  # fmt: skip
MODES = {
    "causal": {},
    "full": {"causal": False, "feature_map": "relu"},
    "full, weighted": {"causal": False, "weighted": True, "masked": True, "junk": "nan"},
    "decay a head": {"decay": "head", "feature_map": "exp"},
    "decay a token, weighted": {"decay": "token", "weighted": True, "masked": True, "junk": "nan"},
    "decay a channel": {"decay": "channel", "feature_map": "squared_relu"},
    "decay a channel, weighted": {"decay": "channel", "weighted": True, "masked": True},
    "unnormalised": {"feature_map": "identity", "normalize": False, "masked": True},
    "random features": {"feature_map": "positive", "m": 23, "masked": True, "junk": "nan"},
    "full, random features": {"feature_map": "optimal", "m": 40, "causal": False, "weighted": True},
    "random features, decay": {"feature_map": "hyperbolic", "m": 18, "decay": "token", "normalize": False},
    "random relu": {"feature_map": "random relu", "m": 19, "decay": "channel"},
    "full, random relu": {"feature_map": "random relu", "m": 32, "causal": False, "masked": True, "junk": "nan"},
}
DTYPES = list(dict.fromkeys(KERNEL_DTYPES))


def drawn(mode: str, **words) -> Drawn:
    call = replace(CALL, **MODES[mode] | words)
    return replace(call, s=call.t) if call.causal else call


def holds(mode: str, **words) -> None:
    wrong = judge(drawn(mode, **words))[2]
    assert not wrong, wrong


def multiplied_in_bfloat16(call: Drawn) -> bool:
    """Whether the factors of a call's products are rounded: in the kernels for AVX512-BF16, of what they compute in bfloat16."""
    return call.dtype == "bfloat16" and call.causal and library.multiplies_in_bfloat16() and call.decay != "channel"


def same_bits(xs, ys) -> bool:
    """Of tensor after tensor, NaN being equal to itself."""
    return len(xs) == len(ys) > 0 and all(
        x.dtype == y.dtype and x.shape == y.shape and bool(((x == y) | (x.isnan() & y.isnan())).all())
        for x, y in zip(xs, ys)
    )
