"""A backward pass in parts, one after another: so what lies in memory between its kernels stays small, and values may be wide.

Rows and key heads know nothing of each other. Columns of v share denominators alone: attention with some of them is a call of
its own, and the gradients of q, k, decays, log-weights, z, Ω and β are the sums of what such calls give.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

from torch import Tensor

from tarnn.kernels.linear import Call, Gradients, Returned
from tarnn.kernels.triton.configurations import values_at_once

MOST_BYTES = (
    256 << 20
)  # of what a part keeps between its kernels; but a part is never less than one row of one key head
AXES = {  # of a call's tensors, its outputs and gradients, as in docs/notation.md; n sequences
    "q": "bhtd", "k": "bgsd", "v": "bgse", "log_decay": "bgsf", "key_log_weight": "bgs", "S": "ngfe", "z": "ngf",
    "omega": "bgfd", "bias": "bgf", "M": "ng", "key_mask": "bs",
    "grad_o": "bhte", "grad_S": "ngfe", "grad_z": "ngf", "o": "bhte", "den": "bht",
    "S_behind": "ngfe", "z_behind": "ngf", "M_behind": "ng",
}  # fmt: skip
EVERYTHING = slice(None)


class Part(NamedTuple):
    """Some rows, some heads of keys with all queries that share them, some columns of v."""

    b: slice
    n: slice
    g: slice
    h: slice
    e: slice
    t: slice = EVERYTHING
    s: slice = EVERYTHING
    d: slice = EVERYTHING
    f: slice = EVERYTHING

    def of(self, name: str, x: Any) -> Any:
        """This part of a tensor; an axis of one place is for all."""
        if not isinstance(x, Tensor) or name not in AXES:
            return x
        places = (EVERYTHING if n == 1 else getattr(self, axis) for n, axis in zip(x.shape, AXES[name]))
        return x[tuple(places)]

    def call(self, call: Call) -> Call:
        return Call(**{name: self.of(name, x) for name, x in call._asdict().items()})

    def returned(self, returned: Returned) -> Returned:
        """What came back through z counts once, with the first columns."""
        found = Returned(**{name: self.of(name, x) for name, x in returned._asdict().items()})
        return found if self.e.start == 0 else found._replace(grad_z=None)

    def add(self, grads: Gradients, mine: Gradients) -> None:
        """Into the gradients of the whole call, which were zeros."""
        for name, x, y in zip(Gradients._fields, grads, mine):
            if x is not None:
                self.of(name, x).add_(y)


def bytes_between(call: Call, chunk: int) -> int:
    """What one row of one key head keeps between kernels: with decays, states at both ends of each chunk, and each channel's
    share of the gradient; with random features, ∂/∂(Ωx) of queries and keys."""
    (_, h, t, _), s, f = call.q.shape, call.k.shape[2], call.num_features
    r, e = h // call.k.shape[1], min(call.v.shape[3], values_at_once(call.q.dtype, f))
    states = 2 * -(-s // chunk) * f * e + r * t * f * call.has_channels if call.log_decay is not None else 0
    return 4 * (states + (r * t + s) * f * (call.omega is not None))


def parts_of(call: Call, chunk: int) -> list[Part]:
    """One, where that is little enough."""
    (b, h, *_), g, e = call.q.shape, call.k.shape[1], call.v.shape[3]
    r, most = h // g, max(1, MOST_BYTES // max(1, bytes_between(call, chunk)))  # heads of rows
    rows, heads = max(1, most // g), min(most, g)
    return [
        Part(
            row, EVERYTHING if call.cu_seqlens is not None else row, head, slice(head.start * r, head.stop * r), values
        )
        for row in _cut(b, rows)
        for head in _cut(g, heads)
        for values in _cut(e, values_at_once(call.q.dtype, call.num_features))
    ]


def _cut(length: int, by: int) -> Iterator[slice]:
    return (slice(i, min(i + by, length)) for i in range(0, length, by))
