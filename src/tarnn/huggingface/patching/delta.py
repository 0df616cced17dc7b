"""The gated delta rule: whole sequences, and one token. Decays per head (Qwen3-Next and others) or per channel (Kimi Linear)."""

from typing import Any

from torch import Tensor

from tarnn.huggingface.patching.first_state import first_state
from tarnn.huggingface.patching.in_place import may_write
from tarnn.huggingface.patching.packed import bounds_of, end_to_end
from tarnn.huggingface.patching.undo import recording, remembered
from tarnn.ops.delta.op import delta_rule, delta_step
from tarnn.ops.states import DeltaState


def delta_sequences(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    chunk_size: int = 64,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """query, key (b, t, g, d), value (b, t, n, e), g (b, t, n) or (b, t, n, d), beta (b, t, n): o (b, t, n, e) and S."""
    inputs: tuple[Tensor, ...] = (query, key, value, g, beta)
    bounds = bounds_of(kwargs)
    if bounds is not None:
        inputs = tuple(end_to_end(x) for x in inputs)
    if initial_state is None:
        heads, widths = max(query.shape[2], value.shape[2]), (key.shape[3], value.shape[3])
        initial_state = first_state(len(query), bounds, heads, *widths)
    state = None if initial_state is None else DeltaState(initial_state.float())

    def run(inputs: tuple[Tensor, ...], state: DeltaState | None) -> Any:
        q, k, v, log_decay, strength = inputs
        options: dict[str, Any] = {"normalize_qk": use_qk_l2norm_in_kernel, "cu_seqlens": bounds, "return_state": True}
        return delta_rule(q, k, v, strength, log_decay=log_decay, state=state, **options)

    o, after = remembered(run, tuple(x.transpose(1, 2) for x in inputs), state, lambda x: x.S)
    o = o.transpose(1, 2).reshape(*value.shape)
    return o, after.S if output_final_state else None


def delta_token(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Compute the gated delta rule of one token. Without gradients the cache's own state is written to."""
    if query.shape[1] != 1 or initial_state is None or recording() is not None:
        states = {"initial_state": initial_state, "output_final_state": output_final_state}
        kwargs |= {**states, "use_qk_l2norm_in_kernel": use_qk_l2norm_in_kernel}
        return delta_sequences(query, key, value, g, beta, **kwargs)
    q, k, v, log_decay, strength = (x.transpose(1, 2) for x in (query, key, value, g, beta))
    S = initial_state.float()
    options = {"normalize_qk": use_qk_l2norm_in_kernel, "inplace": may_write(S) and output_final_state}
    o, after = delta_step(q, k, v, strength, log_decay=log_decay, state=DeltaState(S), **options)
    return o.transpose(1, 2), after.S if output_final_state else None
