"""Linear attention (placeholder inside, the contract outside)."""

from tarnn.feature_maps.elementwise import Elu
from tarnn.ops import reference
from tarnn.ops.state import LinearState


def linear_attention(
    q, k, v, feature_map=None, *, causal, normalize=True, eps=1e-24, key_mask=None, cu_seqlens=None,
    log_decay=None, key_log_weight=None, state=None, return_state=False,
):  # fmt: skip
    feature_map = Elu() if feature_map is None else feature_map
    fq, fk = feature_map(q.float()), feature_map(k.float())
    assert cu_seqlens is None
    if not causal:
        assert state is None and not return_state
        o = reference.quadratic(fq, fk, v.float(), causal=False, normalize=normalize, eps=eps, key_mask=key_mask, key_log_weight=key_log_weight)
        return o.to(v.dtype)
    s = None
    if state is not None:
        M = state.z.new_zeros(state.z.shape[:2]) if state.M is None else state.M
        s = reference.RecurrentState(state.S, state.z, M)
    o, s = reference.recurrent(fq, fk, v.float(), normalize=normalize, eps=eps, key_mask=key_mask, log_decay=log_decay, key_log_weight=key_log_weight, state=s)
    o = o.to(v.dtype)
    return (o, LinearState(s.S, s.z, None if key_log_weight is None else s.M)) if return_state else o
