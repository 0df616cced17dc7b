"""Thousands of drawn calls of an op against its definition in float64: outputs, states and gradients.

    python tests/fuzz.py --calls 10000                       linear attention
    python tests/fuzz.py --first 4711 --calls 1              one call again
    python tests/fuzz.py hybrid --calls 10000 --out /tmp/fuzz.json          another op: a row of `support/drawn_calls.py`

It prints the worst, and exits with 1 where one errs more than what may be. Of linear attention:
An error is the largest difference over the largest expected value (of gradients: over the largest of any). In float64
at most 1e-11, of gradients 1e-8. In a narrower dtype at most twice the error of the definition computed in that dtype,
and one unit in the last place for the rounding of the result. One such error is luck, above all where terms cancel (a
feature of a query that is almost 0 makes all of its gradient uncertain): if a call exceeds it, the worst of 32 more
counts, half of them the same call with its inputs changed in their last place, half of them calls of its kind (other
numbers in the same tensors), and √f/2 units more: the kernels add f features one after the other, which rounds so much
as a rule (Higham and Mary 2019, doi 10.1137/18M1226312), and torch in blocks. States are sums in float32, and judged as such;
where the processor multiplies in bfloat16 (causal calls), S and all gradients as those of the definition computed in it, and
outputs of random features as those of features that were rounded to it.
Besides, to the bit: the number of threads changes nothing, and nothing later changes an earlier output.
"""

import argparse
import contextlib
import json
import math
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

import torch
from support.chunks import tiny_chunks
from support.drawn_calls import OPS, drawn as drawn_call, excess
from support.fuzz_calls import DTYPES, Call, Drawn, draw
from tqdm import tqdm

from tarnn.cli.machine import machine_facts
from tarnn.kernels.cpu import library
from tarnn.numerics import wide

LINEAR = "linear"
KINDS = ("o", "S", "z", "gradients")
LIMITS = {"o": 1e-11, "S": 1e-11, "z": 1e-11, "gradients": 1e-8}  # in float64
KIN = 16


@contextlib.contextmanager
def set_up(drawn: Drawn):
    """Chunks and threads as drawn; the usual ones again afterwards."""
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(drawn.threads)
        with tiny_chunks() if drawn.tiny_chunks else contextlib.nullcontext():
            yield
    finally:
        torch.set_num_threads(threads)


def errors(got: list[torch.Tensor], exact: list[torch.Tensor]) -> dict[str, float]:
    """The largest error of each kind; ∞ where something is not a number that should be. What is expected below the
    smallest normal number of its dtype counts as that."""
    scale = max([1e-6, *(x.abs().max().item() for x in exact[3:] if x.numel())])
    found = dict.fromkeys(KINDS, 0.0)
    for i, (x, y) in enumerate(zip(got, exact)):
        assert x.shape == y.shape, (i, x.shape, y.shape)
        if not y.numel():
            continue
        top = torch.finfo(x.dtype).max
        difference = (x.double() - y).abs().masked_fill(y.abs() >= top * 0.99, 0.0)  # what this dtype can't hold
        least = max(torch.finfo(x.dtype).tiny, 1e-30)
        error = difference.max().item() / (scale if i >= 3 else max(y.abs().max().item(), least))
        kind = KINDS[min(i, 3)]
        found[kind] = max(found[kind], math.inf if math.isnan(error) else error)
    return found


def judge(
    drawn: Drawn, least: Mapping[str, float] = MappingProxyType({})
) -> tuple[dict[str, float], dict[str, float], str]:
    """A call's errors, what they may be (some kinds at least so much), and in words what is wrong ("" if nothing is)."""
    call, dtype = Call(drawn), DTYPES[drawn.dtype]
    exact = call.definition(torch.float64)
    limits = LIMITS if dtype == torch.float64 else allowed(call, exact)
    with set_up(drawn):
        ours = call.ours()
        wrong = to_the_bit(call, ours)
    mine = errors(ours, exact)
    limits = {kind: max(limit, least.get(kind, 0.0)) for kind, limit in limits.items()}
    if dtype != torch.float64 and exceeded(mine, limits):
        near = [call.nearby(i) for i in range(KIN)]
        kin = [Call(replace(drawn, seed=drawn.seed + i)) for i in range(1, KIN + 1)]
        others = [limits, *(allowed(call, call.definition(torch.float64)) for call in near + kin)]
        one_by_one = math.sqrt(drawn.features) * torch.finfo(wide(dtype)).eps / 2
        limits = {kind: max(limit[kind] for limit in others) + one_by_one for kind in KINDS}
    wrong += [f"{kind}: error {mine[kind]:.2g}, at most {limits[kind]:.2g}" for kind in exceeded(mine, limits)]
    return mine, limits, "; ".join(wrong)


def exceeded(mine: dict[str, float], limits: dict[str, float]) -> list[str]:
    """The kinds whose error is above its limit. Even where the definition itself is no number, ours has to be one."""
    return [kind for kind in KINDS if mine[kind] > limits[kind] or not math.isfinite(mine[kind])]


