"""Put tarnn's ops into the models of flash-linear-attention, which has kernels for GPUs alone, for tensors on a CPU."""

import functools
import importlib
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor

from tarnn.huggingface.patching import fla_modules as modules, fla_recurrences as recurrences

TESTED = ("0.6.0",)

# what its own registry of backends dispatches: name of the registry → function → what computes it
BY_REGISTRY: dict[str, dict[str, Callable]] = {
    "gated_delta_rule": {"chunk_gated_delta_rule": recurrences.gated_delta_rule},
    "generalized_delta_rule.dplr": {"chunk_dplr_delta_rule": recurrences.low_rank},
}
# functions that the registry dispatches one by one: module → name → what computes it
BY_FUNCTION: dict[str, dict[str, Callable]] = {
    "ops.kda.chunk": {"chunk_kda": recurrences.gated_delta_rule},
    "ops.simple_gla.fused_recurrent": {"fused_recurrent_simple_gla": recurrences.gated_linear_attention},
    "ops.simple_gla.fused_chunk": {"fused_chunk_simple_gla": recurrences.gated_linear_attention},
    "ops.simple_gla.parallel": {"parallel_simple_gla": recurrences.gated_linear_attention},
    "modules.activations.ops": {
        "sigmoid_fwd": modules.sigmoid,
        "sigmoid_bwd": modules.sigmoid_gradient,
        "logsigmoid_fwd": modules.logsigmoid,
        "logsigmoid_bwd": modules.logsigmoid_gradient,
        "swish_fwd": modules.swish,
        "swish_bwd": modules.swish_gradient,
        "swiglu_fwd": modules.swiglu,
        "swiglu_fwdbwd": modules.swiglu_gradients,
    },
    "modules.causal_conv1d.ops": {"causal_conv1d_update": modules.causal_conv1d_update},
    "modules.fused_cross_entropy.ops": {"cross_entropy_loss": modules.cross_entropy_loss},
}
# functions that have no entry there: they are replaced wherever a module of fla has imported them
BY_NAME: dict[str, dict[str, Callable]] = {
    "ops.gla.chunk": {"chunk_gla": recurrences.gated_linear_attention},
    "ops.gla.fused_recurrent": {"fused_recurrent_gla": recurrences.gated_linear_attention},
    "ops.simple_gla.chunk": {"chunk_simple_gla": recurrences.gated_linear_attention},
    "ops.gated_delta_rule.fused_recurrent": {"fused_recurrent_gated_delta_rule": recurrences.gated_delta_rule},
    "ops.kda.fused_recurrent": {"fused_recurrent_kda": recurrences.gated_delta_rule},
    "ops.delta_rule.chunk": {"chunk_delta_rule": recurrences.delta_rule_without_gate},
    "ops.delta_rule.fused_recurrent": {"fused_recurrent_delta_rule": recurrences.delta_rule_without_gate},
    "ops.generalized_delta_rule.dplr.fused_recurrent": {"fused_recurrent_dplr_delta_rule": recurrences.low_rank},
    "ops.hgrn.chunk": {"chunk_hgrn": recurrences.scan},
    "ops.hgrn.fused_recurrent": {"fused_recurrent_hgrn": recurrences.scan},
    "ops.rwkv6.chunk": {"chunk_rwkv6": recurrences.with_bonus},
    "ops.rwkv6.fused_recurrent": {"fused_recurrent_rwkv6": recurrences.with_bonus},
    "ops.rwkv7.fused_recurrent": {"fused_mul_recurrent_rwkv7": recurrences.rwkv7_tokens},
    "ops.rwkv7.fused_addcmul": {"fused_addcmul_rwkv7": modules.mixtures_of_rwkv7},
    "ops.rwkv7.fused_k_update": {"fused_k_rwkv7": modules.keys_of_rwkv7},
    "ops.rwkv7.gate_output_correction": {"gate_output_correction": modules.output_of_rwkv7},
    "modules.token_shift": {"token_shift": modules.token_shift},
    "modules.rotary.ops": {"rotary_embedding": modules.rotary_embedding},
    "modules.causal_conv1d.ops": {"causal_conv1d": modules.causal_conv1d},
    "modules.norm.l2norm": {"l2norm": modules.l2norm},
    "modules.norm.layernorm": {
        "layer_norm": modules.layer_norm,
        "group_norm": modules.group_norm,
        "rms_norm": modules.rms_norm,
        "layer_norm_linear": modules.layer_norm_linear,
        "group_norm_linear": modules.group_norm_linear,
        "rms_norm_linear": modules.rms_norm_linear,
    },
    "modules.norm.fused_norm_gate": {
        "layer_norm_gated": modules.layer_norm_gated,
        "rms_norm_gated": modules.rms_norm_gated,
    },
    "modules.activations.ops": {"sqrelu_fwd": modules.squared_relu, "sqrelu_bwd": modules.squared_relu_gradient},
    "modules.fused_linear_cross_entropy.ops": {"fused_linear_cross_entropy_loss": modules.linear_cross_entropy_loss},
}
# methods, likewise: module → class → name → what computes it
METHODS = {"modules.fused_cross_entropy.ops": {"FusedCrossEntropyLoss": {"forward": modules.loss_forward}}}

