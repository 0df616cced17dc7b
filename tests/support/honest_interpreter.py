"""Triton's interpreter, made to say what a GPU would do.

TRITON_INTERPRET=1 runs kernels on the CPU, by NumPy, but forgives much and gets bfloat16 wrong. `install()` changes that:

numbers   bfloat16 is computed in float32 and rounded to nearest even after each operation, a sum once; `tl.dot` of float32 is
          made of the parts that its `input_precision` names (tf32, tf32x3, bf16x3)
sizes     a product with a side under 16 is refused, as a GPU refuses it; so is int32 arithmetic that overflows
masks     a lane that a load masks off, without `other`, is NaN (of integers, a large number)
bounds    every lane of a load or a store lies within a tensor of the launch
races     no two programs of a launch touch one element if one of them writes it; no store writes an element twice
order     programs run in a shuffled order (`order(seed)`)
loops     what counts a loop can be cast (`i.to(tl.int64)`), as on a GPU

`install(capability)` also takes the place of a GPU's driver, for kernels that are tuned: each runs in its first form only.

A fault is an `InterpreterError` that names the line. Made for triton 3.7.
"""

import contextlib
import dataclasses
import itertools
import random
import traceback
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch.utils import _pytree as pytree
from triton import language as tl
from triton.backends.compiler import GPUTarget
from triton.backends.driver import DriverBase
from triton.runtime import driver, interpreter
from triton.runtime.autotuner import Autotuner
from triton.runtime.interpreter import GridExecutor, InterpretedFunction, InterpreterBuilder, TensorHandle

SMALLEST_SIDE = 16
NAN_BF16 = np.uint16(0x7FC0)
PARTS = {"TF32": ("tf32", 1), "TF32x3": ("tf32", 2), "BF16x3": ("bf16", 2), "BF16x6": ("bf16", 3), "IEEE": ("", 0)}
_seed: int | None = None


@contextlib.contextmanager
def order(seed: int | None) -> Iterator[None]:
    """Programs run in an order that `seed` shuffles; None: as they are numbered."""
    with mock.patch(f"{__name__}._seed", seed):
        yield


def install(capability: int = 90) -> None:
    """For this process; twice does no more than once."""
    if InterpreterBuilder.create_dot is _dot:
        return
    driver.set_active(_NoDriver(capability))
    Autotuner.run = _run_first
    interpreter._patch_lang = _patch_language
    for kind in (interpreter.ReduceOps, interpreter.ScanOps):
        kind.apply_impl = _in_float32(kind.apply_impl)
    precisions = ("tf32", "tf32x3", "ieee", "bf16x3", "bf16x6")
    builder = interpreter.interpreter_builder
    builder.options = dataclasses.replace(builder.options, allowed_dot_input_precisions=precisions)
    for name, method in {
        "cast_impl": _cast,
        "create_fp_to_fp": _round,
        "binary_op": _binary,
        "unary_op": _unary,
        "create_dot": _dot,
        "create_masked_load": _load,
        "create_masked_store": _store,
        "create_atomic_rmw": _atomic,
        "set_grid_dim": _set_grid,
        "set_grid_idx": _set_program,
        "get_bf16": _bf16_constant,
    }.items():
        setattr(InterpreterBuilder, name, method)
    InterpretedFunction.__call__ = _call
    GridExecutor._init_args_hst = _arguments
    GridExecutor._restore_args_dev = _keep


# --- numbers

_plain_cast, _plain_round = InterpreterBuilder.cast_impl, InterpreterBuilder.create_fp_to_fp
_plain_binary, _plain_unary = InterpreterBuilder.binary_op, InterpreterBuilder.unary_op
_plain_dot = InterpreterBuilder.create_dot


