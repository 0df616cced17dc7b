"""The delta rule: one function for every device, decay, mask and state; and one token of it."""

import math

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from tarnn.kernels.delta import Call, Gradients, Outputs
from tarnn.kernels.tracing import is_untraced
from tarnn.numerics import autocast, wide
from tarnn.ops.checks import check_alike, check_kind, check_masks, check_state, check_step, check_tensors, shapes
from tarnn.ops.operators import with_operator
from tarnn.ops.registration import Op
from tarnn.ops.states import DeltaState
from tarnn.ops.validated import skip_repeated_checks

compute = Op("delta", Call, Outputs, Gradients, ("o", "S"))
with_operator(compute, "delta_rule")


def delta_rule(
    q: Float[Tensor, "b h t d"],
    k: Float[Tensor, "b g t d"],
    v: Float[Tensor, "b m t e"],
    beta: Float[Tensor, "b n t"],
    *,
    log_decay: Float[Tensor, "..."] | None = None,
    normalize_qk: bool | float = False,
    scale: float | None = None,
    key_mask: Bool[Tensor, "b t"] | None = None,
    cu_seqlens: Int[Tensor, " rows_plus_1"] | None = None,
    state: DeltaState | None = None,
    return_state: bool = False,
) -> Float[Tensor, "b heads t e"] | tuple[Float[Tensor, "b heads t e"], DeltaState]:
    """A memory that each token corrects: the state first fades, then moves what it answers to k towards v, by β,

        S ← e^log_decay S          S ← S + β k (v − Sᵀk)ᵀ          o = scale·Sᵀq

    which is S ← (I − β k kᵀ) e^log_decay S + β k vᵀ. Time and memory are linear in t. It is DeltaNet without a decay, gated
    DeltaNet (Qwen3-Next, Qwen3.5, OLMo-hybrid) with one per token, Kimi's delta attention with one per channel.

    Args:
        q, k, v: (b, h, t, d), (b, g, t, d), (b, m, t, e), one floating dtype, any strides. There is one state for each of
            n = max(g, m) heads. Either m is a multiple of g = h (grouped values: state j has the query and key of head
            j // (m/g)), or h is a multiple of g = m (query head i reads state i // (h/g)). Nothing is repeated in memory.
        beta: (b, n, t), from 0 (the token is not written) over 1 (what was there is replaced) to 2 (it is reflected).
        log_decay: ≤ 0, of the state before the token is written: (n,) per head, (b, n, t) per token, (b, n, t, d) per
            channel of the keys. −∞ forgets all. None: nothing fades.
        normalize_qk: divide q and k by √(Σx² + 1e-6), over their channels; a number takes the place of 1e-6. The rule is
            stable where β·|k|² ≤ 2: keys that are not normalised must see to that themselves.
        scale: 1/√d by default.
        key_mask: bool (b, t), True = there. At a masked token S stays as it is: nothing is written, and no decay happens, on
            either side of a row. (transformers' own functions let padding on the right fade the state.)
        cu_seqlens: int (rows + 1,): the row (b = 1) holds sequences end to end, which don't see each other.
        state: continues a sequence: delta_rule(x ++ y) = delta_rule(x), then delta_rule(y, state), also in gradients.
        return_state: return (o, state).

    Returns o (b, max(h, m), t, e) in the dtype of q, and with `return_state` the `DeltaState` after the last token.

    Precision: sums and states are float32, float64 for float64 inputs, whatever the dtype; β and log_decay are computed with
    in that precision too, so pass them as float32. Under autocast, q, k, v are cast first, β and log_decay are not. With β = 2
    and a key that repeats, rounding errors are kept and add up; below 2 they fade.

    Not finite: a NaN in a query shows in its own output, one in a key, a value, β or a decay in all outputs of its head from
    its token on. Outputs before it stay as they are, to the bit. At masked tokens anything may stand.

    Cut at multiples of 64, a prompt gives the same bits as its pieces, each continued from the state after the one before.

    Kept for backward: q, k, v, β, log_decay, and one state in 256 tokens. Twice differentiable.

    Raises ValueError or TypeError where shapes, dtypes or options don't fit; on a CPU also for β outside 0…2 and for a
    log_decay above 0, unless the call is traced.

    Schlag et al. 2021, eq. 23–25 (arXiv 2102.11174); Yang et al. 2024 (arXiv 2406.06484, 2412.06464); Kimi Team 2025
    (arXiv 2510.26692).

    >>> q, k, v = torch.randn(3, 1, 2, 5, 4)
    >>> beta, log_decay = torch.rand(1, 2, 5), -torch.rand(1, 2, 5)
    >>> delta_rule(q, k, v, beta, log_decay=log_decay, normalize_qk=True).shape
    torch.Size([1, 2, 5, 4])
    """
    call = make_call(q, k, v, beta, log_decay, normalize_qk, scale, key_mask, cu_seqlens, state)
    outputs = compute(call, with_state=return_state)
    return (outputs.o, DeltaState(outputs.S)) if return_state else outputs.o


