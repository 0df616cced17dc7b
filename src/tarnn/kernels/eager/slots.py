"""Slots: which keys are in them at each token, from their scores. Nothing here has a gradient."""

from typing import NamedTuple

import torch
from torch import Tensor


class Course(NamedTuple):
    """Keys that each slot holds in each chunk of new tokens. Keys are indexed in the order slots, window, new tokens."""

    entries: Tensor  # (b, g, n, c + chunk): the keys that are in a slot at some token of a chunk
    held: Tensor  # (b, g, n, chunk, c + chunk): at which tokens they are
    loser: Tensor  # (b, g, t): the key that enters the sums at this token
    loses: Tensor  # (b, g, t): whether there is one
    slots: Tensor  # (b, g, c): the keys in the slots after the last token
    score: Tensor  # (b, g, c), −∞: empty


@torch.no_grad()
def course(score: Tensor, place: Tensor, leaves: Tensor, leaving: Tensor, chunk: int) -> Course:
    """score, place (b, g, c) of the slots before. leaves (b, t): whether a key leaves the window at this token, which
    is key c + i of the row; leaving (b, g, t): its score."""
    (b, g, c), t = score.shape, leaving.shape[2]
    new = leaving.masked_fill(~leaves[:, None], -torch.inf)
    pad = -t % chunk
    new = torch.nn.functional.pad(new, (0, pad), value=-torch.inf).unflatten(2, (-1, chunk))  # (b, g, n, chunk)
    slots = place.argsort(-1)  # of equal scores the first counts more, so they stand in the order of time
    score = score.gather(2, slots)
    entries, held, losers, loses = [], [], [], []
    for n in range(new.shape[2]):
        new_keys = (n * chunk + torch.arange(chunk, device=score.device)).clamp(max=t - 1)
        numbers = (c + new_keys).expand(b, g, -1)
        row, ranked = torch.cat([slots, numbers], -1), torch.cat([score, new[:, :, n]], -1)
        inside, out = _compete(ranked, c)
        entries.append(row)
        held.append(inside.mT)
        loses.append(out.any(-2))
        losers.append(row.gather(-1, out.to(torch.int8).argmax(-2)))
        stay = inside[..., -1]
        keep = (~stay).to(torch.int8).argsort(dim=-1, stable=True)[..., :c]
        slots, score = row.gather(-1, keep), ranked.masked_fill(~stay, -torch.inf).gather(-1, keep)
    return Course(
        torch.stack(entries, 2),
        torch.stack(held, 2),
        torch.cat(losers, -1)[..., :t],
        torch.cat(loses, -1)[..., :t],
        slots,
        score,
    )


def _compete(score: Tensor, c: int) -> tuple[Tensor, Tensor]:
    """Scores (b, g, c + chunk) of c slots and of a chunk's keys, one more per token → inside, out (b, g, c + chunk, chunk):
    whether a key is in a slot at a token, and whether it loses its place there. −∞: no key."""
    length = score.shape[-1]
    number = torch.arange(length, device=score.device)
    came = number[c:] - c  # the token at which each of the chunk's keys comes
    there, mine = score > -torch.inf, score[..., :, None]
    # ahead[x, y]: y is the better of two keys, or came first and is as good
    ahead = (score[..., None, :] > mine) | ((score[..., None, :] == mine) & (number < number[:, None]))
    ahead = ahead & there[..., None, :]
    rank = ahead[..., :c].sum(-1, keepdim=True) + ahead[..., c:].cumsum(-1)  # after each token
    arrived = (number - c)[:, None] <= came
    inside = there[..., None] & arrived & (rank < c)
    was = torch.nn.functional.pad(inside[..., :-1], (1, 0))
    was[..., 0] = there & (number < c)
    comes = there[..., None] & ((number - c)[:, None] == came)
    return inside, ~inside & (was | comes)


@torch.no_grad()
def worst(score: Tensor, real: Tensor, c: int) -> tuple[Tensor, Tensor]:
    """Without causality: the keys (b, g, ≤ c) of the highest scores among the real ones, and whether there are so many."""
    score = score.masked_fill(~real[:, None], -torch.inf)
    found, index = score.sort(dim=-1, descending=True, stable=True)
    return index[..., :c], found[..., :c] > -torch.inf
