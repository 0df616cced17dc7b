"""The recurrences of flash-linear-attention's models, by tarnn's ops. Tensors there are (b, t, heads, ·), decays natural logs."""

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import softplus

from tarnn.feature_maps.elementwise import Identity
from tarnn.numerics import wide
from tarnn.ops.delta.low_rank import low_rank_delta_rule
from tarnn.ops.delta.op import delta_rule
from tarnn.ops.linear.op import linear_attention
from tarnn.ops.scan.op import diagonal_scan
from tarnn.ops.states import DeltaState, LinearState, ScanState

_IDENTITY = Identity()
NORM_EPS = 1e-6  # of its normalised queries and keys


def gated_linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
    gk: Tensor | None = None,
    gv: Tensor | None = None,
    g_gamma: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    reverse: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    output_attentions: bool = False,
    **others: Any,
) -> tuple[Tensor, Tensor | None]:
    """S ← e^g S + k vᵀ: decays per token g (b, t, h), per channel g or gk (b, t, h, d), per head g_gamma (h,)."""
    _refuse(gv=gv, reverse=reverse, output_attentions=output_attentions)
    decays = [x for x in (g, gk, g_gamma) if x is not None]
    if len(decays) > 1:
        raise ValueError("tarnn computes gated linear attention with one decay; got several of g, gk and g_gamma.")
    decay = decays[0] if decays else None
    if decay is not None and decay.ndim > 1:
        decay = decay.transpose(1, 2)
    S = _state(initial_state, state_v_first, q)
    state = None if S is None else LinearState(S, S.new_zeros(S.shape[:3]))
    q, k, v = (x.transpose(1, 2) for x in (q * (q.shape[-1] ** -0.5 if scale is None else scale), k, v))
    o, after = linear_attention(
        q, k, v, _IDENTITY, causal=True, normalize=False, log_decay=decay, cu_seqlens=cu_seqlens, state=state,
        return_state=True,
    )  # fmt: skip
    return o.transpose(1, 2), _returned(after.S, output_final_state, state_v_first)


def gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
    beta: Tensor | None = None,
    gk: Tensor | None = None,
    gv: Tensor | None = None,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    lower_bound: float | None = None,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    return_intermediate_states: bool = False,
    cp_context: Any = None,
    **others: Any,
) -> tuple[Tensor, Tensor | None]:
    """The delta rule, gated or not: g (b, t, n) per token or (b, t, n, d) per channel, beta (b, t, n)."""
    _refuse(gv=gv, return_intermediate_states=return_intermediate_states, cp_context=cp_context)
    if beta is not None and beta.ndim == 4:
        raise ValueError("tarnn's delta rule takes one β per token and head; got one per channel of the values.")
    decay = gk if g is None else g
    if decay is not None and use_gate_in_kernel:
        decay = gate(decay, A_log, dt_bias, lower_bound)
    strength = v.new_ones(v.shape[:3]) if beta is None else beta.float()
    if use_beta_sigmoid_in_kernel:
        strength = strength.sigmoid() * (2.0 if allow_neg_eigval else 1.0)
    S = _state(initial_state, state_v_first, q)
    q, k, v, strength = (x.transpose(1, 2) for x in (q, k, v, strength))
    o, after = delta_rule(
        q, k, v, strength, log_decay=None if decay is None else decay.transpose(1, 2),
        normalize_qk=NORM_EPS if use_qk_l2norm_in_kernel else False, scale=scale, cu_seqlens=cu_seqlens,
        state=None if S is None else DeltaState(S), return_state=True,
    )  # fmt: skip
    return o.transpose(1, 2), _returned(after.S, output_final_state, state_v_first)


def delta_rule_without_gate(
    q, k, v, beta: Tensor | None = None, *args: Any, **kwargs: Any
) -> tuple[Tensor, Tensor | None]:
    """The delta rule with β (b, t, n), by default 1. Further arguments: scale, initial_state, output_final_state,
    use_qk_l2norm_in_kernel, cu_seqlens."""
    names = ("scale", "initial_state", "output_final_state", "use_qk_l2norm_in_kernel", "cu_seqlens")
    return gated_delta_rule(q, k, v, None, beta, **dict(zip(names, args)), **kwargs)


def gate(g: Tensor, A_log: Tensor | None, dt_bias: Tensor | None, lower_bound: float | None) -> Tensor:
    """The log-decay (…, n) or (…, n, d) of its argument: −e^A softplus(g + bias), or with a bound bound·σ(e^A (g + bias))."""
    heads = g.shape[2]
    per_head = (heads, *[1] * (g.ndim - 3))
    x = g.float() if dt_bias is None else g.float() + dt_bias.float().view(heads, *g.shape[3:])
    rate = x.new_ones(per_head) if A_log is None else A_log.float().exp().view(per_head)
    return -rate * softplus(x) if lower_bound is None else lower_bound * torch.sigmoid(rate * x)


