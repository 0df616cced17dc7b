"""States on disk: what was held is there after a restart, and what is damaged is never taken for a state."""

import errno
import os
import shutil
import sqlite3
import subprocess
import sys
from contextlib import suppress

import numpy as np
import pytest
import torch
from support.old_index import to_version_1
from support.stored import same, served, snapshot_after, snapshot_of

from tarnn.decoding.state_file import load_state
from tarnn.errors import UserError
from tarnn.serving import store as store_module
from tarnn.serving.state_info import NameTaken, StateGone, UnfitState, UnknownState
from tarnn.serving.storage import disk as disk_module
from tarnn.serving.storage.disk import HOLD_BYTES
from tarnn.serving.store import StateStore

TOKENS = [5, 17, 2, 88, 41, 41, 9]


@pytest.fixture(scope="module")
def linear():
    return served()


@pytest.fixture
def open_store(linear, tmp_path):
    """Opens stores on one folder, and closes those that are still open."""
    stores = []

    def make(model=linear, **options):
        stores.append(StateStore(model, folder=tmp_path / "states", **options))
        return stores[-1]

    yield make
    for store in stores:
        store.close()


def files(folder):
    return sorted((folder / "states" / "states").glob("*/*"))


def settle(store):
    """Wait until the writer has done what is due after its last task."""
    store.cache.settle()


def ids(tokens):
    return np.array(tokens, np.int32)


def test_a_restart_loses_nothing(linear, open_store, tmp_path):
    store = open_store()
    snapshots = [snapshot_after(linear, TOKENS[:count]) for count in (2, 5, 7)]
    held = [store.hold("a", x, name=f"n{len(x.tokens)}") for x in snapshots]
    fork = store.fork("a", "n5")
    store.keep("a", kept := snapshot_after(linear, [1, 2, 3]))
    store.close()
    store.close()  # a second time changes nothing
    store = open_store()
    for info, snapshot in zip(held, snapshots, strict=True):
        assert store.info("a", info.id) == info
        assert same(store.get("a", info.name), snapshot)
    assert store.list("a") == [*held, fork]
    assert same(store.longest("a", ids([*TOKENS[:6], 0])), snapshots[1])
    assert same(store.longest("a", ids([1, 2, 3])), kept)
    assert store.longest("b", ids(TOKENS)) is None
    assert store.stats.disk_states == len(files(tmp_path)) == 4
    with pytest.raises(NameTaken):
        store.hold("a", kept, name="n5")
    store.delete("a", "n5")
    assert same(store.get("a", fork.id), snapshots[1])
    store.delete("a", fork.id)
    assert len(files(tmp_path)) == 3
    with pytest.raises(UnknownState):
        store.get("a", fork.id)


def test_generate_reads_a_file_of_the_store(linear, open_store, tmp_path):
    open_store().hold("a", snapshot := snapshot_after(linear, TOKENS))
    state, logits, recent = load_state(files(tmp_path)[0], linear.model)
    assert recent == TOKENS
    assert torch.equal(logits, snapshot.logits)
    assert torch.equal(state.layers[1].S, snapshot.state.layers[1].S)


def test_tokens_are_there_once(linear, open_store, tmp_path):
    """A state that goes on from another one has its own tokens in the index, until the other one goes."""
    store, book = open_store(), np.arange(30_000, dtype=np.int32) % 97
    snapshot, held = snapshot_after(linear, [1]), {}
    for tokens in (book, *(np.append(book, ids([token])) for token in range(30))):
        state = type(snapshot.state)(snapshot.state.layers, torch.tensor([len(tokens)]))
        held[store.hold("a", type(snapshot)(state, snapshot.logits, tokens)).id] = tokens.tolist()
    db = sqlite3.connect(tmp_path / "states" / "index.sqlite")
    assert db.execute("SELECT SUM(LENGTH(tokens)) FROM states").fetchone() == ((30_000 + 30) * 4,)
    db.close()
    store.delete("a", first := next(iter(held)))
    del held[first]
    store.close()
    store = open_store()
    assert {x.id: store.get("a", x.id).tokens.tolist() for x in store.list("a")} == held
    assert store.longest("a", book) is None


