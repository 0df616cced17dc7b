"""Put tarnn's ops into the models of flash-linear-attention, which has kernels for GPUs alone, for tensors on a CPU."""

import importlib
import sys
import threading
from collections.abc import Callable
from functools import partial, wraps
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import silu

from tarnn.huggingface.patching import fla_modules as modules, fla_recurrences as recurrences

TESTED = ("0.6.0",)

# module → function → its replacement, put wherever a module of fla has imported the function
BY_NAME: dict[str, dict[str, Callable]] = {
    "ops.gated_delta_rule.chunk": {"chunk_gated_delta_rule": recurrences.gated_delta_rule},
    "ops.generalized_delta_rule.dplr.chunk": {"chunk_dplr_delta_rule": recurrences.low_rank},
    "ops.kda.chunk": {"chunk_kda": recurrences.gated_delta_rule},
    "ops.simple_gla.fused_recurrent": {"fused_recurrent_simple_gla": recurrences.gated_linear_attention},
    "ops.simple_gla.fused_chunk": {"fused_chunk_simple_gla": recurrences.gated_linear_attention},
    "ops.simple_gla.parallel": {"parallel_simple_gla": recurrences.gated_linear_attention},
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
    "modules.causal_conv1d.ops": {
        "causal_conv1d": modules.causal_conv1d,
        "causal_conv1d_update": modules.causal_conv1d_update,
    },
    "modules.norm.l2norm": {"l2norm": modules.l2norm},
    "modules.norm.layernorm": {
        "layer_norm": modules.group_norm,
        "group_norm": modules.group_norm,
        "rms_norm": partial(modules.group_norm, is_rms_norm=True),
        "layer_norm_linear": modules.group_norm_linear,
        "group_norm_linear": modules.group_norm_linear,
        "rms_norm_linear": partial(modules.group_norm_linear, is_rms_norm=True),
    },
    "modules.norm.fused_norm_gate": {
        "layer_norm_gated": modules.layer_norm_gated,
        "rms_norm_gated": partial(modules.layer_norm_gated, is_rms_norm=True),
    },
    "modules.activations.ops": {
        "sigmoid": torch.sigmoid,
        "logsigmoid": modules.logsigmoid,
        "swish": silu,
        "sqrelu": modules.squared_relu,
        "swiglu": modules.swiglu,
        "swiglu_linear": modules.swiglu_linear,
    },
}

_LOCK = threading.RLock()
_depth = 0  # how many `patch_fla` are open
_replaced: dict[int, tuple[Any, Any]] = {}  # id of what stands there instead → (it, the original)


def patch_fla() -> "Patched":
    """Let the models of flash-linear-attention run on a CPU, forward, backward and generation, by tarnn's ops.

        tarnn.patch_fla()                 # from now on
        with tarnn.patch_fla(): ...       # for a while

    GLA, gated DeltaNet, KDA, DeltaNet, RetNet, RWKV-6, RWKV-7, HGRN, HGRN-2 and linear attention are tested. Functions are
    replaced in its modules; they look at the device of their tensors, and compute others than a CPU's as before. Its fused
    losses run on GPUs alone: set `config.fuse_cross_entropy = False`.

    Raises ImportError where it is not installed, and ValueError for a version that was not tested.
    """
    global _depth
    with _LOCK:
        _check_version()
        if not _depth:
            for path, functions in BY_NAME.items():
                for name, function in functions.items():
                    original = getattr(_module(path), name)
                    ours = _for_cpus(function, original)
                    _replaced[id(ours)] = (ours, original)
            _swap({id(original): ours for ours, original in _replaced.values()})
            mixin = _generation_mixin()
            mixin.prepare_inputs_for_generation = _for_cpus(
                modules.inputs_for_generation, mixin.prepare_inputs_for_generation
            )
        _depth += 1
    return Patched()


def unpatch_fla() -> None:
    """Undo `patch_fla`, all calls of it. Nothing happens where nothing is patched."""
    _close(_depth)


class Patched:
    """A patch, returned by `patch_fla`. It lasts until `unpatch_fla`, or, after `with`, until the block ends."""

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
            mixin = _generation_mixin()
            mixin.prepare_inputs_for_generation = mixin.prepare_inputs_for_generation.__wrapped__


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


def _generation_mixin() -> Any:
    return _module("models.generation_utils").FLAGenerationMixin


def _for_cpus(function: Callable, original: Callable) -> Callable:
    """Return the function for tensors on a CPU, the original for others."""

    @wraps(original)
    def run(*args: Any, **kwargs: Any) -> Any:
        return (function if _on_cpu(args, kwargs) else original)(*args, **kwargs)

    return run


def _on_cpu(args: tuple, kwargs: dict[str, Any]) -> bool:
    first = next((x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)), None)
    return first is not None and first.is_cpu


def _swap(by_id: dict[int, Any]) -> None:
    """Put other values into the globals of all modules of fla, and into the tables among them."""
    for name, module in list(sys.modules.items()):
        if name.split(".")[0] != "fla" or module is None:
            continue
        tables = [vars(module), *(x for key, x in vars(module).items() if key == "ACT2FN")]
        for table in tables:
            table |= {key: by_id[id(value)] for key, value in table.items() if id(value) in by_id}
