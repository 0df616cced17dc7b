"""Experts as instructions: a router that chooses some for each token, and the products of those that it chose.

chosen, weights = route(product(h, router, exact=True), 2)
y = experts(h, chosen, weights, [Expert(gate, up, down) for ...])
"""

from collections.abc import Sequence
from typing import NamedTuple

from jaxtyping import Float
from torch import Tensor

from tarnn.program.instructions import Number
from tarnn.program.recording import FUNCTIONS, ProgramError, Register

SCORES = ("softmax", "sigmoid")


class Expert(NamedTuple):
    """The weights of one expert; without a gate it is down f(up x)."""

    gate: Float[Tensor, "m n"] | None
    up: Float[Tensor, "m n"]
    down: Float[Tensor, "o m"]


def route(
    logits: Register,
    k: int,
    *,
    scores: str = "softmax",
    bias: Float[Tensor, " experts"] | None = None,
    groups: int = 1,
    groups_kept: int = 1,
    normalize: bool = True,
    eps: float = 0.0,
    scale: float = 1.0,
) -> tuple[Register, Register]:
    """Choose k experts of each token: (their numbers, ascending; their weights), k each.

    Scores are the softmax or the sigmoids of the logits. The k experts with the largest score + bias are chosen, of equal
    ones the first. groups: of so many groups of neighbours only the `groups_kept` best take part; a group is as good as its
    best two together. A weight is a score (without the bias), if normalised divided by the sum of the chosen ones + eps, and
    multiplied with `scale`. The softmax, normalised, is that of the chosen logits alone.
    """
    n = logits.size
    if not 1 <= k <= n:
        raise ProgramError(f"a router of {n} experts can't choose {k} of them.")
    each = n // groups if groups > 0 and n % groups == 0 else 0
    if not each or not 1 <= groups_kept <= groups or groups_kept * each < k or (groups > 1 and each < 2):
        raise ProgramError(f"a router of {n} experts can't choose {k} in {groups_kept} of {groups} groups.")
    if scores not in SCORES or (bias is not None and bias.shape != (n,)):
        raise ProgramError(
            f"a router of {n} experts has scores {scores!r} and {0 if bias is None else bias.numel()} biases."
        )
    numbers: dict[str, Number] = {"k": k, "scores": scores, "groups": groups, "groups_kept": groups_kept}
    numbers |= {"normalize": normalize, "eps": eps, "scale": scale}
    weights = {} if bias is None else {"bias": bias}
    chosen, of_chosen = logits.record.add("route", (logits,), [(1, k), (1, k)], weights, numbers)
    return chosen, of_chosen


def experts(
    x: Register, chosen: Register, weights: Register, all_experts: Sequence[Expert], *, function: str = "silu"
) -> Register:
    """Compute Σ_j weight_j · down_e (f(gate_e x) ⊙ up_e x), e = chosen_j; without gates down_e f(up_e x).

    chosen, weights: as `route` returns them. The sum has the order of the experts' numbers, which `route` has as well: it depends
    on the token alone. Products are kept as others are (float32, bfloat16, int8, int4).
    """
    if not all_experts or function not in FUNCTIONS or chosen.size != weights.size:
        raise ProgramError(
            f"{len(all_experts)} experts, of which {chosen.size} are chosen, with {weights.size} weights."
        )
    first, gated = all_experts[0], all_experts[0].gate is not None
    shapes = {(None if e.gate is None else e.gate.shape, e.up.shape, e.down.shape) for e in all_experts}
    m, n = first.up.shape
    fits = n == x.size and first.down.shape[1] == m and (first.gate is None or first.gate.shape == (m, n))
    if len(shapes) > 1 or not fits or chosen.size > len(all_experts):
        raise ProgramError(f"experts of {x.size} numbers have {', '.join(map(str, sorted(map(str, shapes))[:3]))}.")
    tensors = {f"{name}.{i}": w for i, e in enumerate(all_experts) for name, w in e._asdict().items() if w is not None}
    numbers: dict[str, Number] = {"experts": len(all_experts), "gated": gated, "function": function}
    return x.record.add("experts", (x, chosen, weights), [(1, len(first.down))], tensors, numbers)[0]
