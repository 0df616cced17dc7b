"""Thousands of drawn calls of the delta rule against its definition in float64: outputs, states and all gradients.

    python tests/fuzz_delta.py                          3,000 calls, a minute per thousand
    python tests/fuzz_delta.py --calls 300 --seed 7
    python tests/fuzz_delta.py --only 471               one call again, with all its errors

What an error is, and how large it may be, is as in `fuzz.py`: in float64 at most 1e-11 (gradients 1e-8), else twice the error
of the definition, token by token in the same dtype; where one call exceeds it, the worst of 32 more counts: half of them the
same call with inputs changed in their last place, half of them other numbers of its kind. Besides, to the bit: nothing later
changes an earlier output, a prompt cut at a multiple of 64 has the bits of the whole, and of compiled kernels the number of
threads changes nothing.
"""

import argparse
import math
import sys
import time
from dataclasses import replace

import torch
from fuzz import KIN, set_up
from support.delta_fuzz_calls import DTYPES, Call, Drawn, draw

from tarnn.kernels import contract
from tarnn.kernels.cpu import library
from tarnn.numerics import wide

KINDS = ("o", "S", "gradients")
LIMITS = {"o": 1e-11, "S": 1e-11, "gradients": 1e-8}  # in float64


def errors(got: list[torch.Tensor], exact: list[torch.Tensor]) -> dict[str, float]:
    """The largest error of each kind over the largest expected value; ∞ where something is not a number that should be."""
    found, largest = dict.fromkeys(KINDS, 0.0), dict.fromkeys(KINDS, 1e-6)
    for i, y in enumerate(exact):
        if y.numel():
            largest[KINDS[min(i, 2)]] = max(largest[KINDS[min(i, 2)]], y.abs().max().item())
    for i, (x, y) in enumerate(zip(got, exact, strict=True)):
        assert x.shape == y.shape, (i, x.shape, y.shape)
        if y.numel():
            kind, too_large = KINDS[min(i, 2)], y.abs() >= 0.99 * torch.finfo(x.dtype).max  # for this dtype
            error = (x.double() - y).abs().masked_fill(too_large, 0.0).max().item() / largest[kind]
            found[kind] = max(found[kind], math.inf if math.isnan(error) else error)
    return found


def allowed(call: Call, exact: list[torch.Tensor]) -> dict[str, float]:
    """Twice the definition's own error in this dtype (of states: in theirs), and one rounding of the result."""
    dtype = DTYPES[call.drawn.dtype]
    in_wide = errors(call.definition(wide(dtype)), exact)
    narrow = in_wide if wide(dtype) == dtype else errors(call.definition(dtype), exact)
    kinds = {"o": (narrow, dtype), "S": (in_wide, wide(dtype)), "gradients": (narrow, dtype)}
    return {kind: 2 * theirs[kind] + torch.finfo(of).eps for kind, (theirs, of) in kinds.items()}


def judge(drawn: Drawn) -> tuple[dict[str, float], dict[str, float], str]:
    """A call's errors, what they may be, and in words what is wrong ("" if nothing is)."""
    call, dtype = Call(drawn), DTYPES[drawn.dtype]
    exact = call.definition(torch.float64)
    if drawn.way == "stepped in place":
        exact = [*exact[:2], *(torch.zeros_like(x) for x in exact[2:])]
    limits = LIMITS if dtype == torch.float64 else allowed(call, exact)
    with set_up(drawn):
        ours = call.ours()
        wrong = to_the_bit(call, ours)
    mine = errors(ours, exact)
    if dtype != torch.float64 and exceeded(mine, limits):
        near = [call.nearby(i) for i in range(KIN)]
        kin = [Call(replace(drawn, seed=drawn.seed + i)) for i in range(1, KIN + 1)]
        others = [
            limits,
            *(allowed(other, call.definition(torch.float64)) for other in near),
            *(allowed(other, other.definition(torch.float64)) for other in kin),
        ]
        one_by_one = math.sqrt(drawn.d) * torch.finfo(wide(dtype)).eps / 2
        limits = {kind: max(limit[kind] for limit in others) + one_by_one for kind in KINDS}
    wrong += [f"{kind}: error {mine[kind]:.2g}, at most {limits[kind]:.2g}" for kind in exceeded(mine, limits)]
    return mine, dict(limits), "; ".join(wrong)


def exceeded(mine: dict[str, float], limits: dict[str, float]) -> list[str]:
    return [kind for kind in KINDS if mine[kind] > limits[kind] or not math.isfinite(mine[kind])]


def to_the_bit(call: Call, ours: list[torch.Tensor]) -> list[str]:
    """The laws that know no rounding, each tried on a part of the calls. The last one spoils the call's inputs."""
    drawn, wrong = call.drawn, []
    if drawn.number % 4 == 0 and contract.named("cpu", "delta") is not None and library.available():
        torch.set_num_threads(3 - drawn.threads)
        if not same_bits(call.ours(), ours):
            wrong.append("another number of threads, other bits")
        torch.set_num_threads(drawn.threads)
    if drawn.way == "whole" and drawn.t > 64 and not drawn.tiny_chunks:
        pieces = call.in_two(call.tensors, 64 * (drawn.t // 64))
        if not same_bits(pieces, ours[:2]):
            wrong.append("cut at a multiple of 64, other bits")
    if drawn.number % 4 == 1 and drawn.way == "whole":
        cut = drawn.t // 2
        for name in "qkv":
            x = call.tensors[name]
            (x[:, :1] if x.stride(1) == 0 else x)[:, :, cut:] = 0.3
        if not torch.equal(call.ours()[0][:, :, :cut], ours[0][:, :, :cut]):
            wrong.append("an output depends on what comes later")
    return wrong


def same_bits(xs: list[torch.Tensor], ys: list[torch.Tensor]) -> bool:
    return all(torch.equal(x.nan_to_num(7.0), y.nan_to_num(7.0)) for x, y in zip(xs, ys, strict=True))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--calls", type=int, default=3000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--unjudged", action="store_true", help="only compute them: sanitizers do the judging")
    parser.add_argument("--only", type=int, help="the number of one call to try again")
    given = parser.parse_args()
    torch.use_deterministic_algorithms(True)  # fills torch.empty with NaN: what isn't written shows
    if given.only is not None:
        drawn = draw(given.seed, given.only)
        mine, limits, wrong = judge(drawn)
        print(drawn, f"errors  {mine}", f"allowed {limits}", wrong or "as it should be", sep="\n")
        return bool(wrong)
    print(f"kernels: {library.status().path}", flush=True)
    failed, shares, start = 0, dict.fromkeys(KINDS, 0.0), time.perf_counter()
    for number in range(given.calls):
        drawn = draw(given.seed, number)
        if given.unjudged:
            with set_up(drawn):
                Call(drawn).ours()
            continue
        mine, limits, wrong = judge(drawn)
        shares = {kind: max(share, mine[kind] / limits[kind]) for kind, share in shares.items()}
        if wrong:
            failed += 1
            print(f"\n{wrong}\n  {drawn}", flush=True)
        if number % 100 == 99:
            print(f"\r{number + 1} of {given.calls}, {failed} failed ", end="", flush=True)
    seconds = time.perf_counter() - start
    print(f"\n{given.calls} calls in {seconds:.0f} s, {failed} failed; largest shares of what is allowed: {shares}")
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
