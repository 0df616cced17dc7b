"""RWKV-7's recurrence, the delta rule of low rank, beside the same in PyTorch: token by token, and by chunks.

    python benchmarks/low_rank.py        # some five minutes; benchmarks/results/low_rank.{json,md}

Batch 1, 16 heads, a decay per channel. `loop`: one token after the other in plain PyTorch, as reference implementations write it.
`chunks`: what tarnn computes without its compiled kernels. All take turns, in one process, on the same inputs. Correctness is
checked first, against the definition in float64: outputs and gradients of 100 tokens.
"""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import normalize

sys.path.insert(0, str(Path(__file__).parents[1]))
from toolkit import functions
from toolkit.functions import OURS, Found, Inputs

from scripts.common.options import parse
from scripts.common.results import run
from scripts.common.tables import page, source
from scripts.common.targets import GUARANTEE
from tarnn.kernels.cpu import library
from tarnn.ops import DeltaState, low_rank_delta_rule, low_rank_delta_step
from tarnn.ops.delta.definition import low_rank_delta

HEADS = 16
CHUNKS, LOOP = "chunks", "loop"


def main() -> int:
    full = {"lengths": [512, 2048], "head_dims": [64, 128], "rounds": 9}
    options = parse(__file__, __doc__, full, {"lengths": [48], "head_dims": [64], "rounds": 2})
    return run(options, measure, check=check, report=report)


def draw(t: int, d: int, heads: int = HEADS) -> Inputs:
    """Draw q, k, v, a, b and log_decay. As RWKV-7's layer makes them: a = −κ̂, b = κ̂ ⊙ α, and decays of at least
    e^−0.607 per channel."""
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 1, t, heads, d).transpose(2, 3)
    key = normalize(torch.randn(1, t, heads, d), dim=-1).transpose(1, 2)
    alpha, decay = torch.rand(2, 1, t, heads, d).transpose(2, 3)
    return q, k, v, -key, key * alpha, -0.607 * decay


def ours(*inputs: Tensor) -> Tensor:
    return low_rank_delta_rule(*inputs[:5], log_decay=inputs[5], scale=1.0)


def loop(*inputs: Tensor) -> Tensor:
    """Token by token, the state's transition as two products rather than as a matrix."""
    q, k, v, a, b, log_decay = inputs
    S, outputs = q.new_zeros(*q.shape[:2], q.shape[3], v.shape[3]), []
    keep = log_decay.exp()
    for i in range(q.shape[2]):
        read = a[:, :, i, None] @ S
        S = keep[:, :, i, :, None] * S + b[:, :, i, :, None] * read + k[:, :, i, :, None] * v[:, :, i, None]
        outputs.append(q[:, :, i, None] @ S)
    return torch.cat(outputs, 2)


def check(options) -> str:
    """What is wrong with a contender, or nothing."""
    inputs = draw(100, options.head_dims[0], heads=2)
    defined = lambda *x: low_rank_delta(*x[:5], log_decay=x[5], scale=1.0)[0]  # noqa: E731
    exact = functions.results(defined, [x.double() for x in inputs])
    for name, function in FUNCTIONS.items():
        if error := functions.wrong(functions.results(function, inputs), exact, 1e-5):
            return f"{name} {error}"
    return ""


def in_plain_pytorch(function: Callable) -> Callable:
    def call(*inputs: Tensor) -> Tensor:
        with library.disabled():
            return function(*inputs)

    return call


def one_token(inputs: Inputs) -> dict[str, Callable[[], object]]:
    one, shape = tuple(x[:, :, :1] for x in inputs), (1, HEADS, inputs[0].shape[3], inputs[2].shape[3])
    state = DeltaState(torch.zeros(shape))
    step = lambda: low_rank_delta_step(*one[:5], log_decay=one[5], scale=1.0, state=state, inplace=True)  # noqa: E731
    return {OURS: step, CHUNKS: in_plain_pytorch(step), LOOP: lambda: loop(*one)}


FUNCTIONS = {OURS: ours, CHUNKS: in_plain_pytorch(ours), LOOP: loop}


def measure(options, found: Found, keep) -> None:
    for d in options.head_dims:
        for t in options.lengths:
            inputs = draw(t, d)
            token = one_token(inputs) if t == options.lengths[0] else None
            functions.measure(found, f"d = {d}, {t} tokens", FUNCTIONS, inputs, options, keep, token)


def report(options, facts: dict[str, Any], found: Found) -> str:
    how = (
        f"Batch 1, {HEADS} heads, float32, a decay per channel. Medians, in turns; a call of over three seconds is made "
        "once. MiB above what was there before a call, results included."
    )
    return page("The delta rule of low rank (RWKV-7)", source(facts, how), GUARANTEE, functions.table(found))


if __name__ == "__main__":
    sys.exit(main())
