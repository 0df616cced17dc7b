"""A snapshot's tensors in one piece of memory, and as the bytes of a state file; each way back to the bit, or refused."""

import hashlib
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from tarnn.data.tensor_file import decode, encode, fields_of
from tarnn.decoding.state_file import cache_dtype, cache_length
from tarnn.decoding.streaming import KEEP
from tarnn.errors import UserError
from tarnn.models.state import ModelState
from tarnn.ops import KVCache, State
from tarnn.ops.softmax.cache import RowCaches
from tarnn.serving.model import ServedModel, StateKey
from tarnn.serving.pool import new_state
from tarnn.serving.snapshot import Snapshot, Tokens
from tarnn.serving.state_info import UnfitState
from tarnn.serving.storage.pages import Field, Pages, in_pages, joined, views

MOST_LAYOUTS = 1024  # a hybrid has another one for each length
CALLED = {"weights": "weights in the format", "isa": "kernels for the instruction set", "products": "steps of the kind"}


class Packed(NamedTuple):
    """A snapshot without its tokens. fields: what lies in `data`, (n,) uint8, one behind the other, widest types first.

    pages: the first keys and values, which other states may have too; data has those behind them, and all that does not grow.
    """

    fields: tuple[Field, ...]
    data: Tensor
    pages: Pages = Pages()

    @property
    def nbytes(self) -> int:
        """The bytes of all of it, shared or not."""
        return self.data.nbytes + self.pages.nbytes

    def tensors(self) -> dict[str, Tensor]:
        """Return its tensors by name: views of the data, and copies of what lies in pages too."""
        found, pages = views(self.fields, self.data), self.pages.tensors()
        for name, _, _ in self.pages.fields:
            found[name] = torch.cat([*(x[name] for x in pages), found[name]], 2)
        return found