def delta_step(
    q: Float[Tensor, "b h 1 d"],
    k: Float[Tensor, "b g 1 d"],
    v: Float[Tensor, "b m 1 e"],
    beta: Float[Tensor, "b n 1"],
    *,
    log_decay: Float[Tensor, "..."] | None = None,
    normalize_qk: bool | float = False,
    scale: float | None = None,
    state: DeltaState | None = None,
    inplace: bool = False,
) -> tuple[Float[Tensor, "b heads 1 e"], DeltaState]:
    """The recurrence that `delta_rule` is, for one token more:

        S ← (I − β k kᵀ) e^log_decay S + β k vᵀ          o = scale·Sᵀq

    log_decay: (n,), (b, n, 1) or (b, n, 1, d). Other arguments, precision and errors as in `delta_rule`. `state=None` starts a
    sequence. Returns o and the new state; the given one stays as it was unless `inplace=True`, which writes into its tensor
    (for loops without gradients) and returns it.
    """
    check_step("delta_rule", q, 4, DeltaState, state, inplace)
    call = make_call(q, k, v, beta, log_decay, normalize_qk, scale, None, None, state)
    if state is None:
        call = call._replace(S=call.new_state().zero_())
    outputs = compute.step(call, inplace=inplace)
    return outputs.o, state if inplace and state is not None else DeltaState(outputs.S)


# --- arguments


NORM_EPS = 1e-6


def make_call(
    q, k, v, beta, log_decay, normalize_qk, scale, key_mask=None, cu_seqlens=None, state: DeltaState | None = None
) -> Call:
    """β and log_decay come in the wide dtype, a decay of each head for each token. Raises ValueError and TypeError for
    arguments that don't fit each other, and where looking at numbers costs little for β and decays out of range."""
    call = _checked(q, k, v, beta, log_decay, normalize_qk, scale, key_mask, cu_seqlens, state)
    if is_untraced(q):
        _check_numbers(call)
    return call


@skip_repeated_checks
def _checked(q, k, v, beta, log_decay, normalize_qk, scale, key_mask, cu_seqlens, state) -> Call:
    check_tensors(q=q, k=k, v=v, beta=beta, log_decay=log_decay)
    q, k, v = autocast(q, k, v)
    _check_shapes(q, k, v)
    (b, _, t, d), n, sums = q.shape, max(k.shape[1], v.shape[1]), wide(q.dtype)
    check_masks(key_mask, cu_seqlens, b, t, t)
    if beta.shape != (b, n, t):
        raise ValueError(
            f"beta must be (b, n, t) = {(b, n, t)}, one per state and token, n the larger of the key and value heads; "
            f"got {tuple(beta.shape)}."
        )
    _check_floating("beta", beta, q)
    if log_decay is not None:
        if log_decay.shape not in ((n,), (b, n, t), (b, n, t, d)):
            raise ValueError(
                f"log_decay must be (n,) = {(n,)}, (b, n, t) = {(b, n, t)} or (b, n, t, d) = {(b, n, t, d)}, n the larger of "
                f"the key and value heads; got {tuple(log_decay.shape)}."
            )
        _check_floating("log_decay", log_decay, q)
        log_decay = log_decay.to(sums)
        log_decay = log_decay[None, :, None].expand(b, n, t) if log_decay.ndim == 1 else log_decay
    if scale is None:
        scale = d**-0.5
    elif not _is_number(scale):
        raise ValueError(f"scale must be a finite number, or None for 1/√d; got {scale!r}.")
    norm_eps = _norm_eps(normalize_qk)
    call = Call(q, k, v, beta.to(sums), log_decay, None, key_mask, cu_seqlens, float(scale), norm_eps)
    if state is None:
        return call
    check_kind(state, DeltaState, "delta_rule")
    check_state("S", state.S, call.state_shape, call.dtype, q.device)
    return call._replace(S=state.S)


