"""Linear attention: one function for every device, map, mask, decay and state."""

from typing import Any

from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from tarnn.feature_maps.base import FeatureMap
from tarnn.feature_maps.elementwise import Elu
from tarnn.kernels.linear import BackwardInputs, Call, Gradients, Outputs
from tarnn.ops.checks import check_step
from tarnn.ops.linear.arguments import make_call, with_log_weights
from tarnn.ops.linear.bidirectional import attend_both_sides
from tarnn.ops.operators import with_operator
from tarnn.ops.registration import Op
from tarnn.ops.states import LinearState

_ELU = Elu()


def _keep(call: Call, outputs: Outputs, with_state: bool) -> Outputs:
    """Select what backward needs: o and den; if causal, the backend's kept states; otherwise a copy of the state, because the
    caller may modify the returned one."""
    if call.causal:
        return outputs._replace(S=None, z=None, M=None)
    S, z, M = (x.clone() if with_state else x for x in outputs[2:5])
    return outputs._replace(S=S, z=z, M=M, kept=None)


attend = Op(
    "linear",
    Call,
    Outputs,
    Gradients,
    ("o", "S", "z"),
    handed_out=("o", "S", "z", "M"),
    keep=_keep,
    returned=BackwardInputs,
    flags=lambda needs: (bool(needs.omega or needs.bias),),  # `wants_projection`
)
with_operator(attend, "linear_attention")


def linear_attention(
    q: Float[Tensor, "b h t d"],
    k: Float[Tensor, "b g s d"],
    v: Float[Tensor, "b m s e"],
    feature_map: FeatureMap | nn.Module | str = _ELU,
    *,
    causal: bool,
    normalize: bool | str = True,
    eps: float | None = None,
    key_mask: Bool[Tensor, "b s"] | None = None,
    cu_seqlens: Int[Tensor, " n_plus_1"] | None = None,
    log_decay: Float[Tensor, "..."] | None = None,
    log_decay_back: Float[Tensor, "..."] | None = None,
    key_log_weight: Float[Tensor, "b m s"] | None = None,
    state: LinearState | None = None,
    return_state: bool = False,
) -> Float[Tensor, "b heads t e"] | tuple[Float[Tensor, "b heads t e"], LinearState]:
    """Attention whose weights are dot products of features, in time and memory linear in t:

        o_i = Σ_j e^(w_j + D_ij) φ(q_i)·φ(k_j) v_j / (Σ_j e^(w_j + D_ij) φ(q_i)·φ(k_j) + eps)

    over j ≤ i where causal, over all j else; D_ij = Σ_{j<l≤i} log_decay_l, and for j > i Σ_{i≤l<j} log_decay_back_l;
    w = key_log_weight. There is no 1/√d: scale q yourself where the map wants it. A query that sees no key, or none with a
    feature in common, yields zeros and passes no gradient.

    Args:
        q, k, v: (b, h, t, d), (b, g, s, d), (b, g, s, e), one floating dtype, any strides. Key/value head j
            belongs to the h/g query heads from j·h/g on; nothing is repeated in memory. Or h = g, and v (b, m, s, e) has more
            heads, a multiple (Mamba-2's groups): then the states, log_decay and key_log_weight have m heads, and o is
            (b, m, t, e).
        feature_map: φ, (…, d) → (…, f): one of `tarnn.feature_maps`, the name of one (with its default options, and
            random features drawn from seed 0), or any nn.Module that keeps to the precision of x.
        causal: position i sees j ≤ i only, to the bit: nothing later changes its output, finite or not.
        normalize: divide by the sum of the weights. Signed maps can't; they take normalize=False. "at_least_one": divide by
            max(|sum|, 1), as mLSTM does, also with signed maps (of those that kernels know).
        eps: added to the denominator, in units of the largest key weight so far; by default 1e-30, and 1e-290
            for float64 inputs: sums below that fade to zero.
        key_mask: bool (b, s), True = attend. A masked key is absent: from S, from z, and no decay happens at it.
        cu_seqlens: int (n + 1,): the row (b = 1) holds n sequences end to end, which don't see each other.
        log_decay: ≤ 0, of the state before position i is added: (g,) per head (RetNet), (b, g, s) per token
            (Mamba-2, RFA's gate), (b, g, s, f) per channel (GLA). −∞ forgets all. Without causality it fades the keys before a
            query, and needs log_decay_back beside it. That it is ≤ 0 is not checked, since that would read the data.
        log_decay_back: likewise, of the keys after a query; not causal, and without a state. Two sweeps compute it, in float32
            at least; features of maps that the kernels don't know, or with log-weights or channel decays, are stored.
        key_log_weight: (b, g, s): key j counts e^(w_j) times, in numerator and denominator, whatever its size.
        state: continues a sequence: attend(x ++ y) = attend(x), then attend(y, state), also in gradients.
            Non-causal queries see its keys as well as the ones given.
        return_state: return (o, state).

    Precision: features (of maps the kernels know: identity, elu, relu, relu², exp) and all sums are float32,
    float64 for float64 inputs, whatever the dtype; o has the dtype of v. Under autocast, q, k, v are cast first.

    Not finite: a NaN shows in every output that uses it: one in a query in its own, one in a key, value, weight or decay in
    those from its position on (without causality in all of its row and head). Outputs before it stay as they are, to the bit.
    (On GPUs see docs/gpu.md.) At masked keys anything may stand: it reaches no output and no gradient.

    Kept for backward: q, k, v, o, one number per query and, on a CPU where causal, one state in 256 tokens (512 with
    random features); the features are computed again. So it is with random features of softmax's kernel and of relu,
    whose projection is computed in the kernel too: t × m features are never stored. (The features of another φ are
    ordinary tensors under autograd, and so are all where key_log_weight meets a decay per channel: their sums have a maximum
    for each channel.) Twice differentiable.

    Raises ValueError or TypeError where shapes, dtypes or options don't fit.

    Katharopoulos et al. 2020, eq. 4–15 (arXiv 2006.16236); Choromanski et al. 2021, algorithm 1 (arXiv 2009.14794).

    >>> q = k = v = torch.ones(1, 2, 5, 4)
    >>> linear_attention(q, k, v, causal=True).shape
    torch.Size([1, 2, 5, 4])
    """
    options = (causal, normalize, eps, key_mask, cu_seqlens, log_decay, key_log_weight, state)
    if log_decay_back is not None or (log_decay is not None and not causal):
        return attend_both_sides(linear_attention, q, k, v, feature_map, *options, log_decay_back, return_state)
    return compute_attention(q, k, v, feature_map, options, return_state)


def compute_attention(
    q: Tensor, k: Tensor, v: Tensor, feature_map: Any, options: tuple[Any, ...], return_state: bool
) -> Any:
    """Compute o, or (o, state); options: those of `make_call`. `tarnn.parallel` puts its own function in this place."""
    made = make_call(q, k, v, feature_map, *options)
    outputs = attend(made.call, with_state=return_state)
    o = with_log_weights(outputs.o, made.log_weight)
    return (o, made.state_of(outputs)) if return_state else o


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
    check_step("linear_attention", q, 4, LinearState, state, inplace)
    made = make_call(q, k, v, feature_map, True, normalize, eps, None, None, log_decay, key_log_weight, state)
    call = made.call
    if state is None:
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