class Packer:
    """Packs what belongs to one model, and nothing else."""

    def __init__(self, model: ServedModel):
        self.key: StateKey = model.key
        self._empty: ModelState = new_state(model, 1)
        growing = [i for i, layer in enumerate(self._empty.layers) if layer.grows]
        self._keys = frozenset(f"layers.{i}.{name}" for i in growing for name in ("k", "v"))
        self._model = model.model
        self._vocab = model.step.num_outputs
        self._layouts: dict[tuple[Field, ...], tuple[Field, ...]] = {}

    @property
    def grows(self) -> bool:
        """Return True if states have keys and values."""
        return bool(self._keys)

    def pack(self, snapshot: Snapshot, above: Packed | None = None) -> Packed:
        """Copy all but its tokens. Raises UnfitState for a snapshot of another model.

        above: the state of a sequence of which the one begins with the other; pages that both have are not copied.
        """
        if getattr(snapshot.state, "condition", None) is not None:
            raise UnfitState("the state of an image of a class is not kept: its values alone don't say what it is of.")
        found = {"position": snapshot.state.position, "logits": snapshot.logits}
        for i, layer in enumerate(snapshot.state.layers):
            found |= {f"layers.{i}.{name}": x for name, x in tensors_of(layer).items()}
        return self._packed(found, len(snapshot.tokens), above=above)

    def unpack(self, packed: Packed, tokens: Tokens, *, proven: bool = True, room: int = 0) -> Snapshot:
        """Return the snapshot. Its keys are copied once, into caches with room for so many tokens, which nobody else has."""
        found = views(packed.fields, packed.data)
        position, logits = found.pop("position"), found.pop("logits")
        empty, pieces = self._empty, [*packed.pages.tensors(), found]
        if self.grows:
            length = sum(cache_length(x, empty.layers) for x in pieces)
            empty = self._model.new_state(1, max(length, room), cache_dtype=cache_dtype(found, empty.layers))
        layers = [
            filled(layer, [fields_of(x, f"layers.{i}.") for x in (pieces if layer.grows else [found])])
            for i, layer in enumerate(empty.layers)
        ]
        state = replace(empty, layers=tuple(layers), position=position)
        return Snapshot(state, logits, tokens, proven, alone=True)

    def encode(self, packed: Packed, tokens: Tokens, owner: str | None = None) -> bytes:
        """A state file, in the format of `tarnn generate --state-out`.

        owner: whose it is, if it is to be found by an index that has its tokens; None: the file has them.
        """
        tensors = packed.tensors() | {"recent": torch.from_numpy(tokens[-KEEP:].astype("int64"))}
        facts = {**self.key._asdict(), "tokens_seen": str(len(tokens)), "tokens_sha256": digest(tokens)}
        if owner is None:
            tensors["tokens"] = torch.from_numpy(tokens.copy())
        else:
            facts["owner"] = hashed(owner)
        return encode(tensors, **facts)

    def decode(
        self, data: bytes, source: str, tokens: Tokens | None = None, owner: str | None = None
    ) -> tuple[Packed, Tokens]:
        """From the bytes of a state file: the state, and the tokens that it has seen. tokens, owner: those that it must be
        of; None: any, and the file has its tokens.

        Raises UnfitState for what is damaged, of another model, or after other tokens.
        """
        try:
            file = decode(data, self.key.fingerprint, source, writer="GET /v1/states/{id}/file of tarnn serve")
        except UserError as error:
            raise UnfitState(str(error)) from error
        for name, wanted in zip(StateKey._fields[1:], self.key[1:], strict=True):
            if (got := file.metadata.get(name)) != wanted:
                raise UnfitState(
                    f"{source} was made with {CALLED[name]} {got}; this server has {wanted}, and would go on with other "
                    "bits. Read its text again here, or serve it as it was."
                )
        found = dict(file.tensors)
        held, _ = found.pop("tokens", None), found.pop("recent", None)
        if tokens is None:
            if held is None or held.dtype != torch.int32 or held.ndim != 1:
                raise UnfitState(
                    f"{source} doesn't hold the ids of its tokens, (t,) int32. Download it from a server again."
                )
            tokens = held.numpy().copy()
            if len(tokens) and not 0 <= int(tokens.min()) <= int(tokens.max()) < self._vocab:
                raise UnfitState(f"{source} has seen tokens that are none of this model's {self._vocab:,}.")
        if owner is not None and file.metadata.get("owner") != hashed(owner):
            raise UnfitState(f"{source} belongs to somebody else.")
        if file.metadata.get("tokens_sha256") != digest(tokens):
            raise UnfitState(f"{source} is the state after other tokens than those that it goes by.")
        return self._packed(found, len(tokens), source), tokens

    def _packed(
        self, found: dict[str, Tensor], num_tokens: int, source: str = "the snapshot", above: Packed | None = None
    ) -> Packed:
        ordered = sorted(found.items(), key=lambda item: (-item[1].dtype.itemsize, item[0]))
        fields = tuple((name, x.dtype, tuple(x.shape)) for name, x in ordered)
        known = self._layouts.get(fields)
        if known is None:
            self._check(found, source)
            if len(self._layouts) >= MOST_LAYOUTS:
                self._layouts.clear()
            known = self._layouts[fields] = fields
        if (length := cache_length(found, self._empty.layers)) > num_tokens:
            raise UnfitState(f"{source} has caches of {length:,} tokens, and has seen {num_tokens:,}.")
        if int(found["position"]) != num_tokens:
            raise UnfitState(f"{source} stands at position {int(found['position']):,}, and has {num_tokens:,} tokens.")
        masked = any(name.endswith(".mask") for name in found)
        pages, rest = in_pages(dict(ordered), () if masked else self._keys, Pages() if above is None else above.pages)
        if pages.data:
            known = tuple((name, x.dtype, tuple(x.shape)) for name, x in rest.items())
        return Packed(known, joined(rest.values()), pages)

    def _check(self, found: dict[str, Tensor], source: str) -> None:
        """Raise UnfitState for other names, shapes or types than those of this model's states."""
        wanted = {"position": ((1,), torch.int64), "logits": ((1, self._vocab), torch.float32)}
        length = cache_length(found, self._empty.layers)
        for i, layer in enumerate(self._empty.layers):
            for name, x in tensors_of(layer).items():
                shape = tuple(x.shape)
                if layer.grows:
                    shape = (*shape[:2], length, shape[3])
                wanted[f"layers.{i}.{name}"] = (shape, x.dtype)
        got = {name: (tuple(x.shape), x.dtype) for name, x in found.items()}
        narrow = {name: (shape, torch.bfloat16) for name, (shape, _) in wanted.items() if name.endswith((".k", ".v"))}
        masks = {name: ((1, length), torch.bool) for name in got if name.endswith(".mask")}
        if got not in (wanted, wanted | masks, wanted | narrow, wanted | narrow | masks):
            wrong = sorted(name for name in {*got, *wanted} if got.get(name) != wanted.get(name))
            names = ", ".join(f"{name} {got.get(name, 'is missing')}" for name in wrong[:3])
            raise UnfitState(f"{source} is no state of this model: {names}.")


def filled(empty: State, pieces: list[dict[str, Tensor]]) -> State:
    """Return a layer's state with these tensors; of a cache, with the keys and values of all pieces, written into it."""
    if isinstance(empty, RowCaches):
        return RowCaches((_appended(empty.rows[0], pieces),))
    if isinstance(empty, KVCache):
        return _appended(empty, pieces)
    return empty.filled(pieces[0]) if pieces[0] else empty


def _appended(cache: KVCache, pieces: list[dict[str, Tensor]]) -> KVCache:
    for x in pieces:
        cache = cache.append(x["k"], x["v"], x.get("mask"), inplace=True)
    return cache


def tensors_of(layer: State) -> dict[str, Tensor]:
    """The tensors of a layer's state by name; of a cache what is used of it."""
    return layer.tensors() if layer.grows else {k: x for k, x in vars(layer).items() if isinstance(x, Tensor)}


def digest(tokens: Tokens) -> str:
    """SHA-256 over token ids, as int32 in little endian."""
    return hashlib.sha256(tokens.astype("<i4").tobytes()).hexdigest()


def seal(tenant: str, id: str, tokens: Tokens) -> str:
    """By which an index that was damaged can't give a client another state than its own."""
    return hashed(tenant, id, digest(tokens))


def hashed(*names: str) -> str:
    """SHA-256 over names, none of which holds a zero character."""
    return hashlib.sha256("\0".join(names).encode()).hexdigest()