def low_rank(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    gk: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    reverse: bool = False,
    cu_seqlens: Tensor | None = None,
    cp_context: Any = None,
    **others: Any,
) -> tuple[Tensor, Tensor | None]:
    """S ← (Diag(e^gk) + b aᵀ) S + k vᵀ."""
    _refuse(reverse=reverse, cp_context=cp_context)
    S = _state(initial_state, False, q)
    decay = gk.transpose(1, 2)
    inputs = (x.to(q.dtype).transpose(1, 2) for x in (q, k, v, a, b))
    o, after = low_rank_delta_rule(
        *inputs, log_decay=decay, scale=scale, cu_seqlens=cu_seqlens, state=None if S is None else DeltaState(S),
        return_state=True,
    )  # fmt: skip
    return o.transpose(1, 2), _returned(after.S, output_final_state, False)


def rwkv7_tokens(r, w, k, v, kk, a, scale: float | None = 1.0, **options: Any) -> tuple[Tensor, Tensor | None]:
    """RWKV-7's recurrence from its normalised key and α."""
    return low_rank(r, k, v, -kk, kk * a, w, scale=scale, **options)


def with_bonus(
    r: Tensor,
    k: Tensor,
    v: Tensor,
    w: Tensor,
    u: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    reverse: bool = False,
    cu_seqlens: Tensor | None = None,
    **others: Any,
) -> tuple[Tensor, Tensor | None]:
    """RWKV-6: o_t = (S_{t−1} + Diag(u) k vᵀ)ᵀ r, S ← Diag(e^w) S + k vᵀ, with u (h, d)."""
    _refuse(reverse=reverse)
    r, k, v, w = (x.transpose(1, 2) for x in (r * (r.shape[-1] ** -0.5 if scale is None else scale), k, v, w))
    S = _state(initial_state, False, r)
    if S is None:
        rows = len(r) if cu_seqlens is None else len(cu_seqlens) - 1
        S = r.new_zeros(rows, k.shape[1], k.shape[3], v.shape[3], dtype=wide(r.dtype))
    o, S = _read_before(r, k, v, w.to(S.dtype), S, cu_seqlens)
    o = o + ((r * k * u[:, None]).sum(-1, keepdim=True) * v).to(o.dtype)
    return o.transpose(1, 2), S if output_final_state else None


def scan(
    x: Tensor,
    g: Tensor,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """HGRN: h ← e^g ⊙ h + x, all (b, t, c)."""
    state = None if initial_state is None else ScanState(initial_state.to(wide(x.dtype)))
    o, after = diagonal_scan(x, g, cu_seqlens=cu_seqlens, state=state, return_state=True)
    return o, after.h if output_final_state else None


def _read_before(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, S: Tensor, cu_seqlens: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Compute o_t = S_{t−1}ᵀ q_t with S_t = Diag(e^log_decay_t) S_{t−1} + k_t v_tᵀ; return o and the last S.

    Each sequence gets one more position, and keys, values and decays move one to the right of their queries. Nothing is
    divided by a decay, so a decay may be as strong as it likes.
    """
    t, device = q.shape[2], q.device
    position, sequences, bounds = torch.arange(t, device=device), 1, None
    if cu_seqlens is not None:
        sequences = len(cu_seqlens) - 1
        bounds = cu_seqlens + torch.arange(len(cu_seqlens), device=device).to(cu_seqlens)
        position = position + torch.searchsorted(cu_seqlens.to(torch.int64), position, right=True) - 1

    def at(index: Tensor, x: Tensor) -> Tensor:
        return x.new_zeros(*x.shape[:2], t + sequences, x.shape[3]).index_copy(2, index, x)

    o, state = linear_attention(
        at(position, q), at(position + 1, k), at(position + 1, v), _IDENTITY, causal=True, normalize=False,
        log_decay=at(position + 1, log_decay), cu_seqlens=bounds, state=LinearState(S, S.new_zeros(S.shape[:3])),
        return_state=True,
    )  # fmt: skip
    return o.index_select(2, position), state.S


def _refuse(**options: Any) -> None:
    for name, value in options.items():
        if value is not None and value is not False:
            raise ValueError(f"tarnn computes flash-linear-attention's recurrences on a CPU without {name}=; got one.")


def _state(S: Tensor | None, state_v_first: bool, like: Tensor) -> Tensor | None:
    if S is None:
        return None
    return (S.mT if state_v_first else S).to(wide(like.dtype))


def _returned(S: Tensor, wanted: bool, state_v_first: bool) -> Tensor | None:
    if not wanted:
        return None
    return S.mT.contiguous() if state_v_first else S