def test_a_folder_of_the_first_version_opens(linear, open_store, tmp_path):
    """States after beginnings of others, in any order, and sequences that part where no state is."""
    store, sequences = open_store(), [TOKENS, TOKENS[:3], [*TOKENS[:5], 1, 1], [3, 4], [3, 5, 6], []]
    snapshots = {store.hold("a", x := snapshot_of(linear, tokens), note="n").id: x for tokens in sequences}
    store.keep("a", kept := snapshot_of(linear, [8, 8]))
    store.delete("a", lost := store.hold("a", snapshot_of(linear, [6])).id)
    store.close()
    index = tmp_path / "states" / "index.sqlite"
    to_version_1(index, {x.stem: load_state(x, linear.model)[2] for x in files(tmp_path)})
    assert sqlite3.connect(index).execute("PRAGMA user_version").fetchone() == (1,)
    for _ in range(2):
        store = open_store()
        assert {x.id for x in store.list("a")} == set(snapshots)
        for id, snapshot in snapshots.items():
            assert same(store.get("a", id), snapshot)
            assert same(store.longest("a", snapshot.tokens), snapshot)
            assert store.info("a", id).note == "n"
        assert same(store.longest("a", kept.tokens), kept)
        with pytest.raises(UnknownState):
            store.get("a", lost)
        more = store.hold("a", snapshot_of(linear, [3]))
        assert same(store.get("a", more.id), snapshot_of(linear, [3]))
        store.delete("a", more.id)
        store.close()


def test_an_index_of_a_later_version_is_refused(open_store, tmp_path):
    open_store().close()
    with sqlite3.connect(tmp_path / "states" / "index.sqlite") as db:
        db.execute("PRAGMA user_version = 99")
    db.close()
    with pytest.raises(UserError, match="version 99 of the index; this tarnn reads version 2"):
        open_store()


def test_tokens_of_states_on_disk_have_a_bound_in_memory(linear, open_store, monkeypatch):
    """They go with states that nobody holds, and then with those that are held."""
    monkeypatch.setattr(store_module, "LEAST_TREES", 100_000)
    store = open_store(disk=10**6)
    for number in range(40):
        snapshot = snapshot_of(linear, np.append(np.full(2000, number), number))
        if number % 2:
            store.keep("a", snapshot)
        else:
            held = store.hold("a", snapshot)
    assert store.stats.disk_states < 15
    assert store.stats.disk_bytes < 500_000
    assert same(store.get("a", held.id), snapshot_of(linear, np.append(np.full(2000, 38), 38)))


def test_a_state_of_another_server_is_refused_by_name(linear, open_store):
    store = open_store()
    info = store.hold("a", snapshot_after(linear, TOKENS))
    store.close()
    for model, sentence in (
        (served(weights="int8"), "made with weights in the format float32; this server has others"),
        (served(isa="neon"), "made with kernels for the instruction set avx2"),
        (served("decay"), "belongs to another model"),
    ):
        store = open_store(model)
        with pytest.raises(UnfitState, match=sentence):
            store.get("a", info.id)
        assert store.longest("a", ids(TOKENS)) is None
        assert store.list("a") == []
        store.close()


def test_one_server_has_a_folder(open_store, tmp_path):
    """Another store is refused, in this process or in another one, until the first is closed."""
    store = open_store()
    with pytest.raises(UserError, match="belong to a server that is running"):
        open_store()
    script = "from sys import argv; from pathlib import Path; from tarnn.serving.storage.index import lock_folder; "
    script += "lock_folder(Path(argv[1]))"
    run = subprocess.run([sys.executable, "-c", script, tmp_path / "states"], capture_output=True, text=True)
    assert "each server has one of its own" in run.stderr
    store.close()
    open_store()


def test_a_folder_that_cannot_be_used(linear, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"states can't be kept in .*Give a folder that this user may write to"):
        StateStore(linear, folder=tmp_path / "file")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "states").write_text("")
    with pytest.raises(UserError, match="states can't be kept in"):
        StateStore(linear, folder=tmp_path / "folder")


def test_a_full_disk_parks_in_memory_and_says_so(linear, open_store, tmp_path, monkeypatch):
    store = open_store()
    first, second = (snapshot_after(linear, TOKENS[:count]) for count in (3, 5))

    def full(file, data):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(disk_module, "write_all", full)
        parked = store.hold("a", first, name="parked")
        assert parked.where == "memory"
        assert "can't be written to the disk: [Errno 28] No space left" in store.stats.trouble
        assert same(store.get("a", "parked"), first)
        assert store.list("a") == [parked]
        with pytest.raises(NameTaken):
            store.hold("a", second, name="parked")
        assert files(tmp_path) == []
    assert store.hold("a", second).where == "disk"
    assert store.stats.trouble == ""
    store.close()
    store = open_store()
    assert same(store.get("a", parked.id), first)
    assert store.info("a", parked.id) == parked._replace(where="disk")


