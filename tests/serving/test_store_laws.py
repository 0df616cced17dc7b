"""Whatever is asked of a store in whatever order, it says what a plain dictionary would."""

import shutil
import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import settings, strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from support.stored import same, served, snapshot_of

from tarnn.serving.state_info import UnknownState
from tarnn.serving.store import StateStore

MODEL = served()
TENANTS = st.sampled_from("ab")
TOKENS = st.lists(st.integers(0, 2), max_size=6).map(tuple)


class Laws(RuleBasedStateMachine):
    """kept: what `longest` may find, by tenant and tokens; held: what ids mean. forgets: whether what is only kept may go."""

    memory, on_disk, forgets = 2**30, False, False

    def __init__(self):
        super().__init__()
        self.folder = Path(tempfile.mkdtemp()) if self.on_disk else None
        self.kept: set[tuple[str, tuple]] = set()
        self.held: dict[tuple[str, str], tuple[tuple, bool]] = {}

    @initialize()
    def open(self):
        self.store = StateStore(MODEL, memory=self.memory, folder=self.folder)

    def teardown(self):
        self.store.close()
        if self.folder is not None:
            shutil.rmtree(self.folder)

    def means(self, tenant, number):
        """One of a tenant's ids, if it has any."""
        ids = [id for owner, id in self.held if owner == tenant]
        return ids[number % len(ids)] if ids else None

    @rule(tenant=TENANTS, tokens=TOKENS)
    def keep(self, tenant, tokens):
        self.store.keep(tenant, snapshot_of(MODEL, tokens))
        self.kept.add((tenant, tokens))

    @rule(tenant=TENANTS, tokens=TOKENS)
    def hold(self, tenant, tokens):
        info = self.store.hold(tenant, snapshot_of(MODEL, tokens))
        assert info.where == ("disk" if self.on_disk else "memory")
        self.kept.add((tenant, tokens))
        self.held[tenant, info.id] = tokens, True

    @rule(tenant=TENANTS, tokens=TOKENS)
    def longest(self, tenant, tokens):
        found = self.store.longest(tenant, np.array(tokens, np.int32))
        beginnings = [tokens[:n] for n in range(len(tokens), -1, -1) if (tenant, tokens[:n]) in self.kept]
        if found is None:
            assert self.forgets or not beginnings
        else:
            assert tuple(found.tokens.tolist()) in (beginnings if self.forgets else beginnings[:1])
            assert same(found, snapshot_of(MODEL, tuple(found.tokens.tolist())))

    @rule(tenant=TENANTS, other=TENANTS, number=st.integers(0, 9))
    def get(self, tenant, other, number):
        if (id := self.means(tenant, number)) is None:
            return
        if other == tenant:
            assert same(self.store.get(tenant, id), snapshot_of(MODEL, self.held[tenant, id][0]))
        else:
            with pytest.raises(UnknownState):
                self.store.get(other, id)

    @rule(tenant=TENANTS, number=st.integers(0, 9))
    def fork(self, tenant, number):
        if (id := self.means(tenant, number)) is not None:
            self.held[tenant, self.store.fork(tenant, id).id] = self.held[tenant, id]

    @rule(tenant=TENANTS, other=TENANTS, number=st.integers(0, 9))
    def move(self, tenant, other, number):
        if (id := self.means(tenant, number)) is not None:
            added = self.store.add(other, self.store.export(tenant, id))
            self.held[other, added.id] = self.held[tenant, id][0], False

    @rule(tenant=TENANTS, number=st.integers(0, 9))
    def delete(self, tenant, number):
        if (id := self.means(tenant, number)) is None:
            return
        self.store.delete(tenant, id)
        tokens, made_here = self.held.pop((tenant, id))
        if made_here and (tokens, True) not in [means for (owner, _), means in self.held.items() if owner == tenant]:
            self.kept.discard((tenant, tokens))
        with pytest.raises(UnknownState):
            self.store.get(tenant, id)

    @precondition(lambda self: self.on_disk)
    @rule()
    def restart(self):
        self.store.close()
        self.open()

    @precondition(lambda self: self.on_disk)
    @rule()
    def crash(self):
        """The process ends, and with it what only memory had."""
        self.store.cache.abandon()
        self.open()
        self.kept = {key for key in self.kept if self.store.longest(key[0], np.array(key[1], np.int32)) is not None}
        self.kept = {
            (tenant, tokens)
            for tenant, tokens in self.kept
            if len(self.store.longest(tenant, np.array(tokens, np.int32)).tokens) == len(tokens)
        }
        assert {(tenant, tokens) for (tenant, _), (tokens, made_here) in self.held.items() if made_here} <= self.kept

    @invariant()
    def lists(self):
        if not hasattr(self, "store"):
            return
        for tenant in "ab":
            got = {info.id: info.tokens for info in self.store.list(tenant)}
            assert got == {id: len(tokens) for (owner, id), (tokens, _) in self.held.items() if owner == tenant}


class OnDisk(Laws):
    on_disk = True


class LittleMemory(Laws):
    """What is only kept goes for want of room; what is held comes back from the disk."""

    memory, on_disk, forgets = 60_000, True, True


@pytest.mark.thorough
@pytest.mark.parametrize("laws", [Laws, OnDisk, LittleMemory])
def test_a_store_is_a_dictionary(laws):
    run_state_machine_as_test(laws, settings=settings(max_examples=12, stateful_step_count=30, deadline=None))
