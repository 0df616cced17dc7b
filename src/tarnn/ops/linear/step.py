"""One token of linear attention: O(1) in time and memory, whatever came before."""

from jaxtyping import Float
from torch import Tensor, nn

from tarnn.feature_maps.base import FeatureMap
from tarnn.ops.linear.arguments import make_call, with_log_weights
from tarnn.ops.linear.op import _ELU, attend
from tarnn.ops.linear.state import LinearState
from tarnn.other_names import FUNCTION, names_ours


@names_ours(FUNCTION)
def step(
    q: Float[Tensor, "b h 1 d"],
    k: Float[Tensor, "b g 1 d"],
    v: Float[Tensor, "b m 1 e"],
    feature_map: FeatureMap | nn.Module | str = _ELU,
    state: LinearState | None = None,
    *,
    normalize: bool | str = True,
    eps: float | None = None,
    log_decay: Float[Tensor, "..."] | None = None,
    key_log_weight: Float[Tensor, "b m 1"] | None = None,
    inplace: bool = False,
) -> tuple[Float[Tensor, "b heads 1 e"], LinearState]:
    """The recurrence that `linear_attention(causal=True)` is, for one token more:

        S ← e^log_decay S + e^w φ(k) vᵀ      z ← e^log_decay z + e^w φ(k)      o = φ(q)ᵀS / (φ(q)ᵀz + eps)

    log_decay: (g,), (b, g, 1) or (b, g, 1, f). Other arguments, precision and errors as in
    `linear_attention`. `state=None` starts a sequence. Returns o and the new state; the given one stays as it
    was unless `inplace=True`, which writes into its tensors (for loops without gradients) and returns it.

    Katharopoulos et al. 2020, eq. 16–20 (arXiv 2006.16236).
    """
    if q.ndim == 4 and q.shape[2] != 1:
        raise ValueError(
            f"step takes one token, q (b, h, 1, d); got {tuple(q.shape)}. For more, linear_attention(state=…)."
        )
    made = make_call(q, k, v, feature_map, True, normalize, eps, None, None, log_decay, key_log_weight, state)
    call = made.call
    if state is None:
        if inplace:
            raise ValueError("step(inplace=True) needs a state to write into: make one with LinearState.zeros(…).")
        (b, g), f, e = call.v.shape[:2], call.num_features, call.v.shape[3]
        new = LinearState.zeros(b, g, f, e, log_weights=call.weighted, dtype=call.dtype, device=call.k.device)
        call = call._replace(S=new.S, z=new.z, M=new.M)
    elif inplace and (call.weighted or made.M is not None) and state.M is None:
        raise ValueError(
            "a state without M has no room for log-weights: make it with LinearState.zeros(…, log_weights=True)."
        )
    elif inplace and made.M is not None and state.M is not None and state.M.shape != made.M.shape:
        raise ValueError(
            f"these sums have a maximum for each feature, M {tuple(made.M.shape)}; the state has {tuple(state.M.shape)}. "
            "Make it with LinearState.zeros(…, log_features=True)."
        )
    outputs = attend.step(call, inplace=inplace)
    o = with_log_weights(outputs.o, made.log_weight)
    if not inplace or state is None:
        return o, made.state_of(outputs)
    if made.M is not None and state.M is not None:
        state.M.copy_(made.M)
    return o, state
