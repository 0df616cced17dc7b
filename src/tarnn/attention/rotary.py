"""Rotary positions: vectors are rotated by angles proportional to their position, so their products depend on distance."""

from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from tarnn.numerics import wide, widest


def positions_in(
    attention_mask: Tensor | None, cu_seqlens: Tensor | None, past: int, num_tokens: int, device
) -> Tensor:
    """The position of each new token in its sequence, (b, t) or (1, t); padding is not counted.

    `attention_mask` covers the past as well, (b, past + t). Packed sequences each start from 0.
    """
    if attention_mask is not None:
        position = attention_mask.long().cumsum(-1) - 1
        return position.clamp(min=0)[:, -num_tokens:]
    index = torch.arange(past, past + num_tokens, device=device)
    if cu_seqlens is not None:
        sequence = torch.searchsorted(cu_seqlens.long(), index, right=True) - 1  # of each token
        index = index - cu_seqlens[sequence]
    return index[None]


class Rotation(NamedTuple):
    """The cosines and signed sines of positions, shared by layers and heads."""

    cos: Float[Tensor, "b 1 t dim"]
    sin: Float[Tensor, "b 1 t dim"]

    def apply(self, x: Float[Tensor, "b h t dim"]) -> Float[Tensor, "b h t dim"]:
        """Rotate x: x·cos + (x, halves swapped)·(−sin, sin), in float32 at least, returned in x's dtype."""
        swapped = x.roll(x.shape[-1] // 2, -1)
        return torch.addcmul(x * self.cos, swapped, self.sin).to(x.dtype)


class Rotary:
    """Rotates the pair (x_c, x_{c + dim/2}) at position p by p·base^(−2c/dim), for c < dim/2.

    Then rotate(x, p)·rotate(y, r) depends on p and r through p − r alone. Angles are computed in float64 (float32
    where the device has no float64), because a float32 p·frequency at p = 10⁶ is off by 0.03.
    Su et al. 2021, section 3.2 (arXiv 2104.09864), with the halves as pairs, as in Llama.

    It holds no tensors, so nothing is lost when a model is cast to another dtype or built without data.
    Raises ValueError if dim is odd.
    """

    def __init__(self, dim: int, base: float = 10000.0):
        if dim < 2 or dim % 2:
            raise ValueError(f"rotary positions rotate pairs of channels: dim must be even and ≥ 2; got {dim}.")
        self.dim, self.base = dim, base

    def rotation(self, positions: Int[Tensor, "b t"], dtype: torch.dtype = torch.float32) -> Rotation:
        """The rotation of these positions for vectors of this dtype, float32 at least."""
        dtype = wide(dtype)
        frequencies = self.frequencies(positions.device)
        angle = positions[:, None, :, None].to(frequencies.dtype) * frequencies  # (b, 1, t, dim / 2)
        cos, sin = angle.cos().to(dtype), angle.sin().to(dtype)
        return Rotation(torch.cat([cos, cos], dim=-1), torch.cat([-sin, sin], dim=-1))

    def frequencies(self, device: torch.device | str = "cpu") -> Float[Tensor, " pairs"]:
        """base^(−2c/dim) of each pair."""
        return self.base ** (torch.arange(0, self.dim, 2, device=device, dtype=widest(device)) / -self.dim)

    def of(self, positions: Tensor | None, rotation: Rotation | None, x: Tensor, state) -> Rotation:
        """The rotation for x (b, t, ·): the given one, the one for these positions, or that of a sequence which starts here.

        Raises ValueError if there is a state and no positions: how far the sequence has come is not in it.
        """
        if rotation is not None:
            return rotation
        if positions is None:
            if state is not None:
                raise ValueError(
                    "with rotary positions a continued sequence (state=) needs positions=, (b, t): "
                    "the state does not know how many tokens it has seen."
                )
            # packed or padded sequences may be counted on, too: only distances within a sequence matter
            positions = positions_in(None, None, 0, x.shape[1], x.device)
        return self.rotation(positions, x.dtype)

    def __repr__(self) -> str:
        return f"Rotary({self.dim}, base={self.base:g})"
