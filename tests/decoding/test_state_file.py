"""A state in a file goes on as if it had never left, and no other file passes for one."""

import errno
import os
import random

import pytest
import torch
from safetensors.torch import save_file
from support.state_files import contents, rewrite

from tarnn.decoding.loop import TokenLoop
from tarnn.decoding.samplers import greedy
from tarnn.decoding.state_file import check_writable, fingerprint, load_state, save_state
from tarnn.errors import UserError

PROMPT = torch.tensor([[5, 17, 2, 88, 41, 41, 9]])
MORE = torch.tensor([[7, 7, 30]])


def loop_after(model, ids):
    loop = TokenLoop(model, model.new_state(1, capacity=64))
    loop.read(ids)
    return loop


@pytest.fixture
def saved(make_model, tmp_path):
    model = make_model()
    loop = loop_after(model, PROMPT)
    save_state(tmp_path / "a.state", model, loop.state, loop.logits, PROMPT[0].tolist())
    return model, tmp_path / "a.state"


def test_a_loaded_state_goes_on_to_the_bit(model, tmp_path):
    loop = loop_after(model, PROMPT)
    size = save_state(tmp_path / "a.state", model, loop.state, loop.logits, [41, 9])
    assert size == (tmp_path / "a.state").stat().st_size
    state, logits, recent = load_state(tmp_path / "a.state", model, room=MORE.shape[1] + 20)
    assert recent == [41, 9]
    again = TokenLoop(model, state, logits)
    assert torch.equal(again.logits, loop.logits)
    for one in (loop, again):
        one.read(MORE)
    tokens = [torch.stack(list(one.tokens(greedy(), 20))) for one in (loop, again)]
    assert torch.equal(*tokens)
    assert torch.equal(again.logits, loop.logits)
    assert again.state.position.tolist() == [PROMPT.shape[1] + MORE.shape[1] + 20]


def test_a_cache_in_bfloat16_comes_back_as_one(make_model, tmp_path):
    model = make_model("softmax")
    loop = TokenLoop(model, model.new_state(1, 64, torch.bfloat16))
    loop.read(PROMPT)
    save_state(tmp_path / "a.state", model, loop.state, loop.logits, [])
    state, logits, _ = load_state(tmp_path / "a.state", model, room=20)
    assert state.layers[0].k.dtype == torch.bfloat16
    tokens = [list(one.tokens(greedy(), 20)) for one in (loop, TokenLoop(model, state, logits))]
    assert torch.equal(*map(torch.stack, tokens))


def test_the_fingerprint_tells_models_apart(make_model):
    a = make_model()
    assert fingerprint(a) == fingerprint(make_model())
    assert fingerprint(a) == fingerprint(make_model(dropout=0.1))
    others = [make_model(seed=1), make_model(normalize=False), make_model().bfloat16()]
    with torch.no_grad():
        changed = make_model()
        changed.lm_head.weight[3, 3] += 1e-3
    assert len({fingerprint(m) for m in (a, *others, changed)}) == 5


def test_what_is_no_state_of_this_model_is_refused_by_name(saved, make_model, tmp_path):
    model, path = saved

    def refused(match, path=path, model=model):
        with pytest.raises(UserError, match=match) as error:
            load_state(path, model)
        assert str(path) in str(error.value)

    refused("no state file at", tmp_path / "missing.state")
    refused("no state file at", tmp_path)
    refused("another model", model=make_model(seed=1))
    whole = path.read_bytes()
    for wrong in (whole[: len(whole) // 2], whole[:5], b"", b"The Republic, by Plato\n" * 9):
        path.write_bytes(wrong)
        refused("no state file, or one that was cut short")
    path.write_bytes(whole)
    tensors, metadata = contents(path)
    for version in ("2", "4"):
        rewrite(path, tensors, metadata | {"format_version": version})
        refused(rf"version {version} of the format tarnn\.state; this tarnn reads version 3.*Make the state again")
    save_file({"x": torch.zeros(1)}, path)
    refused("not a saved state")


def same(a, b):
    """Whether two saved states are alike to the bit."""
    one, other = a.state.tensors() | {"logits": a.logits}, b.state.tensors() | {"logits": b.logits}
    return a.recent == b.recent and one.keys() == other.keys() and all(torch.equal(one[k], other[k]) for k in one)


def damage(path, drawn):
    """Flips a bit, cuts the file short, or swaps, renames or moves what is in it; any header a valid one."""
    data = bytearray(path.read_bytes())
    kind = drawn.choice(["bit", "bit in the header", "cut", "swap", "rename", "number"])
    if kind.startswith("bit"):
        end = 8 + int.from_bytes(data[:8], "little") if kind == "bit in the header" else len(data)
        data[drawn.randrange(end)] ^= 1 << drawn.randrange(8)
        return path.write_bytes(data)
    if kind == "cut":
        return path.write_bytes(data[: drawn.randrange(len(data))])
    tensors, metadata = contents(path)
    a, b = drawn.sample(sorted(tensors), 2)
    if kind == "swap":
        tensors[a], tensors[b] = tensors[b], tensors[a]
    elif kind == "rename":
        tensors[drawn.choice(["x", "layers.0.M", "layers.7.S"])] = tensors.pop(a)
    else:
        tensors[a].view(-1)[drawn.randrange(tensors[a].numel())] += 1
    return save_file(tensors, path, metadata)


@pytest.mark.parametrize("kind", ["linear", "hybrid", "delta"])
def test_a_damaged_file_is_refused_or_says_the_same(make_model, tmp_path, kind):
    model, path = make_model(kind), tmp_path / "a.state"
    loop = loop_after(model, PROMPT)
    save_state(path, model, loop.state, loop.logits, PROMPT[0].tolist())
    whole, original, refused = path.read_bytes(), load_state(path, model), 0
    for seed in range(250):
        path.write_bytes(whole)
        damage(path, random.Random(f"{kind} {seed}"))
        try:
            assert same(load_state(path, model), original), seed
        except UserError:
            refused += 1
    assert refused > 240


@pytest.mark.parametrize("last", ["fsync", "replace"])
def test_a_write_that_fails_at_last_leaves_the_old_file_and_nothing_beside_it(saved, monkeypatch, last):
    model, path = saved
    before = path.read_bytes()
    loop = loop_after(model, MORE)

    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, last, full)
    with pytest.raises(UserError, match=r"No space left on device\. What was there is as it was"):
        save_state(path, model, loop.state, loop.logits, [])
    assert path.read_bytes() == before
    assert [p.name for p in path.parent.iterdir()] == [path.name]


def test_places_that_cannot_be_written_are_known_beforehand(tmp_path):
    check_writable(tmp_path / "new.state")
    with pytest.raises(UserError, match="it is a folder"):
        check_writable(tmp_path)
    with pytest.raises(UserError, match="there is no folder"):
        check_writable(tmp_path / "no" / "new.state")
