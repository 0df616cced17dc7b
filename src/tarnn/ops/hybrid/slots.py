"""Slots: the keys that features represent worst stay exact after they have left the window.

A key's score is the logarithm of how much too small its own weight would be if features estimated it:

    score_j = scale·k_j·k_j − log φ_q(k_j)·φ_k(k_j)          without features: scale·k_j·k_j

It depends on the key alone. So the slots hold, at each token, the c keys of the highest scores among those that have left
the window (of equal ones those that came first), and the key that loses its place enters the sums at that token. There is
no block in this definition: chunks and single tokens give the same slots. The choice has no gradient.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from tarnn.feature_maps.base import FeatureMap
from tarnn.numerics import widen
from tarnn.ops.features import features, log_features
from tarnn.ops.hybrid.state import capped


@torch.no_grad()
def scores(feature_map: FeatureMap | None, k: Tensor, scale: float, softcap: float | None) -> Tensor:
    """(b, g, t) of keys (b, g, t, d)."""
    x = widen(k)
    exact = capped(scale * x.square().sum(-1), softcap)
    if feature_map is None:
        return exact
    if feature_map.log_features:
        as_query, as_key = log_features(feature_map, k, "queries"), log_features(feature_map, k, "keys")
        return exact - (as_query + as_key).logsumexp(-1)
    (as_query, a), (as_key, w) = features(feature_map, k, "queries"), features(feature_map, k, "keys")
    estimate = (as_query * as_key).sum(-1).log()
    for scale_of in (a, w):
        estimate = estimate if scale_of is None else estimate + scale_of
    # features that underflow: such keys are the worst there are, and still have an order among them
    return exact - estimate.clamp(min=-1e4)


class Course(NamedTuple):
    """What happens to the slots in the chunks of new tokens. Keys are numbers in one row: slots, window, new tokens."""

    entries: Tensor  # (b, g, n, c + chunk): the keys that are in a slot at some token of a chunk
    held: Tensor  # (b, g, n, chunk, c + chunk): at which tokens they are
    loser: Tensor  # (b, g, t): the key that enters the sums at this token
    loses: Tensor  # (b, g, t): whether there is one
    slots: Tensor  # (b, g, c): the keys in the slots behind the last token
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
    rank = ahead[..., :c].sum(-1, keepdim=True) + ahead[..., c:].cumsum(-1)  # behind each token
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
