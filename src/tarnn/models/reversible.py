"""Reversible layers in training: what a layer has read is computed again from what it has written, so nothing of it is kept.

A block turns two streams (x₁, x₂) into y₁ = x₁ + F(x₂), y₂ = x₂ + G(y₁), so x₂ = y₂ − G(y₁) and x₁ = y₁ − F(x₂)
(Gomez et al. 2017, arXiv 1707.04585; Kitaev et al. 2020, section 3, arXiv 2001.04451). The backward pass goes through the
blocks from the last to the first, computes F and G once more, and takes their gradients there. Memory for activations is that of
one block, whatever the number of blocks; time is that of a third forward pass. Streams are float32 at least, since each
subtraction rounds.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from tarnn.models.block import Block

Draws = tuple[Tensor, Tensor | None] | None  # states of the generators of CPU and device; None: nothing is drawn


def run_reversible(blocks: Sequence[Block], x: Tensor, options: Sequence[Mapping[str, Any]]) -> Tensor:
    """All blocks on both streams x (b, t, 2·hidden), each with its options, and gradients without stored activations."""
    return _Blocks.apply(blocks, options, x, *_weights(blocks))


def can_run(blocks: Sequence[Block]) -> bool:
    """Whether `run_reversible` may take the place of one block after the other: gradients are wanted, nothing is compiled,
    and no weight is sharded."""
    if not torch.is_grad_enabled() or torch.compiler.is_compiling():
        return False
    return all(type(x.data) is Tensor for x in _weights(blocks))


def attention_part(block: Any, x: Tensor, cu_seqlens: Tensor | None = None, **options: Any) -> Tensor:
    """F: what attention adds to the first stream, where x (b, t, hidden) is the second."""
    rows = block.attention_norm(x.to(block.attention_norm.weight.dtype))
    rows = rows if cu_seqlens is None else rows.flatten(0, 1)[None]  # documents end to end
    return block.dropout(block.attention(rows, cu_seqlens=cu_seqlens, **options).view_as(x))


def mlp_part(block: Any, x: Tensor) -> Tensor:
    """G: what the feed-forward adds to the second stream, where x is the first."""
    return block.dropout(block.mlp(block.mlp_norm(x.to(block.mlp_norm.weight.dtype))))


class _Blocks(torch.autograd.Function):
    """Inputs are the weights, too, so that their gradients go where autograd sends them."""

    @staticmethod
    def forward(
        ctx, blocks: Sequence[Any], options: Sequence[Mapping[str, Any]], x: Tensor, *weights: Tensor
    ) -> Tensor:
        ctx.blocks, ctx.options, ctx.draws, ctx.weights = blocks, options, [], weights
        ctx.precision = _Precision(x.device.type)
        first, second = x.chunk(2, -1)
        with ctx.precision.again():
            for block, own in zip(blocks, options, strict=True):
                ctx.draws.append(_draws(block, x.device))
                first = first + attention_part(block, second, **own)
                ctx.draws.append(_draws(block, x.device))
                second = second + mlp_part(block, first)
        y = torch.cat([first, second], -1)
        ctx.versions = _versions(blocks)
        ctx.save_for_backward(y)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor) -> tuple[Any, ...]:
        (y,) = ctx.saved_tensors
        if _versions(ctx.blocks) != ctx.versions:
            raise RuntimeError(
                "weights of reversible layers have changed between forward and backward, which computes with them once "
                "more; call backward before they change."
            )
        gradients: dict[int, Tensor | None] = dict.fromkeys(map(id, ctx.weights))
        first, second = (x.contiguous() for x in y.chunk(2, -1))
        of_first, of_second = (x.contiguous() for x in grad.chunk(2, -1))
        draws = list(ctx.draws)
        for block, own in zip(reversed(ctx.blocks), reversed(ctx.options), strict=True):
            with ctx.precision.again():
                with _drawn_again(draws.pop(), y.device):
                    part, added = _part(mlp_part, block, first, of_second, gradients)
                second, of_first = second - part, of_first + added
                with _drawn_again(draws.pop(), y.device):
                    part, added = _part(attention_part, block, second, of_first, gradients, **own)
                first, of_second = first - part, of_second + added
        wanted = (gradients[id(x)] if x.requires_grad else None for x in ctx.weights)
        return None, None, torch.cat([of_first, of_second], -1), *wanted


def _part(function: Any, block: nn.Module, x: Tensor, grad: Tensor, gradients: dict[int, Any], **options: Any) -> Any:
    """F or G of x, and x's gradient through it; gradients of weights are added to `gradients`."""
    with torch.enable_grad():
        x = x.detach().requires_grad_()
        part = function(block, x, **options)
    weights = [weight for weight in block.parameters() if weight.requires_grad]
    of_x, *of_weights = torch.autograd.grad(part, [x, *weights], grad.to(part.dtype), allow_unused=True)
    for weight, more in zip(weights, of_weights):
        if more is not None:
            before = gradients[id(weight)]
            gradients[id(weight)] = more if before is None else before + more
    return part.detach(), of_x


def _weights(blocks: Sequence[nn.Module]) -> list[nn.Parameter]:
    """The parameters of all blocks, each once."""
    return list({id(x): x for block in blocks for x in block.parameters()}.values())


def _versions(blocks: Sequence[nn.Module]) -> list[tuple[int, int]]:
    """Which tensors the blocks compute with, and how often each was written."""
    return [(id(x), x._version) for block in blocks for x in (*block.parameters(), *block.buffers())]


class _Precision:
    """Restore the current autocast settings without its weight cache, which some torch versions fill with detached weights."""

    def __init__(self, kind: str):
        self.kind = kind
        self.options: dict[str, Any] | None = None
        if torch.amp.is_autocast_available(kind):
            enabled, dtype = torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)
            self.options = {"enabled": enabled, "dtype": dtype, "cache_enabled": False}

    def again(self) -> AbstractContextManager:
        return nullcontext() if self.options is None else torch.autocast(self.kind, **self.options)


def _draws(block: nn.Module, device: torch.device) -> Draws:
    """The state of the generators that dropout draws from, in training."""
    if not block.training:
        return None
    elsewhere = device.type not in ("cpu", "meta")
    return torch.get_rng_state(), torch.get_device_module(device).get_rng_state(device) if elsewhere else None


@contextmanager
def _drawn_again(draws: Draws, device: torch.device) -> Iterator[None]:
    """Within: generators draw what they drew from that state on; after, they go on as if nothing had been drawn."""
    if draws is None:
        yield
        return
    ours, of_device = draws
    with torch.random.fork_rng([] if of_device is None else [device], device_type=device.type):
        torch.set_rng_state(ours)
        if of_device is not None:
            torch.get_device_module(device).set_rng_state(of_device, device)
        yield
