"""The time mixing of RWKV-5.2: linear attention with a decay per channel, and a bonus for the current token."""

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn.functional import silu

from tarnn.attention.before_token import attend_before
from tarnn.attention.token_shift import token_shift

NORM_EPS = 1e-5  # as rwkv.cpp; who divides o by 8 before the norm has 64e-5: set `ln_x.eps`


class Rwkv5TimeMixing(nn.Module):
    """RWKV-5.2's layer between tokens (Peng et al. 2024, section 4, arXiv 2404.05892). Parameters have its checkpoints' names.

    Per head, with u the bonus and w the decay of each channel, the same for all tokens,

        o_t = W (silu(g_t) ⊙ norm((S + Diag(u) k_t v_tᵀ)ᵀ r_t))        S ← Diag(w) S + k_t v_tᵀ
    """

    def __init__(self, hidden_size: int, num_heads: int):
        super().__init__()
        self.num_heads, head_dim = num_heads, hidden_size // num_heads
        self.time_decay = nn.Parameter(torch.full((num_heads, head_dim, 1), 0.9))
        self.time_faaaa = nn.Parameter(torch.zeros(num_heads, head_dim, 1))
        for name in "rkvg":
            self.register_parameter(f"time_mix_{name}", nn.Parameter(torch.full((hidden_size,), 0.5)))
        self.receptance = nn.Linear(hidden_size, hidden_size, bias=False)
        self.key = nn.Linear(hidden_size, hidden_size, bias=False)
        self.value = nn.Linear(hidden_size, hidden_size, bias=False)
        self.gate = nn.Linear(hidden_size, hidden_size, bias=False)
        self.output = nn.Linear(hidden_size, hidden_size, bias=False)
        self.ln_x = nn.GroupNorm(num_heads, hidden_size, eps=NORM_EPS)

    def forward(
        self,
        x: Float[Tensor, "b t hidden"],
        S: Float[Tensor, "n h d e"],
        last: Float[Tensor, "n hidden"],
        first_values: None = None,
        *,
        key_mask: Bool[Tensor, "b t"] | None = None,
        cu_seqlens: Int[Tensor, " n_plus_1"] | None = None,
        one_token: bool = False,
    ) -> tuple[Tensor, Tensor, Tensor, None]:
        """Return (y (b, t, hidden), S and the last inputs behind, None)."""
        before, last = token_shift(x, last, key_mask, cu_seqlens)
        x_r, x_k, x_v, x_g = (torch.lerp(before, x, self.get_parameter(f"time_mix_{name}")) for name in "rkvg")
        r, k, v = (self._heads(f(y)) for f, y in ((self.receptance, x_r), (self.key, x_k), (self.value, x_v)))
        decay, bonus = self.time_decay.to(S.dtype), self.time_faaaa.squeeze(-1)[:, None]
        if one_token:
            o = (r.to(S.dtype) @ S).to(v.dtype)
            S = torch.addcmul(S * decay, k.to(S.dtype).mT, v.to(S.dtype))
        else:
            log_decay = decay.log()[None, :, None, :, 0].expand(*r.shape)
            o, S = attend_before(r, k, v, log_decay, S, key_mask=key_mask, cu_seqlens=cu_seqlens)
        o = o + (r * bonus * k).sum(-1, keepdim=True) * v
        y = self.ln_x(o.transpose(1, 2).flatten(0, 1).flatten(1)).view_as(x)
        return self.output(y * silu(self.gate(x_g))), S, last, None

    def _heads(self, x: Float[Tensor, "b t hidden"]) -> Float[Tensor, "b h t d"]:
        return x.unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
