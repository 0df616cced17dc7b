"""What kernels take: tensors and how they lie in memory, projections, keys, and what a kernel is compiled for."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from tarnn.kernels.features import NAMES
from tarnn.kernels.linear import Call
from tarnn.kernels.triton.configurations import padded

FARTHEST = 2**24  # elements between neighbouring positions: within a tile, offsets are 32 bits wide


def far(x: Tensor) -> bool:
    """Whether positions of x (b, h, t, …) lie farther apart than kernels can count."""
    return x.ndim > 2 and x.shape[2] > 1 and x.stride(2) > FARTHEST


class Rows(NamedTuple):
    """A tensor (b, h, t, …) whose last axis lies in a row, and its strides along the others."""

    data: Tensor
    b: int = 0
    h: int = 0
    t: int = 0

    @classmethod
    def of(cls, x: Tensor) -> "Rows":
        """x as it lies. An axis of one place has no stride."""
        return cls(x, *[stride if size > 1 else 0 for size, stride in zip(x.shape[:3], x.stride())])

    @classmethod
    def read(cls, x: Tensor) -> "Rows":
        """x, or a copy if kernels can't read it: they need channels in a row, and positions that they reach."""
        fits = (x.ndim < 4 or x.stride(-1) == 1 or x.shape[-1] == 1) and not far(x)
        return cls.of(x if fits else x.contiguous())

    def named(self, name: str) -> dict[str, Any]:
        """`q`, `q_b`, `q_h` and `q_t`: for kernels that are not compiled anew for other strides."""
        return {name: self.data, f"{name}_b": self.b, f"{name}_h": self.h, f"{name}_t": self.t}


class Projection(NamedTuple):
    """How features are made, as kernels take it: a call's fields of these names."""

    omega: Rows
    bias: Rows
    factor: float
    square: float
    offset: float
    shift: float

    @classmethod
    def of(cls, call: Call, nothing: Tensor) -> "Projection":
        """Parameters in float32; `nothing` in the place of what is absent."""
        parameters = (None if x is None else x.to(torch.float32).contiguous() for x in (call.omega, call.bias))
        omega, bias = (Rows(nothing) if x is None else Rows.of(x) for x in parameters)
        return cls(omega, bias, call.factor, call.square, call.offset, call.shift)


class Keys(NamedTuple):
    """The keys of a call: as they are, their decays with channels, and what kernels have made of them."""

    x: Rows
    decay: Rows
    scale: Tensor
    w: Tensor
    d: Tensor
    M_in: Tensor
    M_out: Tensor


class Spec(NamedTuple):
    """What a kernel is compiled for."""

    D: int  # channels of q and k, BD at a time
    BD: int
    F: int  # a state's sides, and those of a tile of it
    E: int
    BF: int
    BE: int
    C: int  # positions of a chunk
    function: int  # its number in `kernels.features.NAMES`
    projected: bool  # whether there is an Ω and a β
    biased: bool
    decay: bool  # one for all features; with channels and log-weights, the largest
    channels: bool
    weighted: bool
    masked: bool
    causal: bool
    normalize: bool
    low: Any = None  # the type in which tiles are multiplied, and how
    precision: str = ""

    @property
    def factored(self) -> bool:
        """Whether pairs of positions have factors, without those of channels."""
        return self.decay or self.weighted

    @property
    def weighing(self) -> bool:
        return self.factored or self.channels

    @classmethod
    def of(cls, call: Call, **sizes: Any) -> "Spec":
        d, f, e = call.q.shape[3], call.num_features, call.v.shape[3]
        return cls(
            **{"D": d, "BD": min(32, padded(d)), "F": f, "E": e, "BF": padded(f)} | sizes,
            function=NAMES.index(call.function),
            projected=call.omega is not None,
            biased=call.bias is not None,
            channels=call.has_channels,
            weighted=call.weighted,
            masked=call.key_mask is not None,
            causal=call.causal,
            normalize=call.normalize,
        )
