"""Short convolution of sequences that several ranks share: each gets the few real tokens next to its stretch."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from tarnn.kernels.convolution import Call
from tarnn.parallel.stretch import Stretch


def convolve(
    op: Callable, call: Call, stretch: Stretch, in_time: Any, with_state: bool
) -> tuple[Tensor, Tensor | None]:
    """Compute o and the rows of state after this rank's stretch: each rank gets the last real tokens before its own."""
    if not call.causal:
        return _centred(op, call, stretch), None
    n = call.weight.shape[1] - 1
    rows = call.x.shape[0] if stretch.cuts is None else len(stretch.here)
    initial = call.x.new_zeros(rows, n, call.x.shape[2]) if call.S is None else call.S
    entering = _next_to(stretch, call.x, call.key_mask, n, initial=stretch.last(initial))
    return op(call._replace(S=stretch.entered(initial, entering)), with_state=with_state)[:2]


def _centred(op: Callable, call: Call, stretch: Stretch) -> Tensor:
    """Compute o of filters that reach to both sides: the tokens there are put before the stretch and after it."""
    (_, t, _), n, bounds = call.x.shape, call.before, call.cu_seqlens
    before = _next_to(stretch, call.x, call.key_mask, n)
    after = _next_to(stretch, call.x, call.key_mask, call.weight.shape[1] - 1 - n, back=True).flip(1)
    if bounds is not None:
        bounds = torch.cat([bounds[:1], bounds[1:-1] + n, bounds[-1:] + n + after.shape[1]])
    key_mask = None if call.key_mask is None else pad(call.key_mask, (n, after.shape[1]), value=True)
    longer = call._replace(x=torch.cat([before, call.x, after], 1), key_mask=key_mask, cu_seqlens=bounds)
    return op(longer, with_state=False)[0][:, n : n + t]


def _next_to(
    stretch: Stretch, x: Tensor, key_mask: Tensor | None, n: int, *, initial: Tensor | None = None, back: bool = False
) -> Tensor:
    """Return the n real tokens next to this stretch on the ranks before, or with `back` on those after, from last to first.

    initial: what stands before this rank's last rows, where their sequences begin here.
    """
    if stretch.cuts is not None:  # what the other ranks need of this one
        part = slice(0, stretch.bounds[1]) if back else stretch.last_tokens
        x, key_mask = x[:, part], None if key_mask is None else key_mask[:, part]
    if back:
        x, key_mask = x.flip(1), None if key_mask is None else key_mask.flip(1)
    tokens, count = _last_real(x, key_mask, n)
    if initial is not None and (stretch.since is None or len(stretch.here) > 1):
        tokens = _appended(initial, tokens, count)
    return stretch.carried(_appended, tokens, count, back=back)


def _last_real(x: Tensor, key_mask: Tensor | None, n: int) -> tuple[Tensor, Tensor]:
    """Return the last n real tokens of each row, zeros before them, and how many there are, in the type of x."""
    if key_mask is None:
        x = x[:, max(0, x.shape[1] - n) :]
        key_mask = torch.ones(x.shape[:2], dtype=torch.bool, device=x.device)
    order = key_mask.to(torch.int8).argsort(dim=-1, stable=True)[:, max(0, x.shape[1] - n) :]
    real = x.masked_fill(~key_mask[..., None], 0.0)
    tokens = real.gather(1, order[..., None].expand(-1, -1, x.shape[2]))
    return pad(tokens, (0, 0, n - tokens.shape[1], 0)), key_mask.sum(-1).clamp(max=n).to(x.dtype)


def _appended(before: Tensor, tokens: Tensor, count: Tensor) -> Tensor:
    """Return the last n tokens, where the last `count` of `tokens` (rows, n, c) follow those `before`."""
    n, place = tokens.shape[1], torch.arange(tokens.shape[1], device=tokens.device)
    count = count.long()[:, None]
    index = torch.where(place < n - count, place + count, place + n)
    return torch.cat([before, tokens], 1).gather(1, index[..., None].expand(-1, -1, tokens.shape[2]))
