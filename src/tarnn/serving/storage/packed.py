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
from tarnn.ops import State
from tarnn.serving.model import ServedModel, StateKey
from tarnn.serving.pool import new_state
from tarnn.serving.snapshot import Snapshot, Tokens, plain_bytes
from tarnn.serving.state_info import UnfitState

Field = tuple[str, torch.dtype, tuple[int, ...]]  # a tensor's name, type and shape
MOST_LAYOUTS = 1024  # a hybrid has another one for each length
CALLED = {"weights": "weights in the format", "isa": "kernels for the instruction set", "products": "steps of the kind"}


class Packed(NamedTuple):
    """A snapshot without its tokens. fields: what lies in `data`, (n,) uint8, one behind the other, widest types first."""

    fields: tuple[Field, ...]
    data: Tensor

    @property
    def nbytes(self) -> int:
        return self.data.nbytes

    def tensors(self) -> dict[str, Tensor]:
        """Views of the data, by name."""
        found, start = {}, 0
        for name, dtype, shape in self.fields:
            end = start + dtype.itemsize * torch.Size(shape).numel()
            found[name] = self.data[start:end].view(dtype).view(shape)
            start = end
        return found


class Packer:
    """Packs what belongs to one model, and nothing else."""

    def __init__(self, model: ServedModel):
        self.key: StateKey = model.key
        self._empty: ModelState = new_state(model, 1)
        self._grows = any(layer.grows for layer in self._empty.layers)
        self._model = model.model
        self._vocab = model.step.num_outputs
        self._layouts: dict[tuple[Field, ...], tuple[Field, ...]] = {}

    def pack(self, snapshot: Snapshot) -> Packed:
        """A copy of all but its tokens. Raises UnfitState for a snapshot of another model."""
        if getattr(snapshot.state, "condition", None) is not None:
            raise UnfitState("the state of an image of a class is not kept: its values alone don't say what it is of.")
        found = {"position": snapshot.state.position, "logits": snapshot.logits}
        for i, layer in enumerate(snapshot.state.layers):
            found |= {f"layers.{i}.{name}": x for name, x in tensors_of(layer).items()}
        return self._packed(found, len(snapshot.tokens))

    def unpack(self, packed: Packed, tokens: Tokens, *, proven: bool = True) -> Snapshot:
        found = packed.tensors()
        position, logits = found.pop("position"), found.pop("logits")
        empty = self._empty
        if self._grows:
            kinds = self._empty.layers
            empty = self._model.new_state(1, cache_length(found, kinds), cache_dtype=cache_dtype(found, kinds))
        layers = [
            layer.filled(fields) if (fields := fields_of(found, f"layers.{i}.")) else layer
            for i, layer in enumerate(empty.layers)
        ]
        return Snapshot(replace(empty, layers=tuple(layers), position=position), logits, tokens, proven)

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

    def _packed(self, found: dict[str, Tensor], num_tokens: int, source: str = "the snapshot") -> Packed:
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
        parts = [x.detach().reshape(-1).view(torch.uint8) for _, x in ordered if x.numel()]
        return Packed(known, torch.cat(parts, out=plain_bytes(sum(map(len, parts)))))

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
