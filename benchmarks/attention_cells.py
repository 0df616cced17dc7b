"""One cell of `attention.py`: its inputs, the calls that the rivals make of it, and what they cost."""

from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

import torch
from attention_costs import Cell, Cost, Costs
from clock import Contender, Effort, measure_in_turns
from machine import matmul_contender, matmul_gflops
from provenance import total_memory
from rivals import Rival
from torch import Tensor

MATMUL_FROM = 1024  # lengths from which torch.mm runs in the same rounds
ROOM = 0.5  # of the machine's memory, at most, for one call
Inputs = dict[str, list[Tensor]]  # q, k, v and the gradient of o, by dtype


def draw_inputs(t: int, d: int, dtypes: Sequence[str], batch_size: int, heads: int, device: str) -> Inputs:
    """The same numbers in each dtype."""
    torch.manual_seed(t + d)
    drawn = [torch.randn(batch_size, heads, t, d, device=device) for _ in range(4)]
    return {dtype: [x.to(getattr(torch, dtype)) for x in drawn] for dtype in dtypes}


def measure_cell(
    cell: Cell, inputs: Inputs, entrants: Sequence[tuple[Rival, str]], effort: Effort, device: str
) -> list[Cost]:
    """A cost for each (rival, dtype), in turns; torch.mm is one of those that take turns, where a call is long enough."""
    contenders: dict[Any, Contender] = {}
    results: dict[tuple[str, str], int] = {}
    for rival, dtype in entrants:
        q, k, v, grad = inputs[dtype]
        with rival.surroundings(), torch.no_grad():
            given = rival.given(q, k, v)
        one = Contender(call(rival, given, grad, cell), rival.patience, rival.surroundings, rival.release)
        contenders[rival.name, dtype] = one
        results[rival.name, dtype] = result_bytes(given, grad, cell)
    if cell.t >= MATMUL_FROM:
        contenders["matmul"] = matmul_contender(device)
    timings = measure_in_turns(contenders, effort, device)
    mm = matmul_gflops(timings.pop("matmul").ms) if "matmul" in timings else None
    costs = []
    for (name, dtype), timing in timings.items():
        extra = None if timing.peak_bytes is None else timing.peak_bytes - results[name, dtype]
        extra = extra if extra is None else max(0, extra)
        costs.append(Cost(name, dtype, cell, **asdict(timing), extra_bytes=extra, mm_gflops=mm))
    return costs


def call(rival: Rival, given: Sequence[Tensor], grad: Tensor, cell: Cell) -> Callable[[], object]:
    if not cell.backward:
        return lambda: rival.attend(*given, cell.causal)
    leaves = [x.detach().requires_grad_() for x in given[:3]]
    return lambda: torch.autograd.grad(rival.attend(*leaves, *given[3:], cell.causal), leaves, grad)


def result_bytes(given: Sequence[Tensor], o: Tensor, cell: Cell) -> int:
    """o, and with backward the gradients of the first three that are given: q, k, v."""
    return o.nbytes + (sum(x.nbytes for x in given[:3]) if cell.backward else 0)


def too_much(rival: Rival, dtype: str, cell: Cell, costs: Costs, longest_call: float) -> str:
    """Why not to try: a shorter length says that this one takes too long, or more memory than there is. Else nothing."""
    shorter = costs.shorter(rival.name, dtype, cell)
    if shorter is None:
        return ""
    times = cell.t / shorter.cell.t
    seconds = shorter.ms / 1000 * times**rival.power
    if seconds > longest_call:
        return f"one call would take about {seconds:.0f} s, by t = {shorter.cell.t:,}"
    needed = (shorter.peak_bytes or 0) * times
    if needed > ROOM * total_memory():
        return f"one call would take about {needed / 2**30:.0f} GiB, by t = {shorter.cell.t:,}"
    return ""