def test_the_disk_has_a_bound(linear, open_store, tmp_path):
    """What nobody holds goes first, then what was held for longest; the bound holds all the time."""
    bound = 400_000
    store = open_store(disk=bound, memory=10_000_000)
    held = store.hold("a", snapshot_after(linear, [96]))
    for token in range(80):
        store.hold("a", snapshot_after(linear, [token, 1]), id=f"id{token}")
        assert store.stats.disk_bytes <= bound
    total = sum(
        path.stat().st_size for path in (tmp_path / "states").rglob("*") if path.is_file() and "wal" not in path.name
    )
    assert total <= bound + 2**15  # the memory that processes share with SQLite
    with pytest.raises(StateGone, match="it had to make room for others"):
        store.get("a", held.id)
    assert store.get("a", "id79").tokens.tolist() == [79, 1]
    assert store.stats.disk_states == len(files(tmp_path)) == store.stats.held < 80


@pytest.mark.parametrize("text", ["long", "uploaded", "noted"])
def test_one_key_pushes_out_no_state_of_one_that_has_less(linear, open_store, text):
    """What counts is all that a key makes the folder hold: files, tokens, and notes; and then half of it is another's."""
    store = open_store(disk=500_000)
    few = [store.hold("b", snapshot_after(linear, [token, 2])) for token in range(5)]
    for number in range(60):
        long = np.append(np.full(3000, number), ids([7])) if text == "long" else ids([number, 1])
        snapshot = snapshot_of(linear, long)
        if text == "uploaded":
            store.add("a", store.export("c", store.hold("c", snapshot).id))
        else:
            store.hold("a", snapshot, note="x" * 12_000 if text == "noted" else "")
    assert [x.id for x in store.list("b")] == [x.id for x in few]
    assert 1 < len(store.list("a")) < 60
    assert store.stats.disk_bytes <= 500_000


def test_ids_count_in_a_share(linear, open_store, tmp_path):
    """They take room in the index, though a fork has no file of its own."""
    store = open_store()
    held = store.hold("a", snapshot_after(linear, TOKENS), note="12345")
    before = store.cache.disk.shares()
    assert before["a"] > held.bytes + len(TOKENS) * 4 + 5
    for _ in range(3):
        store.fork("a", held.id)
    assert store.cache.disk.shares() == {"a": before["a"] + 3 * HOLD_BYTES}


def test_a_key_has_its_share_of_a_folder_that_another_has_filled(linear, open_store):
    store = open_store(disk=400_000)
    for number in range(60):
        store.hold("a", snapshot_of(linear, [number, 1]))
    before = len(store.list("a"))
    for number in range(60):
        store.hold("b", snapshot_of(linear, [number, 2]))
    assert len(store.list("a")) == pytest.approx(before / 2, abs=3)
    assert len(store.list("b")) == pytest.approx(before / 2, abs=3)


def test_memory_goes_to_the_disk_before_it_is_full(linear, open_store):
    size = StateStore(linear).hold("a", snapshot_after(linear, TOKENS)).bytes + 3_000
    store = open_store(memory=10 * size)
    snapshots = [snapshot_after(linear, [token, 1, 2, 3]) for token in range(60)]
    for snapshot in snapshots:
        store.keep("a", snapshot)
        settle(store)  # the writer keeps pace, as it does where states are made by reading
    assert store.stats.memory_bytes <= 10 * size
    for snapshot in snapshots:
        assert same(store.longest("a", snapshot.tokens), snapshot)
        settle(store)


def test_held_states_expire_on_disk(linear, open_store, monkeypatch):
    now = 1000.0
    monkeypatch.setattr("time.time", lambda: now)
    store = open_store(ttl=60)
    held, used = (store.hold("a", snapshot_after(linear, [token])) for token in (1, 2))
    now = 1050.0
    store.get("a", used.id)
    now = 1070.0
    with pytest.raises(StateGone, match="nobody used it for 60 seconds"):
        store.get("a", held.id)
    settle(store)
    store.close()
    now = 1071.0
    store = open_store(ttl=60)
    with pytest.raises(StateGone, match="nobody used it for 60 seconds"):
        store.get("a", held.id)
    assert [x.id for x in store.list("a")] == [used.id]


def test_a_start_cleans_up(linear, open_store, tmp_path):
    store = open_store()
    lost, kept = (store.hold("a", snapshot_after(linear, [token])) for token in (1, 2))
    store.close()
    folder = tmp_path / "states" / "states"
    stray = [folder / "ab" / f"{'ab' * 16}.safetensors", folder / "cd" / f".{'cd' * 16}.safetensors.partial"]
    for path in stray:
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(b"x")
    foreign = folder / "ab" / "notes.txt"
    foreign.write_text("mine")
    db = sqlite3.connect(tmp_path / "states" / "index.sqlite")
    find = "SELECT file FROM holds h JOIN states s ON s.id = h.state WHERE h.id = ?"
    (name,) = db.execute(find, (lost.id,)).fetchone()
    db.close()
    os.unlink(folder / name[:2] / f"{name}.safetensors")
    store = open_store()
    assert not any(path.exists() for path in stray)
    assert foreign.exists()
    with pytest.raises(StateGone, match="its file was lost"):
        store.get("a", lost.id)
    assert store.get("a", kept.id).tokens.tolist() == [2]


