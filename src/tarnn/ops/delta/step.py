"""One token of the delta rule: O(1) in time and memory, whatever came before."""

from jaxtyping import Float
from torch import Tensor

from tarnn.ops.delta.arguments import make_call
from tarnn.ops.delta.op import compute
from tarnn.ops.delta.state import DeltaState
from tarnn.other_names import DELTA, names_ours


@names_ours(DELTA)
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
    if q.ndim == 4 and q.shape[2] != 1:
        raise ValueError(
            f"delta_step takes one token, q (b, h, 1, d); got {tuple(q.shape)}. For more, delta_rule(state=…)."
        )
    call = make_call(q, k, v, beta, log_decay, normalize_qk, scale, state=state)
    if state is None:
        if inplace:
            raise ValueError("delta_step(inplace=True) needs a state to write into: make one with DeltaState.zeros(…).")
        call = call._replace(S=call.new_state().zero_())
    outputs = compute.step(call, inplace=inplace)
    return outputs.o, state if inplace and state is not None else DeltaState(outputs.S)
