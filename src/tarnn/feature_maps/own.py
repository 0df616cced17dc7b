"""A feature map made of any module (…, d) → (…, f)."""

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from tarnn.feature_maps.base import FeatureMap


class OwnMap(FeatureMap):
    """A `FeatureMap` made of a `module` that has no more than a forward.

    The module declares whether φ(x)·φ(y) ≥ 0 by an attribute `positive`. If it doesn't, True is assumed, and a layer that
    divides by their sum tries it.
    """

    def __init__(self, module: Callable[[Tensor], Tensor]):
        super().__init__()
        self.module = module
        declared = getattr(module, "positive", None)
        self.undeclared = declared is None
        self.positive = self.undeclared or bool(declared)

    def num_features(self, head_dim: int) -> int:
        return self._tried(head_dim, 1).shape[-1]

    def check_positive(self, head_dim: int | None = None) -> None:
        super().check_positive()
        if head_dim is None or not self.undeclared:
            return
        phi = self._tried(head_dim, 16).double()
        if not phi.is_meta and (phi @ phi.mT).min() < 0:
            warnings.warn(
                f"{self._get_name()} gave negative weights φ(x)·φ(y) for random x and y, whose sum is no "
                "normaliser: pass normalize=False, or declare `positive = True` on it if your inputs rule that out.",
                stacklevel=4,
            )

    def forward(self, x: Tensor) -> Tensor:
        return self.module(x)

    @torch.no_grad()
    def _tried(self, head_dim: int, num_tokens: int) -> Tensor:
        """Compute the features of some tokens, always the same ones."""
        like: Any = torch.empty(0)
        if isinstance(self.module, nn.Module):
            like = next(self.module.parameters(), like)
        generator = torch.Generator().manual_seed(0)
        x = torch.randn(num_tokens, head_dim, generator=generator, device="cpu")
        return self.module(x.to(like.device, like.dtype)[None, None])

    def _get_name(self) -> str:
        return type(self.module).__name__