def allowed(call: Call, exact: list[torch.Tensor]) -> dict[str, float]:
    """Twice the definition's own error in this dtype (of sums: in theirs), and one rounding of the result."""
    dtype = DTYPES[call.drawn.dtype]
    in_wide = errors(call.definition(wide(dtype)), exact)
    if wide(dtype) == dtype:
        narrow = in_wide
    elif call.drawn.m:
        # features are float32 in 16 bits too, or the rounding of their log-scale would excuse everything; but gradients are
        # made of the outputs as they were rounded
        kept = errors(call.definition(torch.float64, outputs_kept_in=dtype), exact)
        narrow = in_wide | {"gradients": in_wide["gradients"] + kept["gradients"]}
    else:
        narrow = errors(call.definition(dtype), exact)
    kinds = {
        "o": (narrow, dtype),
        "S": (in_wide, wide(dtype)),
        "z": (in_wide, wide(dtype)),
        "gradients": (narrow, dtype),
    }
    limits = {kind: 2 * theirs[kind] + torch.finfo(of).eps for kind, (theirs, of) in kinds.items()}
    if (
        dtype == torch.bfloat16 and call.drawn.causal and library.multiplies_in_bfloat16()
    ):  # terms are rounded, which shows where they cancel
        rounded = errors(call.definition(dtype), exact)
        for kind in ("S", "gradients"):
            limits[kind] = max(limits[kind], 2 * rounded[kind] + torch.finfo(dtype).eps)
        if call.drawn.m:  # whose features were not rounded above
            rounded = errors(call.definition(torch.float64, units=torch.finfo(dtype).eps / 2), exact)
            limits["o"] = max(limits["o"], 2 * rounded["o"] + torch.finfo(dtype).eps)
    return limits


def to_the_bit(call: Call, ours: list[torch.Tensor]) -> list[str]:
    """The laws that know no rounding, each tried on a part of the calls. The last one spoils the call's inputs."""
    drawn, wrong = call.drawn, []
    if drawn.number % 4 == 0:
        torch.set_num_threads(3 - drawn.threads)
        if not all(torch.equal(x.nan_to_num(7.0), y.nan_to_num(7.0)) for x, y in zip(call.ours(), ours)):
            wrong.append("another number of threads, other bits")
    if drawn.number % 4 == 1 and drawn.causal and drawn.way == "whole":
        cut = drawn.t // 2
        for x in call.inputs[:3]:
            (x[:, :1] if x.stride(1) == 0 else x)[:, :, cut:] = 3.0
        if not torch.equal(call.ours()[0][:, :, :cut], ours[0][:, :, :cut]):
            wrong.append("an output depends on what comes later")
    return wrong


def share(op: str, seed: int, number: int, report: Callable[[str], object] = lambda words: None) -> float:
    """The largest error of a call over what it may be; report is told what is wrong with one above 1."""
    if op != LINEAR:
        return excess(op, number)
    drawn = draw(seed, number)
    mine, limits, wrong = judge(drawn)
    if wrong:
        report(f"{wrong}\n  {drawn}")
    return math.inf if wrong else max(mine[kind] / limits[kind] for kind in KINDS)


def compute(op: str, seed: int, number: int) -> None:
    """Compute the call, without the definition's answer."""
    if op == LINEAR:
        with set_up(drawn := draw(seed, number)):
            Call(drawn).ours()
    else:
        call = drawn_call(op, number).leaves()
        call.numbers(call.run())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("op", nargs="?", default=LINEAR, choices=(LINEAR, *OPS))
    parser.add_argument("--calls", type=int, default=3000)
    parser.add_argument("--first", type=int, default=0, help="the number of the first call")
    parser.add_argument("--seed", type=int, default=0, help="other calls of linear attention")
    parser.add_argument("--unjudged", action="store_true", help="only compute them: sanitizers do the judging")
    parser.add_argument("--out", type=Path, help="where to write what was found, as JSON")
    options = parser.parse_args()
    torch.use_deterministic_algorithms(True)  # fills torch.empty with NaN: what isn't written shows
    numbers = tqdm(range(options.first, options.first + options.calls), disable=None)
    if options.unjudged:
        for number in numbers:
            compute(options.op, options.seed, number)
        return 0
    found = {number: share(options.op, options.seed, number, print) for number in numbers}
    worst = max(found, key=lambda number: found[number])
    over = {number: x for number, x in found.items() if x > 1}
    print(f"{options.calls} calls, {len(over)} over their limit; the worst, {worst}: {found[worst]:.2f} of what may be")
    if options.out is not None:
        facts = {
            "calls": options.calls,
            "first": options.first,
            "over_their_limit": over,
            "largest_share": found[worst],
        }
        command = f"python tests/fuzz.py {' '.join(sys.argv[1:])}"
        options.out.write_text(json.dumps({"command": command, "machine": machine_facts(), **facts}, indent=1) + "\n")
    return int(bool(over))


if __name__ == "__main__":
    sys.exit(main())
