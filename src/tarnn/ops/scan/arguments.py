"""What fits a scan and what doesn't: shapes, types, devices, states; expected, got, remedy."""

from torch import Tensor

from tarnn.numerics import wide
from tarnn.ops.checks import check_key_mask, check_packing, check_tensors, shapes
from tarnn.ops.scan.state import ScanState


def check_inputs(
    expected: str, fits: bool, inputs: dict[str, Tensor], key_mask: Tensor | None, cu_seqlens: Tensor | None
) -> None:
    """Raises unless the inputs, the first of which is x (b, t, c), are of the expected shapes, floating and on one device, and a
    mask and the bounds of packed sequences fit them."""
    check_tensors(key_mask=key_mask, cu_seqlens=cu_seqlens)
    x = inputs["x"]
    if not fits:
        raise ValueError(f"a scan takes {expected}; got {shapes(**inputs)}.")
    for name, tensor in inputs.items():
        if not tensor.is_floating_point():
            raise TypeError(f"{name} must be of a floating type; got {tensor.dtype}. Cast it first.")
        if tensor.device != x.device:
            raise ValueError(f"all inputs must be on one device; got x on {x.device} and {name} on {tensor.device}.")
    b, t, _ = x.shape
    if key_mask is not None:
        check_key_mask(key_mask, b, t, "t")
    if cu_seqlens is not None:
        check_packing(cu_seqlens, b, t, t)


def checked_state(state: ScanState | None, shape: tuple[int, ...], x: Tensor) -> Tensor | None:
    """The h of a state; ValueError where it is not of this shape, and of the type and on the device that x needs."""
    if state is None:
        return None
    if not isinstance(state, ScanState):
        raise ValueError(f"state must be a ScanState(h); got {type(state).__name__}.")
    h = state.h
    if h.shape != shape or h.dtype != wide(x.dtype) or h.device != x.device:
        raise ValueError(
            f"the state's h must be {shape} in {wide(x.dtype)} on {x.device}; got {tuple(h.shape)} in {h.dtype} on {h.device}. "
            "A state fits the model, the number of sequences and the precision that made it."
        )
    return h


def check_one_token(x: Tensor, state: ScanState | None, inplace: bool, function: str) -> None:
    """Raises ValueError unless x is one token (b, 1, c), and there is a state to write into where `inplace`."""
    if x.ndim == 3 and x.shape[1] != 1:
        raise ValueError(
            f"{function}_step takes one token, x (b, 1, c); got {tuple(x.shape)}. For more, {function}(state=…)."
        )
    if inplace and state is None:
        raise ValueError(
            f"{function}_step(inplace=True) needs a state to write into: make one with ScanState.zeros(…)."
        )