def widened(bits: np.ndarray) -> np.ndarray:
    """bfloat16, which NumPy has as uint16, as float32."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def narrowed(x: np.ndarray) -> np.ndarray:
    """float32 to the bits of bfloat16, to nearest even."""
    bits = np.ascontiguousarray(x, dtype=np.float32).view(np.uint32)
    rounded = ((bits.astype(np.uint64) + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    return np.where(np.isnan(x), NAN_BF16, rounded)


def cut_to_tf32(x: np.ndarray) -> np.ndarray:
    """The ten bits of mantissa that a tensor core reads of a float32; it ignores the others."""
    bits = np.ascontiguousarray(x, dtype=np.float32).view(np.uint32)
    return (bits & np.uint32(0xFFFFE000)).view(np.float32)


def _is_bf16(x: TensorHandle) -> bool:
    return x.dtype.scalar == tl.bfloat16


def _wide(x: TensorHandle) -> TensorHandle:
    return TensorHandle(widened(x.data), tl.float32) if _is_bf16(x) else x


def _bf16_constant(self, value: float) -> TensorHandle:
    return TensorHandle(narrowed(np.array([value], np.float32)), tl.bfloat16)


def _cast(self, x: TensorHandle, dtype) -> TensorHandle:
    to_bf16 = dtype.scalar == tl.bfloat16
    if _is_bf16(x) and not to_bf16:
        return _plain_cast(self, _wide(x), dtype)
    if to_bf16 and not _is_bf16(x):
        return TensorHandle(narrowed(x.data.astype(np.float32)), tl.bfloat16)
    return _plain_cast(self, x, dtype)


def _round(self, x: TensorHandle, dtype, rounding) -> TensorHandle:
    if tl.bfloat16 in (x.dtype.scalar, dtype.scalar):
        return _cast(self, x, dtype)
    return _plain_round(self, x, dtype, rounding)


def _binary(self, a: TensorHandle, b: TensorHandle, op: Callable) -> TensorHandle:
    if _is_bf16(a) and _is_bf16(b) and op not in (np.bitwise_and, np.bitwise_or, np.bitwise_xor):
        found = op(widened(a.data), widened(b.data))
        return TensorHandle(found, tl.int1) if found.dtype == bool else TensorHandle(narrowed(found), tl.bfloat16)
    if a.dtype.scalar == tl.int32 and op in (np.add, np.subtract, np.multiply):
        left, right = _largest(a.data), _largest(b.data)
        if (left * right if op is np.multiply else left + right) >= 2**31:
            exact = op(a.data.astype(np.int64), b.data.astype(np.int64))
            if np.abs(exact).max() >= 2**31:
                raise OverflowError(f"int32 arithmetic overflows at {_line()}")
    return _plain_binary(self, a, b, op)


def _largest(x: np.ndarray) -> int:
    return max(int(x.max()), -int(x.min())) if x.size else 0


def _unary(self, x: TensorHandle, op: Callable) -> TensorHandle:
    if _is_bf16(x):
        return TensorHandle(narrowed(op(widened(x.data))), tl.bfloat16)
    return _plain_unary(self, x, op)


def _dot(self, a: TensorHandle, b: TensorHandle, total: TensorHandle, precision, limit) -> TensorHandle:
    (m, k), n = a.data.shape[-2:], b.data.shape[-1]
    if min(m, n, k) < SMALLEST_SIDE:
        raise ValueError(f"a product {m} × {k} × {n} at {_line()}: a GPU wants every side to be 16 or more")
    a, b = _wide(a), _wide(b)
    kind, parts = PARTS[str(precision).rpartition(".")[2]]
    if a.dtype.scalar != tl.float32 or not kind:
        return _plain_dot(self, a, b, total, precision, limit)
    lefts, rights = _parts(a.data, kind, parts), _parts(b.data, kind, parts)
    # from the smallest products to the largest, without those that are smaller than the last digit
    pairs = [(i, j) for i, j in itertools.product(range(parts), repeat=2) if i + j < parts]
    for i, j in sorted(pairs, key=sum, reverse=True):
        left, right = (TensorHandle(x, tl.float32) for x in (lefts[i], rights[j]))
        total = _plain_dot(self, left, right, total, precision, limit)
    return total


def _parts(x: np.ndarray, kind: str, count: int) -> list[np.ndarray]:
    """x as a sum of numbers that a tensor core holds."""
    whole, cut = count == 1, cut_to_tf32 if kind == "tf32" else lambda y: widened(narrowed(y))
    if kind == "tf32" and not whole:  # parts are rounded (cvt.rna) before the tensor core cuts
        cut = lambda y: cut_to_tf32((y.view(np.uint32) + np.uint32(0x1000)).view(np.float32))  # noqa: E731
    found = []
    for _ in range(count):
        found.append(cut(x))
        with np.errstate(invalid="ignore"):  # ∞ − ∞: what is beyond the digits of ∞ is nothing
            x = np.nan_to_num(x - found[-1]) if np.isinf(x).any() else x - found[-1]
    return found


def _in_float32(plain: Callable) -> Callable:
    """A reduction or a scan, which would take bfloat16 for integers."""

    def apply(self, inputs: tuple) -> Any:
        if not any(_is_bf16(x.handle) for x in inputs):
            return plain(self, inputs)
        found = plain(self, tuple(x.to(tl.float32) if _is_bf16(x.handle) else x for x in inputs))
        found = found if isinstance(found, list | tuple) else (found,)
        return tuple(y.to(tl.bfloat16) if _is_bf16(x.handle) else y for x, y in zip(inputs, found))

    return apply


# --- memory

_plain_load, _plain_store = InterpreterBuilder.create_masked_load, InterpreterBuilder.create_masked_store
_plain_atomic = InterpreterBuilder.create_atomic_rmw
_plain_arguments = GridExecutor._init_args_hst


class _Block:
    """Memory that a tensor of the launch spans, and which program (counted from 1) wrote and read each element.

    Most tensors are only read: their reads are kept in a list, and compared when somebody writes.
    """

    def __init__(self, start: int, stop: int, size: int):
        self.start, self.stop, self.size = start, stop, size
        self.reads: list[tuple[int, np.ndarray]] = []
        self.writer: np.ndarray | None = None
        self.reader = self.lane = np.zeros(0, np.int32)  # reader −1: several programs

    def read(self, elements: np.ndarray) -> None:
        me = _Launch.number
        if self.writer is None:
            self.reads.append((me, elements))
            return
        if _is_others(self.writer[elements], me):
            raise RuntimeError(f"race: program {_Launch.program} reads what another one writes, at {_line()}")
        self._mark(me, elements)

    def _mark(self, number: int, elements: np.ndarray) -> None:
        reader = self.reader[elements]
        self.reader[elements] = np.where((reader == 0) | (reader == number), number, -1)

    def write(self, elements: np.ndarray) -> None:
        me = _Launch.number
        if self.writer is None:
            count = (self.stop - self.start) // self.size
            self.writer, self.reader, self.lane = (np.zeros(count, np.int32) for _ in range(3))
            for number, read in self.reads:
                self._mark(number, read)
        for marked, does in ((self.writer, "writes"), (self.reader, "reads")):
            if _is_others(marked[elements], me):
                raise RuntimeError(f"race: program {_Launch.program} writes what another one {does}, at {_line()}")
        lanes = np.arange(elements.size, dtype=np.int32)
        self.lane[elements] = lanes
        if (self.lane[elements] != lanes).any():
            raise RuntimeError(f"race: two lanes of one store write one element, at {_line()}")
        self.writer[elements] = me


def _is_others(marked: np.ndarray, me: int) -> bool:
    return bool(((marked != 0) & (marked != me)).any())


class _Launch:
    """The launch that runs: one at a time."""

    blocks: list[_Block] = []  # noqa: RUF012
    program: tuple[int, int, int] = (0, 0, 0)
    number = 1
    places: list[int] | None = None


def _line() -> str:
    """The line of the kernel that is being run."""
    for frame in reversed(traceback.extract_stack()):
        if not any(part in frame.filename for part in ("site-packages", "/support/", "<")):
            return f"{frame.filename.rpartition('/')[2]}:{frame.lineno}: {frame.line}"
    return "an unknown line"


def _check(pointers: TensorHandle, mask: TensorHandle, *, writes: bool, atomic: bool = False) -> None:
    addresses, live = np.broadcast_arrays(pointers.data, mask.data.astype(bool))  # `&` makes integers of masks
    addresses = (addresses if live.all() else addresses[live]).ravel().view(np.int64)
    if not addresses.size:
        return
    low, high = addresses.min(), addresses.max()
    for block in _Launch.blocks:  # nearly always one tensor has all lanes
        if block.start <= low and high < block.stop:
            _touch(block, addresses, writes, atomic)
            return
    outside = np.ones(addresses.shape, bool)
    for block in _Launch.blocks:
        inside = outside & (addresses >= block.start) & (addresses < block.stop)
        if inside.any():
            outside &= ~inside
            _touch(block, addresses[inside], writes, atomic)
    if outside.any():
        kind = "store" if writes else "load"
        lanes = int(outside.sum())
        raise IndexError(f"{kind} outside of every tensor, {lanes} lanes, program {_Launch.program}, at {_line()}")


def _touch(block: _Block, addresses: np.ndarray, writes: bool, atomic: bool) -> None:
    if not atomic:
        elements = ((addresses - block.start) // block.size).astype(np.int32)
        block.write(elements) if writes else block.read(elements)


def _load(self, pointers, mask, other, *more) -> TensorHandle:
    _check(pointers, mask, writes=False)
    if other is None:
        dtype = pointers.get_element_ty()
        kind = interpreter._get_np_dtype(dtype)
        poison: Any = NAN_BF16 if dtype.scalar == tl.bfloat16 else np.nan if kind.kind == "f" else True
        poison = np.iinfo(kind).max // 3 if kind.kind in "iu" and dtype.scalar != tl.bfloat16 else poison
        other = TensorHandle(np.full(pointers.data.shape, poison, dtype=kind), dtype)
    return _plain_load(self, pointers, mask, other, *more)


def _store(self, pointers, value, mask, *more):
    _check(pointers, mask, writes=True)
    return _plain_store(self, pointers, value, mask, *more)


def _atomic(self, op, pointers, value, mask, *more):
    _check(pointers, mask, writes=True, atomic=True)
    return _plain_atomic(self, op, pointers, value, mask, *more)


# --- launches

_plain_patch, _plain_run = interpreter._patch_lang, Autotuner.run


class _NoDriver(DriverBase):
    """What Triton asks a driver for before it launches."""

    def __init__(self, capability: int):
        self.capability = capability

    @classmethod
    def is_active(cls) -> bool:
        return True

    def map_python_to_cpp_type(self, kind: str) -> str:
        return kind

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.capability, 32)

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")

    def get_benchmarker(self) -> Callable:
        raise AssertionError("nothing is measured here")


def _run_first(self: Autotuner, *args, **kwargs):
    """A kernel's first configuration: others would compute the same."""
    self.nargs = dict(zip(self.arg_names, args))
    self.configs = list(self.prune_configs(kwargs))[:1]
    return _plain_run(self, *args, **kwargs)


