"""The delta rule of low rank: a state that is read by one vector and written by another, as in RWKV-7."""

from jaxtyping import Bool, Float, Int
from torch import Tensor

from tarnn.kernels.low_rank_delta import Call, Gradients, Outputs
from tarnn.numerics import autocast, wide
from tarnn.ops.checks import check_alike, check_kind, check_masks, check_state, check_step, check_tensors, shapes
from tarnn.ops.operators import with_operator
from tarnn.ops.registration import Op
from tarnn.ops.states import DeltaState
from tarnn.ops.validated import skip_repeated_checks

compute = Op("low_rank_delta", Call, Outputs, Gradients, ("o", "S"))
with_operator(compute, "low_rank_delta")


def low_rank_delta_rule(
    q: Float[Tensor, "rows h t d"],
    k: Float[Tensor, "rows h t d"],
    v: Float[Tensor, "rows h t e"],
    a: Float[Tensor, "rows h t d"],
    b: Float[Tensor, "rows h t d"],
    *,
    log_decay: Float[Tensor, "..."] | None = None,
    scale: float | None = None,
    key_mask: Bool[Tensor, "rows t"] | None = None,
    cu_seqlens: Int[Tensor, " n_plus_1"] | None = None,
    state: DeltaState | None = None,
    return_state: bool = False,
) -> Float[Tensor, "rows h t e"] | tuple[Float[Tensor, "rows h t e"], DeltaState]:
    """A linear recurrence whose transition is diagonal plus rank one, in time and memory linear in t:

        S ← (Diag(e^log_decay) + b aᵀ) S + k vᵀ        o = scale·Sᵀq

    a reads the state as it was before its decay. RWKV-7 has a = −κ̂ and b = κ̂ ⊙ α. With a = −k ⊙ e^log_decay and β k in the
    places of b and k, this is the gated delta rule (`tarnn.delta_rule`, which takes half the work).

    Args:
        q, k, a, b: (rows, h, t, d), v: (rows, h, t, e), one floating dtype, any strides. All have the same heads.
        log_decay: ≤ 0, of the state: (h,), (rows, h, t) or (rows, h, t, d). −∞ forgets all but what a has read. None: no
            decay. That it is ≤ 0 is not checked, since that would read the data.
        scale: of the outputs, 1/√d by default. RWKV-7 takes 1.
        key_mask: bool (rows, t), True = a real token. A masked token is absent: nothing is written and no decay happens.
        cu_seqlens: int (n + 1,): the row (one) holds n sequences end to end, which don't see each other.
        state: continues a sequence: f(x ++ y) = f(x), then f(y, state), also in gradients.
        return_state: return (o, state).

    Precision: all sums and the state are float32, float64 for float64 inputs; o has the dtype of q. Under autocast q, k, v, a
    and b are cast first. Whether the state stays bounded is up to a and b: keep |b·a| ≤ 2 for equal directions.

    Not finite: a NaN in k, v, a, b or a decay shows in all outputs of its row and head from its position on, one in q in its own
    output. Outputs before it stay as they are, to the bit. What stands at masked tokens reaches no other token.

    Raises ValueError or TypeError where shapes, dtypes or options don't fit.

    RWKV-7: Peng et al. 2025, eq. 17 (arXiv 2503.14456).

    >>> q = k = v = torch.ones(1, 2, 5, 4)
    >>> a, b = -torch.ones(1, 2, 5, 4) / 2, torch.ones(1, 2, 5, 4) / 2
    >>> low_rank_delta_rule(q, k, v, a, b).shape
    torch.Size([1, 2, 5, 4])
    """
    call = _make_call(q, k, v, a, b, log_decay, scale, key_mask, cu_seqlens, state)
    outputs = compute(call, with_state=return_state)
    return (outputs.o, DeltaState(outputs.S)) if return_state else outputs.o


def low_rank_delta_step(
    q: Float[Tensor, "rows h 1 d"],
    k: Float[Tensor, "rows h 1 d"],
    v: Float[Tensor, "rows h 1 e"],
    a: Float[Tensor, "rows h 1 d"],
    b: Float[Tensor, "rows h 1 d"],
    *,
    log_decay: Float[Tensor, "..."] | None = None,
    scale: float | None = None,
    state: DeltaState | None = None,
    inplace: bool = False,
) -> tuple[Float[Tensor, "rows h 1 e"], DeltaState]:
    """One token more of `low_rank_delta_rule`: returns o and the new state.

    log_decay: (h,), (rows, h, 1) or (rows, h, 1, d). Other arguments as there. `state=None` starts a sequence. The given state
    stays as it was unless `inplace=True`, which writes into its tensor (for loops without gradients) and returns it.
    """
    check_step("low_rank_delta_rule", q, 4, DeltaState, state, inplace)
    call = _make_call(q, k, v, a, b, log_decay, scale, None, None, state)
    if call.S is None:
        call = call._replace(S=call.new_state().zero_())
    outputs = compute.step(call, inplace=inplace)
    return outputs.o, state if inplace and state is not None else DeltaState(outputs.S)


@skip_repeated_checks
def _make_call(q, k, v, a, b, log_decay, scale, key_mask, cu_seqlens, state) -> Call:
    """The call, with decays in the wide dtype. Raises ValueError and TypeError for arguments that don't fit each other."""
    q, k, v, a, b = autocast(q, k, v, a, b)
    _check(q, k, v, a, b, log_decay, key_mask, cu_seqlens)
    _, h, t, d = q.shape
    if log_decay is not None:
        log_decay = log_decay.to(wide(q.dtype))
        log_decay = log_decay[None, :, None].expand(len(q), h, t) if log_decay.ndim == 1 else log_decay
    scale = d**-0.5 if scale is None else float(scale)
    call = Call(q, k, v, a, b, log_decay, None, key_mask, cu_seqlens, scale)
    if state is None:
        return call
    check_kind(state, DeltaState, "low_rank_delta_rule")
    check_state("S", state.S, call.state_shape, call.dtype, q.device)
    return call._replace(S=state.S)


def _check(q, k, v, a, b, log_decay, key_mask, cu_seqlens) -> None:
    given = {"q": q, "k": k, "v": v, "a": a, "b": b}
    check_tensors(**given, log_decay=log_decay)
    same = q.ndim == v.ndim == 4 and q.shape == k.shape == a.shape == b.shape and v.shape[:3] == q.shape[:3]
    if not same:
        raise ValueError(
            f"the delta rule of low rank takes q, k, a and b (rows, h, t, d) and v (rows, h, t, e); got {shapes(**given)}. "
            "A projection's (rows, t, h·d) output becomes (rows, h, t, d) by .unflatten(-1, (h, d)).transpose(1, 2)."
        )
    rows, h, t, d = q.shape
    check_alike(**given)
    check_masks(key_mask, cu_seqlens, rows, t, t)
    if log_decay is not None and log_decay.shape not in ((h,), (rows, h, t), (rows, h, t, d)):
        raise ValueError(
            f"log_decay must be (h,) = {(h,)}, (rows, h, t) = {(rows, h, t)} or (rows, h, t, d) = {(rows, h, t, d)}; "
            f"got {tuple(log_decay.shape)}."
        )
