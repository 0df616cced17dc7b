"""Softmax attention with the signature of linear attention, and the key/value cache that it needs: the baseline.

It is torch's own scaled_dot_product_attention, given every advantage: no copies for grouped heads where torch
can do without, a cache that is allocated once and read only as far as it is filled.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from tarnn.kernels.plain import known_finite
from tarnn.large_pages import zeros_in_large_pages
from tarnn.numerics import marked, set_aside
from tarnn.ops import packing
from tarnn.ops.checks import check_attention
from tarnn.ops.state import State
from tarnn.other_names import FUNCTION, names_ours


@dataclass(frozen=True, eq=False, repr=False)
class KVCache(State):
    """Keys and values so far, in buffers with room for more: (b, g, capacity, d) and (b, g, capacity, e).

    `length` positions are filled; what is behind them means nothing. `mask` (b, capacity), True = attend, exists
    once a key mask was given. A cache is a value: `append` copies it, which costs as much as reading it. A loop
    that owns its cache asks for `inplace=True` and pays for the new token alone. One that was made in bfloat16 or
    float16 rounds the keys and values that it is given.
    """

    grows = True

    k: Float[Tensor, "b g capacity d"]
    v: Float[Tensor, "b g capacity e"]
    length: int = 0
    mask: Bool[Tensor, "b capacity"] | None = None

    @classmethod
    def empty(
        cls,
        batch_size: int,
        num_kv_heads: int,
        capacity: int,
        head_dim: int,
        value_dim: int | None = None,
        *,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> "KVCache":
        shape = (batch_size, num_kv_heads, capacity)
        k, v = (
            zeros_in_large_pages(torch.empty(*shape, width, dtype=dtype, device=device))
            for width in (head_dim, head_dim if value_dim is None else value_dim)
        )
        return cls(k, v)

    def clone(self) -> "KVCache":
        return self.map(lambda x: zeros_in_large_pages(x).copy_(x))

    @property
    def capacity(self) -> int:
        return self.k.shape[2]

    def used(self) -> tuple[Tensor, Tensor, Tensor | None]:
        """Views of the filled parts of k, v and, where there is one, of the mask."""
        n = self.length
        return self.k[:, :, :n], self.v[:, :, :n], None if self.mask is None else self.mask[:, :n]

    def read(self, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor | None]:
        """The same, k and v in that type."""
        k, v, mask = self.used()
        return k.to(dtype), v.to(dtype), mask

    def tensors(self) -> dict[str, Tensor]:
        return {name: x for name, x in zip(("k", "v", "mask"), self.used()) if x is not None}

    def filled(self, found: dict[str, Tensor]) -> "KVCache":
        """This cache, empty so far, with the keys, values and mask of another's `tensors()`."""
        return self.append(found["k"], found["v"], found.get("mask"))

    def append(
        self,
        k: Float[Tensor, "b g t d"],
        v: Float[Tensor, "b g t e"],
        key_mask: Bool[Tensor, "b t"] | None = None,
        *,
        inplace: bool = False,
    ) -> "KVCache":
        """The cache with t more keys and values behind the others, and as much room in all.

        With `inplace` they are written into this one's buffers, which the returned cache shares: no copy. This one
        stays readable, but must not be appended to again, since that would write over the same places.

        Raises ValueError when they don't fit: a cache has the room that it was made with.
        """
        self._check(k, v)
        start, end = self.length, self.length + k.shape[2]
        mask = self.mask
        if key_mask is not None and mask is None:
            mask = k.new_ones(k.shape[0], self.capacity, dtype=torch.bool)
        if mask is not None and key_mask is None:
            key_mask = mask.new_ones(k.shape[0], k.shape[2])

        def put(buffer: Tensor, new: Tensor, dim: int) -> Tensor:
            if inplace:
                buffer.narrow(dim, start, end - start).copy_(new)
                return buffer
            room = self.capacity - end
            return torch.cat([buffer.narrow(dim, 0, start), new.to(buffer.dtype), buffer.narrow(dim, end, room)], dim)

        mask = None if mask is None or key_mask is None else put(mask, key_mask, 1)
        return KVCache(put(self.k, k, 2), put(self.v, v, 2), end, mask)

    def resized(self, capacity: int) -> "KVCache":
        """A copy with another capacity. Raises ValueError where it would not hold what is there."""
        if capacity < self.length:
            raise full(capacity, 0, self.length)

        def moved(x: Tensor, dim: int) -> Tensor:
            shape = [*x.shape[:dim], capacity, *x.shape[dim + 1 :]]
            new = x.new_zeros(shape)
            new.narrow(dim, 0, self.length).copy_(x.narrow(dim, 0, self.length))
            return new

        return KVCache(
            moved(self.k, 2), moved(self.v, 2), self.length, None if self.mask is None else moved(self.mask, 1)
        )

    def cropped(self, length: int) -> "KVCache":
        """The first `length` positions; shares memory with this one."""
        if not 0 <= length <= self.length:
            raise ValueError(f"a cache of {self.length} positions is cropped to 0 … {self.length}; got {length}.")
        return replace(self, length=length)

    def _aligned(self, other: "KVCache") -> tuple["KVCache", "KVCache"]:
        """As long and as large as the larger; where lengths differ, a mask covers what the shorter rows lack."""
        length, capacity = max(self.length, other.length), max(self.capacity, other.capacity)
        masked = self.length != other.length or (self.mask is None) != (other.mask is None)
        mine, theirs = (x if x.capacity == capacity else x.resized(capacity) for x in (self, other))
        return (mine._masked(length), theirs._masked(length)) if masked else (mine, theirs)

    def _masked(self, length: int) -> "KVCache":
        """With a mask that is False behind the used part, and that length."""
        mask = (
            self.k.new_ones(self.k.shape[0], self.capacity, dtype=torch.bool)
            if self.mask is None
            else self.mask.clone()
        )
        mask[:, self.length :] = False
        return replace(self, mask=mask, length=length)

    def _check(self, k: Tensor, v: Tensor) -> None:
        b, g, _, d = self.k.shape
        if k.shape[:2] != (b, g) or k.shape[3] != d or v.shape != (*k.shape[:3], self.v.shape[3]):
            raise ValueError(
                f"this cache takes keys ({b}, {g}, t, {d}) and values ({b}, {g}, t, {self.v.shape[3]}); "
                f"got {tuple(k.shape)} and {tuple(v.shape)}."
            )
        rounds = self.k.dtype in (torch.bfloat16, torch.float16) and k.dtype.itemsize > 2
        if k.dtype != self.k.dtype and not rounds and not torch.is_autocast_enabled(k.device.type):
            raise TypeError(f"this cache holds {self.k.dtype}; got {k.dtype} and {v.dtype}. Make it with their dtype=.")
        if self.length + k.shape[2] > self.capacity:
            raise full(self.capacity, self.length, k.shape[2])


