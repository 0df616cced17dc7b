"""Key/value caches: what softmax attention carries from token to token."""

from dataclasses import dataclass, replace

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from tarnn.large_pages import zeros_in_large_pages
from tarnn.ops.state import State

LEAST_CAPACITY = 64  # of a cache that grows


@dataclass(frozen=True, eq=False, repr=False)
class KVCache(State):
    """Keys and values so far, in buffers with room for more: (b, g, capacity, d) and (b, g, capacity, e).

    `length` positions are filled; what is after them means nothing. `mask` (b, capacity), True = attend, exists
    once a key mask was given. A cache is a value: `append` copies it, which costs as much as reading it. A loop
    that owns its cache asks for `inplace=True` and pays for the new token alone. One that was made in bfloat16 or
    float16 rounds the keys and values that it is given; one in float32 takes those of 16 bits as they are.
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
        """Return `used()` with k and v in that type."""
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
        """The cache with t more keys and values after the others, and as much room in all.

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

    def with_room(self, num_tokens: int) -> "KVCache":
        """The cache itself, or a copy at least twice as large where so many tokens more don't fit: appending is O(1)."""
        needed = self.length + num_tokens
        return self if needed <= self.capacity else self.resized(max(LEAST_CAPACITY, needed, 2 * self.capacity))

    def resized(self, capacity: int) -> "KVCache":
        """A copy with another capacity. Raises ValueError where it would not hold what is there."""
        if capacity < self.length:
            raise full(capacity, 0, self.length)

        def moved(x: Tensor, dim: int) -> Tensor:
            shape = [*x.shape[:dim], capacity, *x.shape[dim + 1 :]]
            new = zeros_in_large_pages(x.new_empty(()).expand(shape))
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
        """With a mask that is False after the used part, and that length."""
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
        narrow = (torch.bfloat16, torch.float16)
        rounds, widens = (
            self.k.dtype in narrow and k.dtype.itemsize > 2,
            self.k.dtype == torch.float32 and k.dtype in narrow,
        )
        if k.dtype != self.k.dtype and not rounds and not widens and not torch.is_autocast_enabled(k.device.type):
            raise TypeError(f"this cache holds {self.k.dtype}; got {k.dtype} and {v.dtype}. Make it with their dtype=.")
        if self.length + k.shape[2] > self.capacity:
            raise full(self.capacity, self.length, k.shape[2])


def full(capacity: int, taken: int, more: int) -> ValueError:
    """Return the error of a cache that has no room for `more` positions."""
    return ValueError(
        f"the key/value cache is full: it holds {capacity} positions, {taken} are taken and "
        f"{more} more were given. Make it with a larger capacity."
    )


@dataclass(frozen=True, eq=False, repr=False)
class RowCaches(State):
    """A cache for each row, of one row, with its own length and room.

    Compiled steps take it in the place of a `KVCache`, where each row has as many keys as it has seen tokens. Layers don't.
    In files and by name it is what `joined` gives, so that either kind can be read from what the other wrote.
    """

    grows = True

    rows: tuple[KVCache, ...]

    @classmethod
    def of(cls, cache: KVCache) -> "RowCaches":
        """Split a cache of many rows. Keys that its mask excludes are left out; without a mask memory is shared."""
        rows = []
        for i in range(len(cache.k)):
            k, v = cache.k[i : i + 1], cache.v[i : i + 1]
            if cache.mask is None:
                rows.append(KVCache(k, v, cache.length))
                continue
            kept = cache.mask[i].clone()
            kept[cache.length :] = False
            rows.append(KVCache(k[:, :, kept], v[:, :, kept], int(kept.sum())).resized(cache.capacity))
        return cls(tuple(rows))

    def joined(self) -> KVCache:
        """Return one cache of all rows: a mask excludes what shorter rows lack. Of one row it is that row's, not copied."""
        if len(self.rows) == 1:
            return self.rows[0]
        capacity = max(x.capacity for x in self.rows)
        rows = [x if x.capacity == capacity else x.resized(capacity) for x in self.rows]
        lengths = torch.tensor([x.length for x in rows], device="cpu")
        mask = torch.arange(capacity, device="cpu") < lengths[:, None]
        length, differ = int(lengths.max()), len(lengths.unique()) > 1
        k, v = torch.cat([x.k for x in rows]), torch.cat([x.v for x in rows])
        return KVCache(k, v, length, mask if differ else None)

    def tensors(self) -> dict[str, Tensor]:
        return self.joined().tensors() if self.rows else {}

    def filled(self, found: dict[str, Tensor]) -> "RowCaches":
        """These caches, empty so far, with the keys and values of another's `tensors()`."""
        return RowCaches.of(self.joined().filled(found))

    def resized(self, capacity: int) -> "RowCaches":
        """Return copies with that capacity, or with room for what is there if that is more."""
        return RowCaches(tuple(x.resized(max(x.length, capacity)) for x in self.rows))

    def select(self, rows: Int[Tensor, " k"]) -> "RowCaches":
        return RowCaches(tuple(self.rows[row].clone() for row in rows.tolist()))

    def insert(self, rows: Int[Tensor, " k"], other: "RowCaches") -> "RowCaches":
        mine = list(self.rows)
        for row, theirs in zip(rows.tolist(), other.rows, strict=True):
            mine[row] = theirs
        return RowCaches(tuple(mine))