_LOCK = threading.RLock()
_depth = 0  # how many `patch_fla` are open
_replaced: dict[int, tuple[Any, Any]] = {}  # id of what stands there instead → (it, the original)
_registered = False


def patch_fla() -> "Patched":
    """Let the models of flash-linear-attention run on a CPU, forward, backward and generation, by tarnn's ops.

        tarnn.patch_fla()                 # from now on
        with tarnn.patch_fla(): ...       # for a while

    GLA, gated DeltaNet, KDA, DeltaNet, RetNet, RWKV-6, RWKV-7, HGRN, HGRN-2 and linear attention are tested. What its registry of
    backends dispatches gets one more backend; all other functions are replaced in its modules. Both look at the device of
    their tensors: what is not on a CPU is computed as before.

    Raises ImportError where it is not installed, and ValueError for a version that was not tested.
    """
    global _depth, _registered
    with _LOCK:
        _check_version()
        if not _registered:
            _register()
            _registered = True
        if not _depth:
            for path, functions in BY_NAME.items():
                for name, function in functions.items():
                    original = getattr(_module(path), name)
                    ours = _for_cpus(function, original)
                    _replaced[id(ours)] = (ours, original)
            _swap({id(original): ours for ours, original in _replaced.values()})
            for owner, name, function in _methods():
                setattr(owner, name, _for_cpus(function, getattr(owner, name)))
        _depth += 1
    return Patched()


def unpatch_fla() -> None:
    """Undo `patch_fla`, all calls of it. Nothing happens where nothing is patched."""
    _close(_depth)


class Patched:
    """What `patch_fla` returns. It lasts until `unpatch_fla`, or, after `with`, until the block ends."""

    def __enter__(self) -> "Patched":
        return self

    def __exit__(self, *_: object) -> None:
        _close(1)


def _close(times: int) -> None:
    global _depth
    with _LOCK:
        if not _depth:
            return
        _depth = max(0, _depth - times)
        if not _depth:
            _swap({id(ours): original for ours, original in _replaced.values()})
            _replaced.clear()
            for owner, name, _ in _methods():
                setattr(owner, name, getattr(owner, name).__wrapped__)


def _check_version() -> None:
    try:
        fla = importlib.import_module("fla")
    except ModuleNotFoundError as error:
        raise ImportError(
            f"patch_fla needs flash-linear-attention: pip install flash-linear-attention=={TESTED[-1]} einops"
        ) from error
    if fla.__version__ not in TESTED:
        raise ValueError(
            f"tarnn runs the models of flash-linear-attention {', '.join(TESTED)}, which were tested; installed is "
            f"{fla.__version__}. pip install flash-linear-attention=={TESTED[-1]}"
        )


def _module(path: str) -> Any:
    return importlib.import_module(f"fla.{path}")


def _methods() -> Iterator[tuple[type, str, Callable]]:
    for path, classes in METHODS.items():
        for kind, methods in classes.items():
            for name, function in methods.items():
                yield getattr(_module(path), kind), name, function


def _for_cpus(function: Callable, original: Callable) -> Callable:
    """The function for tensors on a CPU, the original for others."""

    @functools.wraps(original)
    def run(*args: Any, **kwargs: Any) -> Any:
        return (function if _on_cpu(args, kwargs) else original)(*args, **kwargs)

    return run


def _on_cpu(args: tuple, kwargs: dict[str, Any]) -> bool:
    first = next((x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)), None)
    return first is not None and first.is_cpu


def _swap(by_id: dict[int, Any]) -> None:
    """Put other values into the globals of all modules of fla."""
    for name, module in list(sys.modules.items()):
        if name.split(".")[0] != "fla" or module is None:
            continue
        for key, value in list(vars(module).items()):
            if id(value) in by_id:
                setattr(module, key, by_id[id(value)])


def _register() -> None:
    """One more backend for what the registry dispatches; it takes tensors of a CPU while fla is patched."""
    registry = importlib.import_module("fla.backends")
    for operation, functions in BY_REGISTRY.items():
        names = {name: staticmethod(function) for name, function in functions.items()}
        for path in ("verify", "is_enabled"):
            names[path] = globals()[f"_{path}"]
        backend = type("TarnnBackend", (registry.BaseBackend,), {"backend_type": "tarnn", "priority": -1, **names})
        importlib.import_module(f"fla.ops.{operation}")
        registry.register(operation)(backend)
    for path, functions in BY_FUNCTION.items():
        options = {"backend_type": "tarnn", "priority": -1, "verify": _verify, "is_enabled": _is_enabled}
        for name, function in functions.items():
            backend = type("TarnnBackend", (registry.BaseBackend,), options)
            registry.register(getattr(_module(path), name), backend=backend)(function)


def _is_enabled(backend: Any) -> bool:
    return _depth > 0


def _verify(backend: Any, function_name: str, *args: Any, **kwargs: Any) -> tuple[bool, str | None]:
    """Whether this call is for tarnn, and if not, why."""
    if backend.get_implementation(function_name) is None:
        return False, "tarnn does not compute this function"
    return (True, None) if _on_cpu(args, kwargs) else (False, "tarnn computes tensors of a CPU")