def _check_shapes(q: Tensor, k: Tensor, v: Tensor) -> None:
    if not q.ndim == k.ndim == v.ndim == 4:
        raise ValueError(
            f"the delta rule takes q (b, h, t, d), k (b, g, t, d), v (b, m, t, e): four axes each; got {shapes(q=q, k=k, v=v)}. "
            "A projection's (b, t, h·d) output becomes (b, h, t, d) by .unflatten(-1, (h, d)).transpose(1, 2)."
        )
    (b, h, t, d), g, m = q.shape, k.shape[1], v.shape[1]
    if k.shape != (b, g, t, d) or v.shape[0] != b or v.shape[2] != t or d == 0:
        raise ValueError(
            "q (b, h, t, d), k (b, g, t, d) and v (b, m, t, e) must share b and t, and q and k also d, which is 1 at least; "
            f"got {shapes(q=q, k=k, v=v)}. For a continued sequence pass state=."
        )
    values_in_groups, queries_in_groups = g == h and g and m % g == 0, g == m and g and h % g == 0
    if not (values_in_groups or queries_in_groups) or m == 0 or h == 0:
        raise ValueError(
            "heads must divide: as many keys as queries and a multiple of that of values, or as many keys as values and a "
            f"multiple of that of queries; got h = {h}, g = {g}, m = {m} ({shapes(q=q, k=k, v=v)})."
        )
    check_alike(q=q, k=k, v=v)


def _check_floating(name: str, x: Tensor, q: Tensor) -> None:
    if not x.is_floating_point():
        raise TypeError(f"{name} must be floating; got {x.dtype}. Pass {name}.float().")
    if x.device != q.device:
        raise ValueError(f"{name} must be where q is, on {q.device}; got {x.device}.")


def _check_numbers(call: Call) -> None:
    """Raise ValueError for a β or a log-decay out of range, where looking costs little: of tensors with data on a CPU."""
    beta, decay = (x if x is None or not x.requires_grad else x.detach() for x in (call.beta, call.log_decay))
    if beta is not None and beta.is_cpu and beta.numel() and is_untraced(beta):
        least, most = (x.item() for x in beta.aminmax())
        if not (least >= 0 and most <= 2) and _outside(beta, 0.0, 2.0, call.key_mask):
            raise ValueError(
                f"beta must be from 0 to 2; got {least:.3g} to {most:.3g}. Pass σ(logits), or 2·σ(logits), not the logits: "
                "beyond 2 a key that repeats makes the state grow without bound."
            )
    if decay is not None and decay.is_cpu and decay.numel() and is_untraced(decay):
        most = decay.max().item()
        if not most <= 0 and _outside(decay, -torch.inf, 0.0, call.key_mask):
            raise ValueError(
                f"log_decay must be ≤ 0: states fade, never grow; got {most:.3g}. Pass the logarithm of a factor."
            )


def _outside(x: Tensor, least: float, most: float, key_mask: Tensor | None) -> bool:
    """Whether some number of x (b, n, t, …) that is used is below or above; NaN is neither."""
    wrong = (x < least) | (x > most)
    if key_mask is not None:
        wrong = wrong & key_mask[:, None, :].reshape(x.shape[0], 1, -1, *[1] * (x.ndim - 3))
    return bool(wrong.any())


def _is_number(x) -> bool:
    return isinstance(x, (int, float)) and not isinstance(x, bool) and math.isfinite(x)


def _norm_eps(normalize_qk) -> float | None:
    if isinstance(normalize_qk, bool):
        return NORM_EPS if normalize_qk else None
    if not _is_number(normalize_qk) or normalize_qk <= 0:
        raise ValueError(
            "normalize_qk must be False, True for √(Σx² + 1e-6), or the number above 0 that takes the place of 1e-6; "
            f"got {normalize_qk!r}."
        )
    return float(normalize_qk)
