"""Adapter: a layer of tarnn in place of the `nn.MultiheadAttention` in PyTorch's own Transformer layers."""

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from tarnn.attention.multihead import MultiHeadAttention


class TorchMultihead(nn.Module):
    """`layer` with the signature of `nn.MultiheadAttention(batch_first=True)`:

        encoder = nn.TransformerEncoderLayer(512, 8, batch_first=True)
        encoder.self_attn = TorchMultihead(LinearAttention(512, 8, causal=False))

    For `TransformerDecoderLayer.multihead_attn`, a layer with context_size. Linear attention takes masks of two
    kinds: padding (keys that no query sees), as key_padding_mask or as attn_mask, and the causal mask, which
    belongs to a layer with causal=True; is_causal=True says that it is that one, and it is not looked at then.

    Raises ValueError for every other mask, for need_weights=True, and where keys are not values.
    """

    batch_first = True
    in_proj_bias = None  # with these two PyTorch doesn't take its fast path past our forward
    _qkv_same_embed_dim = False

    def __init__(self, layer: MultiHeadAttention):
        super().__init__()
        self.layer = layer

    def forward(
        self,
        query: Float[Tensor, "b t hidden"],
        key: Float[Tensor, "b s context"],
        value: Float[Tensor, "b s context"],
        key_padding_mask: Tensor | None = None,
        need_weights: bool = False,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Float[Tensor, "b t hidden"], None]:
        """Return (y, None). Masks are as in torch: bool, True = masked, or floating, −∞ = masked and 0 = visible."""
        if need_weights:
            raise ValueError("the weights of linear attention are never formed; pass need_weights=False.")
        if key is not value or (self.layer.context_size is None and query is not key):
            raise ValueError(
                "self attention takes one tensor as query, key and value, attention to a context (context_size=) one "
                "as key and value; got different ones."
            )
        if is_causal and not self.layer.causal:
            raise ValueError("is_causal=True needs a layer that was made with causal=True.")
        key_mask = None if key_padding_mask is None else _visible(key_padding_mask, "key_padding_mask")  # (b, s)
        if attn_mask is not None and not is_causal:
            keys = self._visible_keys(_visible(attn_mask, "attn_mask"), len(query))
            key_mask = keys if key_mask is None else key_mask & keys
        options: dict[str, Any] = {"key_mask": None if key_mask is None else key_mask.expand(key.shape[:2])}
        return self.layer(query, *([] if self.layer.context_size is None else [key]), **options), None

    def _visible_keys(self, visible: Tensor, batch_size: int) -> Tensor:
        """Reduce a mask (t, s) or (b·h, t, s), True = visible, to the visible keys (1 or b, s)."""
        by_row = visible[None, None] if visible.ndim == 2 else visible.unflatten(0, (batch_size, -1))  # (b, h, t, s)
        keys = by_row[:, 0, -1]  # the last query sees every key that any query sees
        expected = keys[:, None, None].expand_as(by_row)
        if self.layer.causal:
            expected = expected & torch.ones_like(by_row).tril()
        if not torch.equal(expected, by_row):
            kind = "the causal one, with padding or without" if self.layer.causal else "padding, for all queries alike"
            raise ValueError(
                f"linear attention forms no matrix that a mask could be laid on: for this layer (causal="
                f"{self.layer.causal}) attn_mask must be {kind}; got another {tuple(visible.shape)}."
            )
        return keys


def _visible(mask: Tensor, name: str) -> Tensor:
    """Turn a mask of torch's into bool, True = visible. Raises ValueError for a mask that adds to the weights."""
    if mask.dtype == torch.bool:
        return ~mask
    visible = mask == 0
    if not torch.compiler.is_compiling() and not bool((visible | (mask == -torch.inf)).all()):
        raise ValueError(f"a floating {name} may hold 0 (visible) and −∞ (masked) only; linear attention adds no bias.")
    return visible
