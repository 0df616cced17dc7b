"""The interface that all baselines share: that of tarnn's attention layers, forward and backward only."""

from typing import Any, ClassVar

import torch
from torch import Tensor

from tarnn.attention.multihead import MultiHeadAttention
from tarnn.attention.rotary import Rotary
from tarnn.kernels.packing import bounds


class Baseline(MultiHeadAttention):
    """Multi-head self-attention by `attend`, which a subclass writes.

        attend(x (b, t, hidden), q, k (b, h, t, d), v (b, h, t, e), real (b, t)) → o (b, h, t, e)

    The real tokens of each row stand in front, `real` says how many; what `attend` returns for the others is ignored,
    but must be finite. Padding on any side, packed rows (`cu_seqlens`), rotary positions and fewer key/value heads are
    dealt with here: padded is cut, and packed is a loop. A masked token's output is zero.

    Raises ValueError for cross attention, for a state, and for the wrong `causal` where a kind is for encoders or for
    decoders only.
    """

    encoder_only: ClassVar[bool] = False
    decoder_only: ClassVar[bool] = False

    def __init__(self, hidden_size: int, num_heads: int, *, causal: bool, rotary: Rotary | None = None, **options: Any):
        if options.get("context_size") is not None:
            raise ValueError(f"{type(self).__name__} is self-attention: leave context_size out.")
        if causal and self.encoder_only:
            raise ValueError(f"{type(self).__name__} is defined for encoders: pass causal=False, or take another kind.")
        if not causal and self.decoder_only:
            raise ValueError(f"{type(self).__name__} is defined for decoders: pass causal=True, or take another kind.")
        super().__init__(hidden_size, num_heads, causal=causal, **options)
        self.set_rotary(rotary, self.head_dim)

    def attend(self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, real: Tensor) -> Tensor:
        raise NotImplementedError

    def mix(
        self,
        x: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        key_mask,
        cu_seqlens,
        positions,
        rotation,
        state,
        return_state,
        inplace,
    ) -> tuple[Tensor]:
        if state is not None or return_state:
            raise self._no_state()
        if key_mask is not None and cu_seqlens is not None:
            raise ValueError("packed rows have no padding: pass cu_seqlens or key_mask, not both.")
        if self.rotary is not None:
            rotation = self.rotary.of(positions, rotation, x, None)
            q, k = rotation.apply(q), rotation.apply(k)
        k, v = (
            y.repeat_interleave(self.num_heads // y.shape[1], 1) if y.shape[1] < self.num_heads else y for y in (k, v)
        )
        if cu_seqlens is None:
            return (self._rows(x, q, k, v, key_mask),)
        cuts = bounds(cu_seqlens, x.shape[1])
        parts = [
            self._rows(x[:, a:b], q[:, :, a:b], k[:, :, a:b], v[:, :, a:b], None)
            for a, b in zip(cuts, cuts[1:])
            if b > a
        ]
        return (torch.cat(parts, dim=2),)

    def step(self, *_: Any, **__: Any) -> Any:
        raise self._no_state()

    def new_state(self, *_: Any, **__: Any) -> Any:
        raise self._no_state()

    def draw(self, *shape: int) -> Tensor:
        """Standard normal float64 numbers: new ones in each call while training, else always the same.

        The first numbers do not depend on how many are drawn.
        """
        generator = None if self.training else torch.Generator().manual_seed(0)
        uniform = torch.rand(shape, generator=generator, dtype=torch.float64, device="cpu")
        return torch.special.ndtri(uniform.clamp(min=1e-15)).to(self.v_proj.weight.device)

    def _rows(self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None) -> Tensor:
        """Attend with the real tokens of each row moved to its front, and back."""
        if key_mask is None:
            return self.attend(x, q, k, v, x.new_ones(x.shape[:2], dtype=torch.bool))
        order = (~key_mask).byte().argsort(dim=-1, stable=True)  # (b, t)
        real = key_mask.gather(1, order)
        x, q, k, v = (_taken(y, order).masked_fill(~_beside(real, y), 0.0) for y in (x, q, k, v))
        o = self.attend(x, q, k, v, real)
        return _taken(o.masked_fill(~_beside(real, o), 0.0), order.argsort(dim=-1))

    def _no_state(self) -> ValueError:
        return ValueError(
            f"{type(self).__name__} is trained and measured only: it has no step, no state and no cache. Call the model "
            "with use_cache=False."
        )


def _beside(mask: Tensor, y: Tensor) -> Tensor:
    """Give a mask (b, t) the axes of y (b, t, ·) or (b, h, t, ·)."""
    return mask[..., None] if y.ndim == 3 else mask[:, None, :, None]


def _taken(y: Tensor, order: Tensor) -> Tensor:
    """The tokens of y in that order."""
    return y.gather(y.ndim - 2, _beside(order, y).expand_as(y))
