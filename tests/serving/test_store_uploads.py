"""Whatever a client sends in the place of a state is refused with a sentence, before much is made of it."""

import json
import tracemalloc

import numpy as np
import pytest
import torch
from safetensors.torch import save
from support.stored import KINDS, same, served, snapshot_after

from tarnn.data.tensor_file import encode
from tarnn.serving.state_info import UnfitState
from tarnn.serving.storage.packed import digest
from tarnn.serving.store import StateStore

TOKENS = [5, 17, 2, 88, 41, 41, 9]


@pytest.fixture(scope="module", params=["linear", "hybrid"])
def sent(request):
    """(a model's store, a snapshot, the file of that)."""
    store, snapshot = StateStore(served(request.param)), snapshot_after(served(request.param), TOKENS)
    return store, snapshot, store.export("a", store.hold("a", snapshot).id)


def with_header(data, change):
    """The file with another header."""
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    change(header)
    new = json.dumps(header).encode()
    return len(new).to_bytes(8, "little") + new + data[8 + length :]


def test_damaged_uploads_are_refused(sent):
    """Two hundred of them: cut anywhere, a bit flipped anywhere, and noise."""
    store, snapshot, data = sent
    rng, refused = np.random.default_rng(0), 0
    for number in range(200):
        body = bytearray(data)
        if number % 4 == 0:
            body = body[: rng.integers(len(body))]
        elif number % 4 == 1:
            body[rng.integers(min(len(body), 1200))] ^= 1 << rng.integers(8)
        elif number % 4 == 2:
            body[rng.integers(len(body))] ^= 1 << rng.integers(8)
        else:
            body = rng.bytes(rng.integers(300))
        try:
            info = store.add("a", bytes(body))
        except UnfitState:
            refused += 1
        else:  # the bit meant nothing
            assert same(store.get("a", info.id), snapshot)
    assert refused > 190


def test_sizes_that_are_claimed_are_not_allocated(sent):
    store, _, data = sent

    def huge(header):
        header["logits"] |= {"shape": [2**20, 2**20]}

    def overflow(header):
        header["logits"] |= {"shape": [2**40, 2**40], "data_offsets": [0, 2**80]}

    tracemalloc.start()
    for change in (huge, overflow):
        with pytest.raises(UnfitState, match="no state file"):
            store.add("a", with_header(data, change))
    with pytest.raises(UnfitState, match="no state file"):
        store.add("a", (2**62).to_bytes(8, "little") + data[8:])
    assert tracemalloc.get_traced_memory()[1] < 2**24
    tracemalloc.stop()


def test_files_with_a_right_checksum_are_looked_at_too():
    """Who writes such files can compute a checksum."""
    model = served("hybrid")
    store, snapshot = StateStore(model), snapshot_after(model, TOKENS)
    packed, tokens = store._packer.pack(snapshot), np.array(TOKENS, np.int32)
    good = packed.tensors() | {"recent": torch.tensor(TOKENS), "tokens": torch.from_numpy(tokens)}
    facts = {**model.key._asdict(), "tokens_seen": "7", "tokens_sha256": digest(tokens)}
    assert same(store.get("a", store.add("a", encode(good, **facts)).id), snapshot)
    cases = {
        "no state of this model: layers.0.S": {"layers.0.S": torch.zeros(1, 2, 3, 4)},
        "no state of this model: logits": {"logits": torch.zeros(1, 97, dtype=torch.float64)},
        "no state of this model: extra": {"extra": torch.zeros(3)},
        "no state of this model: layers.1.v": {"layers.1.k": good["layers.1.k"][:, :, :3].contiguous()},
        "position 9, and has 7 tokens": {"position": torch.tensor([9])},
        "doesn't hold the ids": {"tokens": torch.arange(7)},
        "none of this model's 97": {"tokens": torch.arange(94, 101, dtype=torch.int32)},
        "other tokens than those": {"tokens": torch.zeros(7, dtype=torch.int32)},
    }
    for sentence, changed in cases.items():
        with pytest.raises(UnfitState, match=sentence):
            store.add("a", encode(good | changed, **facts))
    long = {f"layers.1.{x}": torch.zeros(1, 4, 9, 10) for x in "kv"}
    with pytest.raises(UnfitState, match="has caches of 9 tokens, and has seen 7"):
        store.add("a", encode(good | long, **facts))
    few = {"tokens": torch.tensor([5], dtype=torch.int32), "position": torch.tensor([1])}
    with pytest.raises(UnfitState, match="has caches of 7 tokens, and has seen 1"):
        store.add("a", encode(good | few, **facts | {"tokens_sha256": digest(np.array([5], np.int32))}))
    for name in ("position", "logits", "tokens", "layers.0.z"):
        with pytest.raises(UnfitState):
            store.add("a", encode({key: x for key, x in good.items() if key != name}, **facts))
    for data in (b"", b"PK\x03\x04", save({"x": torch.zeros(2)}), save(good), json.dumps(facts).encode()):
        with pytest.raises(UnfitState):
            store.add("a", data)
    assert len(store.list("a")) == 1


@pytest.mark.parametrize("kind", KINDS)
def test_numbers_may_be_anything(kind):
    """A state that diverged, or that somebody made up, comes back as it is."""
    model = served(kind)
    store, snapshot = StateStore(model), snapshot_after(model, TOKENS)
    snapshot.logits[0, 3] = torch.nan
    snapshot.logits[0, 4] = torch.inf
    added = store.add("a", store.export("a", store.hold("a", snapshot).id))
    assert same(store.get("a", added.id), snapshot)
