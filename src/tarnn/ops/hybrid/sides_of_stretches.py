"""Hybrid attention to both sides of sequences that several ranks share, each with a stretch of them.

Ranks exchange the tokens next to their stretches, sinks, global tokens, and the keys that features represent worst; then, with
features, the sums of all other keys; and where queries see every key exactly, these queries, and what each rank's keys are
to them. So a rank attends in a row of its own tokens between the nearest of the others, with two sums for what is further off.
"""

from collections.abc import Callable, Collection
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from tarnn.kernels.eager.hybrid import forward_between, softmax
from tarnn.kernels.eager.slots import worst
from tarnn.kernels.hybrid import at, capped
from tarnn.numerics import finite, marked, wide
from tarnn.ops.hybrid.arguments import Options, within
from tarnn.ops.hybrid.attend import call_of, hybrid, new_state
from tarnn.ops.hybrid.fold import added, sums_of
from tarnn.ops.hybrid.keys import keys_of, users, with_apart, without_spoilt
from tarnn.ops.hybrid.pieces import Family, Pieces, ends_of, first_of, last_of, most, order_of, pieces_of
from tarnn.ops.hybrid.slots import scores
from tarnn.ops.stretches import Stretch
from tarnn.parallel.collectives import gather, gather_plain, tied


class Tokens(NamedTuple):
    """Some keys and values of all ranks, (n, g, ranks · m, ·), in the order of their sequences."""

    k: Tensor
    v: Tensor
    place: Tensor  # (n, ranks · m)  below 0: none
    apart: Tensor  # (n, ranks · m)

    def some(self, index: Tensor, there: Tensor) -> "Tokens":
        place = self.place.gather(1, index).masked_fill(~there, -1)
        return Tokens(at(self.k, index), at(self.v, index), place, self.apart.gather(1, index) & there)

    def of_ranks(self, size: int, kinds: slice, ranks: range, real: Collection[int]) -> "Tokens":
        """The tokens at these places of some ranks; none of those that are not among `real`."""
        k, v, place, apart = (x.unflatten(-1 if x.ndim == 2 else 2, (size, -1)) for x in self)
        part = slice(ranks.start, ranks.stop)
        there = torch.tensor([i in real for i in ranks], device=place.device)[:, None]
        place = place[:, part, kinds].masked_fill(~there, -1).flatten(1)
        k, v = (x[:, :, part, kinds].flatten(2, 3) for x in (k, v))
        return Tokens(k, v, place, apart[:, part, kinds].flatten(1) & (place >= 0))

    def but(self, there: Tensor) -> "Tokens":
        """Without those that a mask (n, ranks · m) leaves out."""
        return self._replace(place=self.place.masked_fill(~there, -1), apart=self.apart & there)


class Slots(NamedTuple):
    k: Tensor  # (n, g, c, d)
    v: Tensor
    place: Tensor  # (n, g, c)  below 0: none

    def hold(self, place: Tensor) -> Tensor:
        """Which tokens at these places (n, l) are in the slots: (n, g, l)."""
        return (place[:, None, :, None] == self.place[:, :, None]).any(-1)


