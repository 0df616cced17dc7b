"""Hybrids beside each other: rows whose caches differ in length and room, as if each were alone."""

from dataclasses import replace

import pytest
import torch
from support.served import NO_ENDS, answer, prompt

from tarnn.serving import pool as pool_module
from tarnn.serving.pool import Pool, copy_of
from tarnn.serving.request import Request, Sampling


@pytest.fixture(autouse=True)
def little_room(monkeypatch):
    """Caches are often full."""
    monkeypatch.setattr(pool_module, "LEAST_ROOM", 3)


def same(snapshot, state):
    pairs = zip(snapshot.state.layers, state.layers, strict=True)
    return all(torch.equal(x, b.tensors()[name]) for a, b in pairs for name, x in a.tensors().items())


def test_a_snapshot_stays_what_it_was(engine, served):
    """Two rows go on from it, and a third one from its end."""
    model, pool = served("hybrid"), Pool(served("hybrid"), 3)
    request = Request(prompt(11), 5, Sampling(seed=1), end_ids=NO_ENDS, keep=True)
    [(_, _, _, snapshot)] = answer(engine("hybrid").submit(request))
    snapshot = replace(snapshot, state=copy_of(snapshot.state, 99))  # where others could write
    before = snapshot.state.clone()
    for _ in range(2):
        pool.add(snapshot)
    for i in range(7):
        pool.step(torch.tensor([i, i + 1]))
    assert same(snapshot, before)
    ends = [model.step.prefill(torch.arange(i, i + 7)[None], copy_of(snapshot.state, 99))[1] for i in range(2)]
    assert [same(pool.snapshot(i, snapshot.tokens), ends[i]) for i in range(2)] == [True, True]
    pool.remove(0)
    pool.step(torch.tensor([8]))
    assert same(pool.snapshot(0, snapshot.tokens), model.step(torch.tensor([8]), ends[1])[1])


def test_padding_leaves_no_keys(engine, served):
    """A padded prompt's state is that of its tokens; one with other keys than tokens is refused."""
    one, model = engine("hybrid"), served("hybrid")
    [(_, _, _, snapshot)] = answer(one.submit(Request(prompt(4), 0, keep=True)))
    ids, mask = torch.tensor([[1, 2, 3]]), torch.tensor([[0, 1, 1]])
    _, padded = model.step.prefill(ids, model.model.new_state(1, 3), mask)
    _, alone = model.step.prefill(ids[:, 1:], model.model.new_state(1, 3))
    for x, y in zip(padded.tensors().values(), alone.tensors().values(), strict=True):
        assert torch.equal(x, y)
    state = replace(snapshot.state, position=snapshot.state.position - 1)
    with pytest.raises(ValueError, match="as many keys as they have seen tokens"):
        one.submit(Request(max_tokens=1, begin=replace(snapshot, state=state)))
