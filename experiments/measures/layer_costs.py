"""What forward and backward of one attention layer cost, against the length of its input."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from measures.attentions import ROWS, Row
from scripts.common.clock import Contender, Effort, Timing, measure_in_turns
from scripts.common.tables import MIB
from tarnn.models import TarnnConfig
from tarnn.models.build_layers import make_attention

Costs = dict[str, dict[str, Timing]]  # by row, then by length


def measure_costs(side: str, options: Any, found: Costs, save: Callable[[], None]) -> None:
    """Fill `found` with rows that see this side, "back" or "both", length by length; what is in it is not measured again."""
    sizes = {"hidden_size": options.cost_hidden, "num_attention_heads": options.cost_heads}
    for length in options.lengths:
        x = torch.randn(1, length, options.cost_hidden, generator=torch.Generator().manual_seed(0)).requires_grad_()
        contenders = {}
        for name in options.rows:
            known = found.setdefault(name, {})
            if ROWS[name].sees in ("either", side) and str(length) not in known and affordable(known, length, options):
                layer = layer_of(ROWS[name], length, sizes, causal=side == "back")
                contenders[name] = Contender(step_of(layer, x))
        effort = Effort(seconds=0.1, rounds=(1, 1)) if options.quick else Effort(seconds=4.0, rounds=(3, 7))
        for name, timing in measure_in_turns(contenders, effort).items():
            found[name][str(length)] = timing
            peak = (timing.peak_bytes or 0) / MIB
            print(f"{side:5} {length:6,} {name:24} {timing.ms:12.2f} ms {peak:10.1f} MiB", flush=True)
        if contenders:
            save()


def layer_of(row: Row, length: int, sizes: Mapping[str, int], *, causal: bool) -> nn.Module:
    torch.manual_seed(0)
    config = TarnnConfig(num_hidden_layers=1, causal=causal, **sizes, **row.keys(length))
    return make_attention(config.record(), 0, causal=causal)


def step_of(layer: nn.Module, x: Tensor) -> Callable[[], object]:
    wanted = [x, *(p for p in layer.parameters() if p.requires_grad)]
    return lambda: torch.autograd.grad(layer(x).square().mean(), wanted, allow_unused=True)


def affordable(known: Mapping[str, Timing], length: int, options: Any) -> bool:
    """Whether time and memory stay within bounds if they grow as they did before (the first time, as the square)."""
    shorter = [n for n in options.lengths if n < length]
    if any(str(n) not in known for n in shorter):
        return False
    if not shorter:
        return True
    last = known[str(shorter[-1])]
    time = memory = (length / shorter[-1]) ** 2
    if len(shorter) > 1:
        before = known[str(shorter[-2])]
        time, memory = last.ms / before.ms, (last.peak_bytes or 1) / (before.peak_bytes or 1)
    return last.ms * time <= 1000 * options.patience and (last.peak_bytes or 0) * memory <= options.room * 2**30