def full(capacity: int, taken: int, more: int) -> ValueError:
    """What to raise where a cache has no room for so many more."""
    return ValueError(
        f"the key/value cache is full: it holds {capacity} positions, {taken} are taken and "
        f"{more} more were given. Make it with a larger capacity."
    )


@names_ours(FUNCTION)
def softmax_attention(
    q: Float[Tensor, "b h t d"],
    k: Float[Tensor, "b g s d"],
    v: Float[Tensor, "b g s e"],
    *,
    causal: bool,
    scale: float | None = None,
    key_mask: Bool[Tensor, "b s"] | None = None,
    cu_seqlens: Int[Tensor, " n_plus_1"] | None = None,
    key_log_weight: Float[Tensor, "b g s"] | None = None,
    state: KVCache | None = None,
    return_state: bool = False,
    inplace: bool = False,
    return_weights: bool = False,
):
    """o_i = Σ_j e^(scale·q_i·k_j + w_j) v_j / Σ_j e^(scale·q_i·k_j + w_j), O(t·s) time. Arguments as `linear_attention`.

    `scale` is 1/√d by default. `state` is a `KVCache`: the queries see its keys as well as the new ones. With
    `return_state` the cache with both is returned, too (without one: a full one, in the memory of k and v). The
    given one stays as it was, unless `inplace` lets the new keys be written into its room (see `KVCache.append`).
    A query that may see no key yields zeros. NaN and infinities as in `linear_attention`: nothing later changes an earlier
    output, finite or not, a NaN shows wherever it is used, and what stands at masked keys reaches nothing.
    Returns (b, h, t, e), or that and the cache; with `return_weights`
    (o, the cache, the weights (b, h, t, s), of which o is then made).

    Raises ValueError for shapes that don't fit, a full cache, and cu_seqlens together with a state.
    """
    check_attention(q, k, v, causal=causal, key_mask=key_mask, cu_seqlens=cu_seqlens, key_log_weight=key_log_weight)
    if cu_seqlens is not None:
        if state is not None or return_state or key_mask is not None:
            raise ValueError("softmax_attention takes cu_seqlens without state, return_state or key_mask.")
        if return_weights or torch.compiler.is_compiling():  # one graph for any bounds: pairs are masked
            which = torch.searchsorted(cu_seqlens.long(), torch.arange(q.shape[2], device=q.device), right=True)
            options: dict[str, Any] = {"causal": causal, "scale": scale, "key_log_weight": key_log_weight}
            options |= {"past": 0, "key_mask": None, "pairs": which[:, None] == which}
            return _weighted(q, k, v, None, options) if return_weights else _attend(q, k, v, **options)
        cuts = packing.bounds(cu_seqlens, q.shape[2])
        pieces = [
            softmax_attention(
                q[:, :, a:b],
                k[:, :, a:b],
                v[:, :, a:b],
                causal=causal,
                scale=scale,
                key_log_weight=None if key_log_weight is None else key_log_weight[:, :, a:b],
            )
            for a, b in zip(cuts, cuts[1:])
        ]
        return torch.cat(pieces, dim=2)
    if (return_state or state is not None) and key_log_weight is not None:
        raise ValueError("softmax_attention keeps no log-weights in its cache: pass key_log_weight without state.")
    past = 0
    if state is None:
        state = KVCache(k, v, k.shape[2], None if key_mask is None else key_mask.clone())
    else:
        past = state.length
        state = state.append(k, v, key_mask, inplace=inplace) if k.shape[2] else state
        k, v, key_mask = state.read(q.dtype)
    options = {"causal": causal, "scale": scale, "key_log_weight": key_log_weight}
    options |= {"past": past, "key_mask": key_mask}
    if return_weights:
        return _weighted(q, k, v, state, options)
    o = _attend(q, k, v, **options)
    return (o, state) if return_state else o