@pytest.mark.parametrize("damage", ["zeros", "no database", "a folder"])
def test_a_damaged_index_is_set_aside(linear, open_store, tmp_path, damage):
    store = open_store()
    held = store.hold("a", snapshot_after(linear, TOKENS))
    store.close()
    index = tmp_path / "states" / "index.sqlite"
    if damage == "a folder":
        index.unlink()
        index.mkdir()
    else:
        data = bytearray(index.read_bytes())
        data[0 if damage == "no database" else 4096 :] = bytes(len(data) - (0 if damage == "no database" else 4096))
        index.write_bytes(b"?" + data[1:] if damage == "no database" else data)
    store = open_store()
    with pytest.raises(UnknownState):
        store.get("a", held.id)
    (aside,) = (tmp_path / "states").glob("damaged-*")
    assert len(list(aside.glob("states/*/*.safetensors"))) == 1
    again = snapshot_after(linear, TOKENS)
    assert same(store.get("a", store.hold("a", again).id), again)


def test_damaged_files_are_never_taken_for_states(linear, open_store, tmp_path):
    """Fifty of them: cut, flipped, swapped, empty, another model's, another format's, a folder in its place."""
    rng = np.random.default_rng(0)
    other = {}
    for kind, model in {"weights": served(weights="int8"), "model": served("decay")}.items():
        with_folder = StateStore(model, folder=tmp_path / kind)
        with_folder.hold("a", snapshot_after(model, TOKENS))
        with_folder.close()
        other[kind] = next((tmp_path / kind).rglob("*.safetensors")).read_bytes()
    store = open_store()
    snapshots = {store.hold("a", x := snapshot_after(linear, [n, 1, 2])).id: x for n in range(60)}
    store.close()
    paths = files(tmp_path)
    damaged = paths[:50]
    kinds = ["cut", "flipped", "flipped", "swapped", "empty", "zeros", "weights", "model", "longer", "a folder"]
    for number, path in enumerate(damaged):
        kind, data = kinds[number % len(kinds)], bytearray(path.read_bytes())
        if kind == "cut":
            data = data[: rng.integers(len(data))]
        elif kind == "flipped":
            data[rng.integers(len(data))] ^= 1 << rng.integers(8)
        elif kind == "swapped":
            data = paths[50 + number // 10].read_bytes()  # a sound one, of other tokens
        elif kind == "empty":
            data = b""
        elif kind == "zeros":
            data = bytes(len(data))
        elif kind in other:
            data = other[kind].ljust(len(data), b"\0")[: max(len(data), len(other[kind]))]
        elif kind == "longer":
            data += b"\0"
        path.unlink()
        path.mkdir() if kind == "a folder" else path.write_bytes(data)
    store, lost = open_store(), 0
    for id, snapshot in snapshots.items():
        found = store.longest("a", snapshot.tokens)
        assert found is None or same(found, snapshot)
        try:
            assert same(store.get("a", id), snapshot)
        except StateGone:
            lost += 1
    assert lost == 50
    assert len(store.list("a")) == 10
    again = snapshot_after(linear, [0, 1, 2])
    assert same(store.get("a", store.hold("a", again).id), again)


def test_a_flipped_index_gives_no_wrong_state(linear, open_store, tmp_path):
    """Bits of it change while nobody looks: a state is right, gone or unknown, and nothing crashes."""
    store = open_store()
    snapshots = {store.hold("a", x := snapshot_after(linear, [n, 1, 2])).id: x for n in range(5)}
    other = {store.hold("b", x := snapshot_after(linear, [n, 1, 3])).id: x for n in range(5)}
    store.close()
    saved = tmp_path / "saved"
    shutil.copytree(tmp_path / "states", saved)
    size, rng = (saved / "index.sqlite").stat().st_size, np.random.default_rng(1)
    for _ in range(20):
        shutil.rmtree(tmp_path / "states")
        shutil.copytree(saved, tmp_path / "states")
        data = bytearray((saved / "index.sqlite").read_bytes())
        for _ in range(20):
            data[rng.integers(100, size)] ^= 1 << rng.integers(8)
        (tmp_path / "states" / "index.sqlite").write_bytes(data)
        try:
            store = open_store()
        except UserError:
            continue
        for tenant, some in {"a": snapshots, "b": other}.items():
            for id, snapshot in some.items():
                found = store.longest(tenant, snapshot.tokens)
                assert found is None or same(found, snapshot)
                with suppress(UnknownState, UnfitState, OSError):
                    assert same(store.get(tenant, id), snapshot)
        store.close()
