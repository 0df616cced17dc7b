"""A hit is what was put, to the bit, and nobody else's."""

import numpy as np
import pytest
import torch
from support.stored import KINDS, same, served, snapshot_after, snapshot_of

from tarnn.decoding.state_file import load_state
from tarnn.serving.snapshot import Snapshot
from tarnn.serving.state_info import NameTaken, StateGone, StoreFull, UnfitState, UnknownState
from tarnn.serving.store import StateStore

TOKENS = [5, 17, 2, 88, 41, 41, 9]


@pytest.fixture(scope="module")
def linear():
    return served()


@pytest.fixture(params=["memory", "disk", "disk alone"])
def make_store(request, tmp_path):
    """Makes stores that keep states in memory, on a disk too, or in so little memory that all comes from the disk."""
    stores, tier = [], request.param

    def make(model, **options):
        if tier != "memory":
            options["folder"] = tmp_path / str(len(stores))
        if tier == "disk alone":
            options["memory"] = 10
        stores.append(StateStore(model, **options))
        return stores[-1]

    yield make
    for store in stores:
        assert store.stats.trouble == ""
        store.close()


def ids(tokens):
    return np.array(tokens, np.int32)


@pytest.mark.parametrize("kind", KINDS)
def test_a_hit_is_what_was_put(make_store, kind):
    model = served(kind)
    store = make_store(model)
    short, long = snapshot_after(model, TOKENS[:3]), snapshot_after(model, TOKENS)
    for snapshot in (long, short):
        store.hold("a", snapshot)
    assert same(store.longest("a", ids(TOKENS)), long)
    assert same(store.longest("a", ids([*TOKENS, 1])), long)
    assert same(store.longest("a", ids(TOKENS[:-1])), short)
    assert same(store.longest("a", ids([*TOKENS[:3], 1, 1, 1, 1, 1])), short)
    assert store.longest("a", ids(TOKENS[:2])) is None
    held = store.hold("a", long)
    assert same(store.get("a", held.id), long)
    assert held.tokens == len(TOKENS)
    assert held.bytes > long.state.nbytes * (kind != "hybrid")


def test_a_snapshot_in_the_store_is_a_copy(make_store, linear):
    store, snapshot = make_store(linear), snapshot_after(linear, TOKENS)
    store.hold("a", snapshot)
    snapshot.state.layers[0].S.zero_()
    assert same(store.longest("a", ids(TOKENS)), snapshot_after(linear, TOKENS))


def test_tenants_share_nothing(make_store, linear):
    store, snapshot = make_store(linear), snapshot_after(linear, TOKENS)
    held = store.hold("a", snapshot, name="book")
    assert store.longest("b", ids(TOKENS)) is None
    assert store.list("b") == []
    for name in (held.id, "book"):
        for ask in (store.get, store.info, store.fork, store.delete, store.export):
            with pytest.raises(UnknownState, match="there is no state"):
                ask("b", name)
    assert same(store.get("a", "book"), snapshot)


def test_ids_names_forks(make_store, linear):
    store, snapshot = make_store(linear), snapshot_after(linear, TOKENS)
    book = store.hold("a", snapshot, id="resp_1", name="book", note="for later")
    fork = store.fork("a", "book", "copy")
    assert (book.id, book.name, fork.parent, fork.name) == ("resp_1", "book", "resp_1", "copy")
    assert (store.info("a", "book").note, store.info("a", "copy").note) == ("for later", "")
    assert store.info("a", "book") == book
    assert store.list("a") == [book._replace(note=""), fork]
    for name in ("book", "resp_1"):
        with pytest.raises(NameTaken, match=f"there is a state '{name}' already"):
            store.hold("a", snapshot, name=name)
        with pytest.raises(NameTaken):
            store.fork("a", "book", name)
    with pytest.raises(ValueError, match=r"1 to 64 letters.*got '\.\./x'"):
        store.hold("a", snapshot, name="../x")
    store.delete("a", "book")
    assert same(store.get("a", fork.id), snapshot)
    store.delete("a", fork.id)
    assert store.longest("a", ids(TOKENS)) is None
    assert (store.stats.memory_bytes, store.stats.disk_states, store.stats.held) == (0, 0, 0)


@pytest.mark.parametrize("kind", KINDS)
def test_a_file_goes_to_another_store_and_to_generate(make_store, kind, tmp_path):
    model = served(kind)
    store, other, snapshot = make_store(model), make_store(model), snapshot_after(model, TOKENS)
    data = store.export("a", store.hold("a", snapshot).id)
    added = other.add("b", data, "book")
    assert same(other.get("b", added.id), snapshot)
    assert other.longest("b", ids(TOKENS)) is None  # nobody here read them
    (tmp_path / "state").write_bytes(data)
    state, logits, recent = load_state(tmp_path / "state", model.model)
    assert same(Snapshot(state, logits, ids(recent)), snapshot)


def test_what_goes_on_from_an_upload_is_nobody_elses(make_store, linear):
    """Its tokens are what a client says: neither it nor what is made from it is found by them, by others of that tenant."""
    store, snapshot = make_store(linear), snapshot_after(linear, TOKENS)
    added = store.add("a", store.export("a", store.hold("a", snapshot).id))
    store.delete("a", store.list("a")[0].id)
    sent = store.get("a", added.id)
    assert not sent.proven
    after = Snapshot(sent.state, sent.logits, sent.tokens, sent.proven)
    store.keep("a", after)
    held = store.hold("a", after)
    assert store.longest("a", ids(TOKENS)) is None
    for info in (held, store.fork("a", held.id)):
        assert same(store.get("a", info.id), snapshot)
        assert not store.get("a", info.id).proven