def softmax_step(
    q: Float[Tensor, "b h 1 d"],
    k: Float[Tensor, "b g 1 d"],
    v: Float[Tensor, "b g 1 e"],
    state: KVCache,
    *,
    scale: float | None = None,
    inplace: bool = False,
) -> tuple[Float[Tensor, "b h 1 e"], KVCache]:
    """One token of softmax attention: O(length) time. Returns o and the new cache; `inplace` as in `KVCache.append`."""
    check_attention(q, k, v, causal=True)
    if q.shape[2] != 1:
        raise ValueError(f"softmax_step takes one token, q (b, h, 1, d); got {tuple(q.shape)}.")
    state = state.append(k, v, inplace=inplace)
    k, v, key_mask = state.read(q.dtype)
    return _attend(q, k, v, causal=False, past=0, scale=scale, key_mask=key_mask, key_log_weight=None), state


def _attend(q, k, v, *, causal, past, scale, key_mask, key_log_weight, pairs=None):
    (t, s), groups = (q.shape[2], k.shape[2]), q.shape[1] // k.shape[1]
    if not s or not t:
        return q.new_zeros(*q.shape[:3], v.shape[-1]) + 0 * (q.sum() + k.sum() + v.sum())
    if key_mask is not None:  # whatever stands at masked keys is absent
        k, v = (x.masked_fill(~key_mask[:, None, :, None], 0.0) for x in (k, v))
    spoilt = None
    hides = (causal and t > 1) or pairs is not None  # some keys from some queries, by weights of zero: 0·NaN is NaN
    if hides and not known_finite(k, v):
        (k, in_k), (v, in_v) = set_aside(k), set_aside(v)
        spoilt = _users(in_k | in_v, groups, causal, past, t, pairs)
    mask = pairs if key_mask is None else key_mask[:, None, None, :]
    if causal and (mask is not None or past or key_log_weight is not None) and t > 1:
        past_or_now = torch.ones(t, s, dtype=torch.bool, device=q.device).tril(past)
        mask = past_or_now if mask is None else mask & past_or_now
    if key_log_weight is not None:
        weight = key_log_weight.to(q.dtype).repeat_interleave(groups, dim=1)[:, :, None, :]
        mask = weight if mask is None else torch.where(mask, weight, -torch.inf)
    # is_causal: torch's own causal path, which reads half of the pairs
    o = scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=causal and mask is None and not past, scale=scale, enable_gqa=groups > 1
    )
    if key_mask is not None:
        seen = key_mask.cumsum(-1)[:, past:] > 0 if causal else key_mask.any(-1, keepdim=True).expand(-1, t)
        o = torch.where(seen[:, None, :, None], o, 0.0)  # rows that see no key: zeros, not NaN
    return marked(o, spoilt)


def _users(keys, groups: int, causal: bool, past: int, t: int, pairs) -> Tensor:
    """Which queries (b, h, t) see one of these keys (b, g, s)."""
    if pairs is not None:  # (t, s): of packed sequences
        allowed = (pairs.tril() if causal else pairs).float()
        seen = (keys.float() @ allowed.mT) > 0
    elif causal:
        seen = keys.cumsum(-1)[:, :, past:] > 0
    else:
        seen = keys.any(-1, keepdim=True).expand(-1, -1, t)
    return seen.repeat_interleave(groups, dim=1) if groups > 1 else seen


def _weighted(q, k, v, state, options) -> tuple[Tensor, KVCache | None, Tensor]:
    """(o, state, weights): the weights are what attention makes of the unit vectors as values."""
    units = torch.eye(k.shape[2], dtype=v.dtype, device=v.device).expand(*k.shape[:3], -1)
    weights = _attend(q, k, units, **options)
    g, key_mask = v.shape[1], options["key_mask"]
    if key_mask is not None:
        v = v.masked_fill(~key_mask[:, None, :, None], 0.0)
    value, spoilt = set_aside(v)
    o = (weights.unflatten(1, (g, -1)) @ value[:, :, None]).flatten(1, 2)  # (b, h, t, e)
    causal, past, pairs = options["causal"], options["past"], options.get("pairs")
    return marked(o, _users(spoilt, q.shape[1] // g, causal, past, q.shape[2], pairs)), state, weights
