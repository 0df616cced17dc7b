"""Remember which kinds of calls this GPU could not launch, so that plain PyTorch takes the next ones."""

from tarnn.kernels.contract import Mendable, form
from tarnn.kernels.linear import Call

_refused: dict[tuple, str] = {}  # by kind: why


class LaunchError(Exception):
    """A kernel could not be compiled, loaded or launched: too much for this GPU, a driver too old, no C compiler.

    What the call was given is as it was: all that kernels before it wrote is the call's own.
    """

    def __init__(self, kernel: str, error: BaseException):
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        super().__init__(f"kernel {kernel} could not be launched ({reason[:400]})")


def kind_of(call: Call) -> tuple:
    """What the kernels of a call depend on, but for how tensors lie in memory; and whether it may be a step."""
    widths = call.q.shape[3], call.num_features, call.v.shape[3], call.q.shape[1] == call.k.shape[1]
    return (call.q.shape[2] == 1, call.q.device, call.q.dtype, widths, call.has_channels, *form(call))


def refusal(call: Call) -> str | None:
    """Why calls of this kind aren't tried any more, or None."""
    return _refused.get(kind_of(call)) if _refused else None


def refuse(call: Call, error: LaunchError) -> None:
    """No call of this kind from now on."""
    (_, _, _, d), e, f = call.q.shape, call.v.shape[3], call.num_features
    dtype = str(call.q.dtype).removeprefix("torch.")
    _refused[kind_of(call)] = Mendable(
        f"Attention on the GPU runs in plain PyTorch for {dtype} with heads of {d}, {f} features and values of {e}: "
        f"{error}; narrower heads or fewer features may fit, and TARNN_KERNELS=off asks for plain PyTorch."
    )