class _Count(int):
    def to(self, dtype):
        return tl.full((), int(self), dtype)


def _count(*limits):
    return map(_Count, range(*(int(x.handle.data.item()) if isinstance(x, tl.tensor) else int(x) for x in limits)))


def _patch_language(function: Callable):
    """Triton's own patch; and loops over `range` count in numbers that can be cast."""
    scope = _plain_patch(function)
    function.__globals__["range"] = _count
    return scope


_patched: set[tuple[int, ...]] = set()


def _call(self, *args, **kwargs):
    """A kernel's call of a function: Triton's language was patched for the launch, and needs it once for each module's own
    names for it, not at each call (which took half of the time)."""
    names = tuple(id(x) for x in self.fn.__globals__.values() if x is tl or x is tl.core)
    if names not in _patched:
        _patched.add(names)
        interpreter._patch_lang(self.fn)
    return self.rewrite()(*args, **kwargs)


def _arguments(self, args, kwargs):
    """As they are, but the memory that they span is known from here on."""
    tensors = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]  # in named tuples, too
    if not all(x.is_cpu for x in tensors):
        raise ValueError("the interpreter takes tensors on the CPU")
    found = {}
    for x in tensors:
        if x.numel():
            count = 1 + sum((n - 1) * step for n, step in zip(x.shape, x.stride()))
            size, start = x.element_size(), x.data_ptr()
            found[start, count] = _Block(start, start + count * size, size)
    _Launch.blocks = list(found.values())
    return _plain_arguments(self, args, kwargs)


def _keep(self, *_) -> None:
    """Nothing to copy back: tensors on the CPU are the very ones that kernels wrote to."""


def _set_grid(self, x: int, y: int, z: int) -> None:
    if max(y, z) > 65535:
        raise ValueError(f"a grid of {x} × {y} × {z}: CUDA takes at most 65,535 along its second and third axis")
    self.grid_dim = (x, y, z)
    places = list(range(x * y * z))
    _Launch.places = places
    if _seed is not None:
        random.Random(_seed).shuffle(places)


def _set_program(self, x: int, y: int, z: int) -> None:
    _, height, depth = self.grid_dim
    place = _Launch.places[(x * height + y) * depth + z]
    self.grid_idx = _Launch.program = (place // (height * depth), place // depth % height, place % depth)
    _Launch.number = place + 1
