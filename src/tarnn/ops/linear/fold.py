"""States of stretches, one after the other, made into the state behind them all."""

from typing import NamedTuple

import torch
from torch import Tensor

from tarnn.numerics import finite
from tarnn.ops.linear.state import LinearState


class Ends(NamedTuple):
    """What each of p stretches alone leaves behind, and how much it lets what came before it fade."""

    S: Tensor  # (p, n, g, f, e)
    z: Tensor  # (p, n, g, f)
    M: Tensor | None = None  # (p, n, g) or (p, n, g, f)
    decay: Tensor | None = None  # (p, n, g, 1 or f)  the sums of log-decays

    def some(self, start: int, stop: int) -> "Ends":
        M, decay = (None if x is None else x[start:stop] for x in (self.M, self.decay))
        return Ends(self.S[start:stop], self.z[start:stop], M, decay)


def folded(before: LinearState, ends: Ends) -> LinearState:
    """The state behind p stretches that follow one another and a state; its M is None if theirs is:

        S = Σ_j e^(M_j + D_j − M) S_j      D_j: log-decays of all stretches behind j, summed;  M = max_j (M_j + D_j)

    M is a constant under autograd, as everywhere: it cancels.
    """
    S, z = torch.cat([before.S[None], ends.S]), torch.cat([before.z[None], ends.z])
    weight = None
    if ends.decay is not None:  # summed from the end, never a difference: −∞ costs no digits
        behind = ends.decay.flip(0).cumsum(0).flip(0)
        weight = torch.cat([behind, torch.zeros_like(before.z[None, ..., : behind.shape[-1]])])  # (p + 1, n, g, x)
    M = None
    if ends.M is not None and before.M is not None:
        maxima = torch.cat([before.M[None], ends.M]).detach()
        by_feature = maxima.ndim == 4
        maxima = maxima if by_feature else maxima[..., None]
        weight = maxima if weight is None else maxima + weight
        most = weight.detach().amax(0)  # (n, g, x)
        M = most if by_feature else most.amax(-1)  # channels that decay apart share one
        weight = weight - finite(M if by_feature else M[..., None])
    if weight is not None:
        weight = weight.exp()
        S, z = S * weight[..., None], z * weight
    return LinearState(S.sum(0), z.sum(0), M)


def total_decay(log_decay: Tensor | None, v: Tensor, key_mask: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """The sum of the log-decays (g,), (b, g, s) or (b, g, s, f) over values v (b, g, s, e): (b, g, 1 or f). At masked keys
    no time passes."""
    if log_decay is None:
        return None
    log_decay = log_decay.to(dtype)
    if log_decay.ndim == 1:
        log_decay = log_decay[None, :, None].expand(v.shape[:3])
    if log_decay.ndim == 3:
        log_decay = log_decay[..., None]
    if key_mask is not None:
        log_decay = log_decay.masked_fill(~key_mask[:, None, :, None], 0.0)
    return log_decay.sum(2)