def attend_to_both_sides(
    stretch: Stretch,
    how: Options,
    alone: Callable[[slice, Any], tuple[Tensor, Tensor]],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key_mask: Tensor | None,
    marks: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """o and ρ of this rank's tokens. alone: the op, of packed sequences that lie here as a whole, from their tokens and bounds.
    marks: global tokens, if they are told by a mask."""
    if stretch.is_shared:
        order, real = order_of(stretch, q, key_mask)
        o, rho = _of_pieces(stretch, how, pieces_of(stretch, q, k, v, key_mask, marks))
        both = torch.cat([o, rho[..., None].to(o.dtype)], -1)
        index = order[:, None, :, None].expand_as(both)
        missing = both.new_zeros(*both.shape[:2], max(1, q.shape[2]), both.shape[3])
        both = missing.scatter(2, index, both.masked_fill(~real[:, None, :, None], 0.0))[:, :, : q.shape[2]]
        if stretch.cuts is None:
            return both[..., :-1], both[..., -1].to(rho.dtype)
        both = both.sum(0, keepdim=True)  # pieces are apart, with zeros elsewhere
        first, last = ends_of(stretch)
    else:
        both, first, last = None, 0, q.shape[2]
    if first < last:
        bounds = [x - first for x in stretch.bounds if first <= x <= last]
        o, rho = alone(slice(first, last), bounds)
        inner = torch.cat([o, rho[..., None].to(o.dtype)], -1)
        both = inner if both is None else torch.cat([both[:, :, :first], inner, both[:, :, last:]], 2)
    if both is None:
        return alone(slice(0, 0), [0, 0])
    return both[..., :-1], both[..., -1]


def _of_pieces(stretch: Stretch, how: Options, mine: Pieces) -> tuple[Tensor, Tensor]:
    """o and ρ of this rank's pieces."""
    family = Family.of(stretch, mine.real)
    me, place = stretch.ranks.rank, family.places(mine.real)
    sees_all, apart = _special(how, mine, place)
    num_apart, num_rows = most(stretch.ranks, apart, sees_all)
    near = how.window - 1
    chosen = zip(first_of(mine.real, near), last_of(mine.real, near), first_of(apart, num_apart))
    index, there = (torch.cat(x, 1) for x in chosen)
    tokens, seen = _gathered(family, mine, place, apart, index, there)
    size, kinds = stretch.ranks.size, (slice(0, near), slice(near, 2 * near), slice(2 * near, None))
    # one rank's at least, whose tokens are none then
    earlier = tokens.of_ranks(size, kinds[1], range(max(1, me)), range(me))
    later = tokens.of_ranks(size, kinds[0], range(min(me + 1, size - 1), size), range(me + 1, size))
    others = tokens.of_ranks(size, kinds[2], range(size), [*range(me), *range(me + 1, size)])
    before, behind = earlier.some(*last_of(earlier.place >= 0, near)), later.some(*first_of(later.place >= 0, near))
    slots = None
    if how.slots:
        slots, more = _slots(family, how, mine, place, apart)
        seen = [*seen, more]
    sums = None
    if how.feature_map is not None:
        far = [earlier.but(~_among(earlier.place, before.place)), later.but(~_among(later.place, behind.place))]
        sums, more = _sums(family, how, mine, place, apart, far, slots)
        seen = [*seen, more]
    others = others.but(~_among(others.place, before.place) & ~_among(others.place, behind.place))
    total = family.counts.sum(-1, keepdim=True)
    o, rho = _in_row(how, mine, place, apart, total, others, before, behind, sums, slots)
    for x in seen:
        o, rho = tied(o, x), tied(rho, x)
    if num_rows:
        o, rho = _with_exact_rows(family, how, mine, sees_all, num_rows, o, rho)
    return o, rho


def _special(how: Options, mine: Pieces, place: Tensor) -> tuple[Tensor, Tensor]:
    """The queries that see every key, and the keys that every query sees: both (n, t)."""
    none = torch.zeros_like(mine.real)
    marks = none if mine.marks is None else mine.marks
    if how.global_places is not None:
        marks = torch.isin(place, how.global_places) & mine.real
    listed = none if how.exact_queries is None else torch.isin(place, how.exact_queries) & mine.real
    return marks | listed, (marks | (place < how.sinks)) & mine.real


def _gathered(
    family: Family, mine: Pieces, place: Tensor, apart: Tensor, index: Tensor, there: Tensor
) -> tuple[Tokens, list[Tensor]]:
    """The tokens `index` (n, m) of this rank's pieces and those of all others; and what backward passes have to wait for."""
    if not index.shape[1]:
        whole = torch.cat([index] * family.ranks.size, 1)
        return Tokens(mine.k[:, :, :0], mine.v[:, :, :0], whole, whole > 0), []
    k, v = gather(family.ranks, at(mine.k, index), at(mine.v, index))
    code = (2 * place + apart).gather(1, index).masked_fill(~there, -1)
    code = family.of_mine(gather_plain(family.ranks, code), -1).flatten(1)
    every_k, every_v = (family.of_mine(x, 0.0).transpose(1, 2).flatten(2, 3) for x in (k, v))
    return Tokens(every_k, every_v, torch.where(code < 0, -1, code // 2), (code >= 0) & (code % 2 > 0)), [k]


def _among(place: Tensor, others: Tensor) -> Tensor:
    """Which of these places (n, l) are real and among others (n, m)."""
    return (place[..., None] == others[:, None]).any(-1) & (place >= 0)


def _slots(family: Family, how: Options, mine: Pieces, place: Tensor, apart: Tensor) -> tuple[Slots, Tensor]:
    """The keys of the highest scores among those of all ranks; of equal ones the earlier."""
    score = scores(how.feature_map, mine.k, how.scale, how.softcap)
    index, there = worst(score, mine.real & ~apart, how.slots)
    missing = how.slots - index.shape[2]
    index, there = (pad(x, (0, missing)) for x in (index, there))
    score = score.gather(2, index).masked_fill(~there, -torch.inf)
    where = place[:, None].expand(-1, score.shape[1], -1).gather(2, index).masked_fill(~there, -1)
    gathered = gather(family.ranks, at(mine.k, index), at(mine.v, index))
    k, v = (family.of_mine(x, 0.0).transpose(1, 2).flatten(2, 3) for x in gathered)
    plain = (family.of_mine(gather_plain(family.ranks, x), y) for x, y in ((score, -torch.inf), (where, -1)))
    score, where = (x.transpose(1, 2).flatten(2) for x in plain)
    order = score.argsort(dim=-1, descending=True, stable=True)[..., : how.slots]  # ranks stand in order
    return Slots(at(k, order), at(v, order), where.gather(2, order)), gathered[0]


def _sums(
    family: Family, how: Options, mine: Pieces, place: Tensor, apart: Tensor, far: list[Tokens], slots: Slots | None
) -> tuple[list[Any], Tensor]:
    """S, z and M of the keys on earlier ranks that are further off than the nearest, and the same of later ranks. far: of
    those that were gathered."""
    enters = (mine.real & ~apart)[:, None].expand(-1, mine.k.shape[1], -1)
    enters = enters if slots is None else enters & ~slots.hold(place)
    still, near = torch.zeros_like(enters, dtype=wide(mine.k.dtype)), how.window - 1
    number = mine.real.cumsum(-1)
    is_last = number > number[:, -1:] - near
    parts = [
        sums_of(how, mine.k, mine.v, still, enters & inner[:, None]) for inner in (~is_last, number > near)
    ]  # of those that go to later ranks, and to earlier ones
    gathered = gather(family.ranks, *(x for part in parts for x in part))
    found = []
    me = family.ranks.rank
    for i, (others, them) in enumerate(zip((range(me), range(me + 1, family.ranks.size)), far)):
        S, z, M = (family.of_mine(x, y) for x, y in zip(gathered[3 * i :], (0.0, 0.0, -torch.inf)))
        there = ((them.place >= 0) & ~them.apart)[:, None].expand(-1, mine.k.shape[1], -1)
        there = there if slots is None else there & ~slots.hold(them.place)
        if them.k.shape[2]:
            sums = sums_of(how, them.k, them.v, torch.zeros_like(there, dtype=still.dtype), there)
        else:
            sums = torch.zeros_like(S[:, me]), torch.zeros_like(z[:, me]), torch.full_like(M[:, me], -torch.inf)
        for other in others:
            sums = added(sums, None, (S[:, other], z[:, other], M[:, other].detach()))
        found.append(sums)
    return found, gathered[0]


def _in_row(
    how: Options,
    mine: Pieces,
    place: Tensor,
    apart: Tensor,
    total: Tensor,
    others: Tokens,
    before: Tokens,
    behind: Tokens,
    sums: list[Any] | None,
    slots: Slots | None,
) -> tuple[Tensor, Tensor]:
    """o and ρ of this rank's tokens, in a row with those of other ranks that they see exactly."""
    row = [others, before, Tokens(mine.k, mine.v, place.masked_fill(~mine.real, -1), apart), behind]
    sizes = [x.k.shape[2] for x in row]
    k, v = (torch.cat([getattr(x, name) for x in row], 2) for name in ("k", "v"))
    where, apart = (torch.cat([getattr(x, name) for x in row], 1) for name in ("place", "apart"))
    ahead = sizes[0] + sizes[1]
    q = pad(mine.q, (0, 0, ahead, sizes[3]))
    order = (where < 0).to(torch.int8).argsort(dim=-1, stable=True)  # real tokens to the front
    q, k, v = (at(x, order) for x in (q, k, v))
    where, apart = where.gather(1, order), apart.gather(1, order)
    inner = how._replace(sinks=0, slots=0, exact_queries=None, global_places=None, far_until=None)
    state = new_state(inner, k, v)
    keys, spoilt = without_spoilt(with_apart(keys_of(inner, state, k, v, where >= 0, None), apart))
    spoiled = users(inner, keys, state, spoilt, q.shape[1] // k.shape[1])
    here, nothing = slice(0, q.shape[2]), (state.S, state.z, state.M)
    call = call_of(inner, q, keys, None, state, here, nothing, False, True)
    if slots is None and sums is None:
        outputs = hybrid(call)
        o, rho = outputs.o, outputs.share
    else:
        a, weight = call.a, call.weight
        if a is not None and weight is not None:
            weight = weight if slots is None else weight.masked_fill(slots.hold(where), -torch.inf)
            call = call._replace(a=within(how, a, total - 1), weight=weight)
        first, last = (None, None) if sums is None else sums
        exact = None if slots is None else _of_slots(how, q, where, slots)
        o, rho = forward_between(call, first, last, exact)
    both = marked(o, spoiled), marked(rho[..., None], spoiled)
    back = order.argsort(dim=-1)[:, ahead : ahead + sizes[2]]
    o, rho = (at(x, back) for x in both)
    return o, rho[..., 0]


def _of_slots(how: Options, q: Tensor, where: Tensor, slots: Slots) -> tuple[Tensor, Tensor]:
    """Products of queries with the keys in the slots, −∞ for those in their windows; and the values."""
    kind = wide(q.dtype)
    k = slots.k.to(kind).repeat_interleave(q.shape[1] // slots.k.shape[1], 1)
    products = capped(how.scale * q.to(kind) @ k.mT, how.softcap)
    there = slots.place[:, :, None]
    held = ((there - where[:, None, :, None]).abs() >= how.window) & (there >= 0)
    held = held.repeat_interleave(q.shape[1] // slots.k.shape[1], 1)
    return products.masked_fill(~held, -torch.inf), slots.v.to(kind)


def _with_exact_rows(
    family: Family, how: Options, mine: Pieces, sees_all: Tensor, num_rows: int, o: Tensor, rho: Tensor
) -> tuple[Tensor, Tensor]:
    """The rows of exact queries and of global tokens: each rank says what its keys are to all of them."""
    index, there = first_of(sees_all, num_rows)
    kind, g = wide(o.dtype), mine.k.shape[1]
    queries = family.of_mine(gather(family.ranks, at(mine.q, index))[0], 0.0).to(kind)  # (n, ranks, h, rows, d)
    queries = queries.unflatten(2, (g, -1))
    k, v = mine.k.to(kind)[:, None, :, None], mine.v.to(kind)[:, None, :, None]
    logits = capped(how.scale * queries @ k.mT, how.softcap)
    logits = logits.masked_fill(~mine.real[:, None, None, None, None], -torch.inf)
    mean, weight = softmax(logits, v)
    parts = torch.cat([mean, weight[..., None]], -1).flatten(2, 3)  # (n, ranks, h, rows, e + 1)
    whole = gather(family.ranks, parts)[0]  # (ranks, n, ranks, h, rows, e + 1)
    to_me = family.of_mine(whole[:, :, family.ranks.rank], 0.0)
    weight = to_me[..., -1].masked_fill((family.row < 0)[..., None, None], -torch.inf)
    share = (weight - finite(weight.detach().amax(1, keepdim=True))).exp()
    share = share / share.sum(1, keepdim=True).clamp(min=torch.finfo(kind).tiny)
    mean = (share[..., None] * to_me[..., :-1]).sum(1).to(o.dtype)  # (n, h, rows, e)
    t = o.shape[2]  # places that hold no such query are written behind the end
    place = torch.where(there, index, t)[:, None, :, None].expand_as(mean)
    o = pad(tied(o, whole), (0, 0, 0, 1)).scatter(2, place, mean)[:, :, :t]
    return o, rho.masked_fill(sees_all[:, None], 0.0)
