"""States that begin alike share the memory of their first keys; each stays what it was, and none is counted twice."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from support.served import NO_ENDS, alone, answer, prompt
from support.stored import same, served, snapshot_of

from tarnn.serving.engine import Engine
from tarnn.serving.request import Request, Sampling
from tarnn.serving.snapshot import Snapshot
from tarnn.serving.storage import pages
from tarnn.serving.store import StateStore

TOKENS = np.arange(30, dtype=np.int32)


@pytest.fixture(autouse=True)
def small_pages(monkeypatch):
    monkeypatch.setattr(pages, "PAGE", 4)


@pytest.fixture(scope="module")
def hybrid():
    return served("hybrid")


def after(model, tokens):
    """A state made up: its keys are those of its tokens' beginnings, so that states after the same tokens have the same."""
    state = snapshot_of(model, [0] * len(tokens)).state
    rows = torch.stack([torch.arange(1.0, 1 + len(tokens)).mul(int(x) + 1) for x in tokens]).cumsum(0).diagonal()
    layers = []
    for layer in state.layers:
        if layer.grows:
            (_, heads, _, width) = layer.k.shape
            keys = rows[:, None] + torch.arange(heads * width).view(heads, 1, width)
            layer = layer.resized(len(tokens)).append(keys[None], -keys[None])
        layers.append(layer)
    logits = torch.randn(1, model.step.num_outputs)
    return Snapshot(replace(state, layers=tuple(layers)), logits, np.array(tokens, np.int32))


def memory_of(model, folder, *snapshots):
    """Bytes of a store that has these alone. With a folder, memory counts states and not the tree of their tokens."""
    store = StateStore(model, folder=folder)
    for snapshot in snapshots:
        store.keep("a", snapshot)
    store.close()
    return store.stats.memory_bytes


def test_beginnings_are_shared_and_counted_once(hybrid, tmp_path):
    long, short = after(hybrid, TOKENS[:27]), after(hybrid, TOKENS[:14])
    other = after(hybrid, [*TOKENS[:14], *TOKENS[20:29]])
    alone = [memory_of(hybrid, tmp_path / str(i), x) for i, x in enumerate((long, short, other))]
    store = StateStore(hybrid, folder=tmp_path / "all")
    held = [store.hold("a", snapshot).id for snapshot in (short, long, other)]
    keys = sum(x.k.nbytes + x.v.nbytes for x in long.state.layers if x.grows) // 27
    assert store.stats.memory_bytes == sum(alone) - 2 * 3 * 4 * keys  # three pages of the short one
    for snapshot in (short, long, other):
        assert same(store.longest("a", snapshot.tokens), snapshot)
    for id in held:
        store.delete("a", id)
    assert store.stats.memory_bytes == 0
    store.close()


def test_one_stays_when_others_go(hybrid):
    """In memory for two states, of which the first goes; what the third one shares with it does not."""
    first, second, third = (after(hybrid, TOKENS[:n]) for n in (12, 20, 28))
    alone = StateStore(hybrid)
    alone.keep("a", third)
    store = StateStore(hybrid, memory=alone.stats.memory_bytes)
    for snapshot in (first, second, third):
        store.keep("a", snapshot)
    assert same(store.longest("a", TOKENS), third)
    assert (store.stats.memory_states, store.stats.memory_bytes) == (1, alone.stats.memory_bytes)


def test_unproven_states_and_tenants_share_nothing(hybrid, tmp_path):
    """An uploaded state may be after other tokens than it says; so no state takes keys from it."""
    short, long = after(hybrid, TOKENS[:14]), after(hybrid, TOKENS[:27])
    alone = [memory_of(hybrid, tmp_path / str(i), x) for i, x in enumerate((short, long))]
    store = StateStore(hybrid, folder=tmp_path / "all")
    wrong = after(hybrid, TOKENS[1:15])
    sent = store.hold("a", replace(wrong, tokens=short.tokens, proven=False))
    store.keep("a", long)
    store.keep("b", short)
    assert store.stats.memory_bytes == 2 * alone[0] + alone[1]
    assert same(store.longest("a", TOKENS), long)
    assert same(store.get("a", sent.id), replace(wrong, tokens=short.tokens))
    store.close()


def test_what_is_found_is_the_callers_own(hybrid):
    store, snapshot = StateStore(hybrid), after(hybrid, TOKENS[:14])
    store.keep("a", snapshot)
    found = store.longest("a", TOKENS, room=40)
    caches = [x for x in found.state.layers if x.grows]
    assert found.alone
    assert [x.capacity for x in caches] == [40] * len(caches)
    caches[0].k.zero_()
    assert same(store.longest("a", TOKENS), snapshot)


@pytest.mark.parametrize("memory", [2**30, 2**15])
def test_turns_of_two_conversations_are_as_if_alone(served, memory):
    """One begins like the other; texts are written beside each other, several of one prompt, in much memory and in little."""
    model = served("hybrid")
    store = StateStore(model, memory=memory)
    histories = [prompt(40), np.concatenate([prompt(30), prompt(9, seed=5)])]
    with Engine(model, store=store) as engine:
        for turn in range(4):
            asked = [np.concatenate([x, prompt(7, seed=turn)]) for x in histories]
            made = [Request(x, 6, Sampling(seed=turn), n=2, end_ids=NO_ENDS, keep=True) for x in asked]
            streams = [engine.submit(x) for x in made]
            for i, (request, stream) in enumerate(zip(made, streams)):
                choices = answer(stream)
                for number, (_, tokens, _, snapshot) in enumerate(choices):
                    wanted, logits, state = alone(model, request, number)
                    assert tokens == wanted
                    assert torch.equal(snapshot.logits, logits)
                    ours = snapshot.state.tensors()
                    assert all(torch.equal(x, ours[name]) for name, x in state.tensors().items())
                    assert not snapshot.alone
                assert stream.usage.cached_tokens >= (len(histories[i]) if turn and memory > 2**20 else 0)
                histories[i] = np.concatenate([asked[i], np.array(choices[1][1], np.int32)])
