"""A plan packed for the kernel of the fused step: the weights in one block of bytes, and the numbers that say what lies where.

csrc/model_step/plan.cpp reads the numbers in the order in which they are written here.
"""

from typing import Any

import torch
from torch import Tensor

from tarnn.decoding.parts import Attention, Features, FeedForward, Norm, Shift
from tarnn.decoding.plan import Plan
from tarnn.kernels.cpu.model_step import ATTENTIONS, DECAYS, MLPS, VERSION
from tarnn.kernels.cpu.products import Block
from tarnn.kernels.features import NAMES
from tarnn.program.feature_functions import FUNCTIONS


def pack(plan: Plan, weights: str) -> tuple[Tensor, Tensor]:
    """(the numbers, the block of weights); weights: how the layers' matrices are kept, one of `FORMATS`."""
    block = Block(VERSION)
    rotations = {_key(x.frequencies): x.frequencies for x in plan.attentions if x.frequencies is not None}
    block.numbers(plan.head.weight.shape[1], *plan.heads, len(plan.layers), len(rotations))
    block.numbers(plan.pre_norm, plan.centred, plan.normalize)
    for frequencies in rotations.values():
        block.numbers(2 * len(frequencies), frequencies.dtype != torch.float64)
        block.place(frequencies.double())
    for layer in plan.layers:
        block.numbers(ATTENTIONS.index(layer.attention.kind), layer.normed_inside)
        _write_norm(block, layer.attention_norm)
        _write_mlp(block, layer.mlp_norm, layer.mlp, weights)
        if isinstance(layer.attention, Attention):
            _write_attention(block, layer.attention, weights, list(rotations))
        else:
            layer.attention.write(block, weights)
    _write_norm(block, plan.last_norm)
    block.matrix(*plan.head, "float32" if weights == "float32" else "bfloat16")
    return torch.tensor(block.plan, device="cpu"), block.bytes()


def _key(frequencies: Tensor) -> Any:
    """Key of a rotary table; float32 frequencies give float32 angles, so the dtype is part of it."""
    return frequencies.dtype, *frequencies.tolist()


def _write_attention(block: Block, x: Attention, weights: str, rotations: list[Any]) -> None:
    block.numbers(DECAYS.index(x.decay.kind))
    rotation = -1 if x.frequencies is None else rotations.index(_key(x.frequencies))
    block.numbers(rotation, x.rotates_features)
    if x.kind == "softmax":
        block.numbers(x.gate is not None, x.whole_norms)
    if x.hybrid is not None:
        x.hybrid.write(block)
    for features in x.all_features:
        _write_features(block, features, x.log_scaled, x.num_features)
    if x.hybrid is not None and x.features is not None:
        block.vector(x.hybrid.far_bias)
    rows = [*x.inputs, *filter(None, (x.gate, x.decay.rows))]
    block.products(rows, weights)
    block.matrix(*x.output, weights)
    if x.decay.up is not None:
        block.heads(*x.decay.up.by_head(x.heads[1]))
    for norm in (x.q_norm, x.k_norm, x.o_norm):
        block.vector(None if norm is None else norm.gain)
    block.vector(x.decay.log_decay)


def _write_mlp(block: Block, norm: Norm | None, mlp: FeedForward | None, weights: str) -> None:
    if mlp is None:
        return block.numbers(MLPS.index("none"))
    block.numbers(MLPS.index(mlp.kind), mlp.down.weight.shape[1])
    _write_norm(block, norm)
    block.products([mlp.up] if mlp.gate is None else [mlp.gate, mlp.up], weights, in_turns=mlp.gate is not None)
    block.matrix(*mlp.down, weights)
    if mlp.kind == "squared_relu":
        block.vector(mlp.mixture)


def _write_features(block: Block, x: Features, log_scaled: bool, num_features: int) -> None:
    # whether it takes more than one of the maps that attention's own step knows
    plain = x.omega is None and x.queries is None and (x.gain, x.shift) == (1.0, 0.0) and x.function in NAMES
    heads, m = (0, 0) if x.omega is None else x.omega.shape[:2]
    block.numbers(FUNCTIONS.index(x.function), not plain, log_scaled, num_features, heads, m)
    if x.omega is not None:
        block.heads(x.omega, None if x.bias is None else x.bias.expand(heads, -1))
    block.place(torch.tensor((x.square, x.offset, x.gain, x.shift, x.number), dtype=torch.float64))
    block.place(torch.tensor(x.parts) if x.parts else None)
    for shift in (x.queries, x.keys):
        _write_shift(block, shift)


def _write_shift(block: Block, shift: Shift | None) -> None:
    block.numbers(0 if shift is None else len(shift.centre))
    for x in shift or [None] * 4:
        block.vector(None if x is None else x.flatten())


def _write_norm(block: Block, norm: Norm | None) -> None:
    block.vector(None if norm is None else norm.gain)
    block.vector(None if norm is None else norm.bias)