def test_files_of_others_are_refused_by_name(linear):
    snapshot = snapshot_after(linear, TOKENS)
    store = StateStore(linear)
    data = store.export("a", store.hold("a", snapshot).id)
    wants = {
        "weights": "weights in the format float32",
        "isa": "instruction set avx2",
        "products": "steps of the kind fused",
    }
    for name, sentence in wants.items():
        with pytest.raises(UnfitState, match=f"made with .*{sentence}; this server has other"):
            StateStore(served(**{name: "other"})).add("a", data)
    with pytest.raises(UnfitState, match="saved by another model"):
        StateStore(served("decay")).add("a", data)
    with pytest.raises(UnfitState, match="position 7, and has 6 tokens"):
        store.keep("a", Snapshot(snapshot.state, snapshot.logits, ids(TOKENS[:6])))
    with pytest.raises(UnfitState, match=r"no state of this model: layers\.0\.M"):
        StateStore(served("decay")).keep("a", snapshot)
    assert store.stats.held == 1


def test_what_is_read_again_soonest_goes_first(linear):
    """Far places outlive near ones of the same age, old ones go before new ones, and those with an id go last."""
    far, near = snapshot_after(linear, range(60)), snapshot_after(linear, range(61))
    size = StateStore(linear).hold("a", far).bytes + 3_000
    store = StateStore(linear, memory=3 * size)
    held = store.hold("a", snapshot_after(linear, [96]))
    store.keep("a", far)
    store.keep("a", near)
    store.keep("a", snapshot_after(linear, [96, 1]))
    assert same(store.longest("a", near.tokens), far)
    for token in range(70):
        store.keep("a", snapshot_after(linear, [token, 70]))
    assert store.get("a", held.id).tokens.tolist() == [96]
    assert store.longest("a", near.tokens) is None
    assert store.longest("a", ids([69, 70])) is not None
    assert store.stats.memory_bytes <= 3 * size
    assert store.stats.evicted == 71


def test_held_states_make_room_for_held_ones_alone(linear):
    size = StateStore(linear).hold("a", snapshot_after(linear, TOKENS)).bytes + 3_000
    store = StateStore(linear, memory=2 * size)
    first, second = (store.hold("a", snapshot_after(linear, [token]), name=f"n{token}") for token in (1, 2))
    store.keep("a", snapshot_after(linear, [3]))
    assert store.longest("a", ids([3])) is None
    store.get("a", first.id)
    store.hold("a", snapshot_after(linear, [4]))
    for name in (second.id, "n2"):
        with pytest.raises(StateGone, match="is gone: it had to make room for others"):
            store.get("a", name)
    assert store.get("a", first.id) is not None
    with pytest.raises(UnknownState, match="there is no state"):
        store.get("b", second.id)
    with pytest.raises(StoreFull, match=r"in a memory of 99 bytes.* there is no folder"):
        StateStore(linear, memory=99).hold("a", snapshot_after(linear, TOKENS))


def test_one_key_pushes_out_no_state_of_one_that_has_less(linear):
    """Where states are held in memory alone. A state that is more than others have in all is refused."""
    size = StateStore(linear).hold("a", snapshot_after(linear, TOKENS)).bytes + 4_000
    store = StateStore(linear, memory=12 * size)
    few = [store.hold("b", snapshot_after(linear, [token, 2])) for token in range(3)]
    for token in range(40):
        store.hold("a", snapshot_after(linear, [token, 1]))
    assert store.list("b") == few
    assert 3 < len(store.list("a")) < 40
    with pytest.raises(StoreFull, match="no room"):
        store.hold("c", snapshot_of(linear, np.arange(12 * size // 4 - 3000) % 97))
    assert store.list("b") == few


def test_held_states_expire(linear, monkeypatch):
    now = 1000.0
    monkeypatch.setattr("time.time", lambda: now)
    store = StateStore(linear, ttl=60)
    held, used = (store.hold("a", snapshot_after(linear, [token])) for token in (1, 2))
    now = 1050
    store.get("a", used.id)
    now = 1070
    with pytest.raises(StateGone, match="nobody used it for 60 seconds"):
        store.get("a", held.id)
    assert [x.id for x in store.list("a")] == [used.id]


def test_conversations_share_their_beginning(linear):
    """A book's tokens are there once, however many go on from it, and go when the last of them does."""
    store, book = StateStore(linear), np.arange(50_000, dtype=np.int32) % 97
    snapshot = snapshot_after(linear, [1])
    position = torch.tensor([len(book) + 1])
    held = []
    for token in range(20):
        state = type(snapshot.state)(snapshot.state.layers, position)
        held.append(store.hold("a", Snapshot(state, snapshot.logits, np.append(book, np.int32(token)))))
    assert store.stats.memory_bytes < 20 * (held[0].bytes + 3_000) + book.nbytes
    assert store.get("a", held[7].id).tokens.tolist() == [*book, 7]
    for state in held:
        store.delete("a", state.id)
    assert store.stats.memory_bytes == 0
