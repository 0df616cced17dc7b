"""A state in a file goes on as if it had never left, and no other file passes for one."""

import errno
import os

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from tarnn.errors import UserError
from tarnn.generation import state_file
from tarnn.generation.loop import TokenLoop
from tarnn.generation.samplers import greedy
from tarnn.generation.state_file import check_writable, fingerprint, load_state, save_state, write_atomically

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


def test_a_cache_is_saved_as_far_as_it_is_filled(make_model, tmp_path):
    model = make_model("softmax")
    loop = TokenLoop(model, model.new_state(1, capacity=10_000))
    loop.read(PROMPT)
    size = save_state(tmp_path / "a.state", model, loop.state, loop.logits, [])
    assert size < 20_000 < loop.state.nbytes


def test_the_file_says_what_it_is(saved):
    model, path = saved
    with safe_open(path, "pt") as file:
        metadata = file.metadata()
    assert metadata["format"] == "tarnn.state"
    assert metadata["tokens_seen"] == str(PROMPT.shape[1])
    assert metadata["fingerprint"] == fingerprint(model)


def test_the_fingerprint_tells_models_apart(make_model):
    a = make_model()
    assert fingerprint(a) == fingerprint(make_model())
    assert fingerprint(a) == fingerprint(make_model(dropout=0.1))
    others = [make_model(seed=1), make_model(normalize=False), make_model().bfloat16()]
    with torch.no_grad():
        changed = make_model()
        changed.lm_head.weight[3, 3] += 1e-3
    assert len({fingerprint(m) for m in (a, *others, changed)}) == 5


def rewritten(path, **metadata):
    with safe_open(path, "pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        save_file(tensors, path, file.metadata() | metadata)


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
    rewritten(path, format_version="2")
    refused("version 2 of the state format")
    save_file({"x": torch.zeros(1)}, path)
    refused("not a saved state")


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


def test_an_interrupted_write_leaves_the_old_file(saved, monkeypatch):
    _, path = saved
    before = path.read_bytes()

    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(state_file, "write_all", interrupt)
    with pytest.raises(KeyboardInterrupt):
        write_atomically(path, b"new")
    assert path.read_bytes() == before
    assert [p.name for p in path.parent.iterdir()] == [path.name]


def test_writing_follows_links_and_spares_devices(tmp_path):
    real, link = tmp_path / "real", tmp_path / "link"
    real.write_bytes(b"old")
    link.symlink_to(real)
    write_atomically(link, b"new")
    assert link.is_symlink()
    assert real.read_bytes() == b"new"
    os.mkfifo(tmp_path / "pipe")
    reader = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    write_atomically(tmp_path / "pipe", b"through the pipe")
    assert os.read(reader, 99) == b"through the pipe"
    os.close(reader)
    assert (tmp_path / "pipe").is_fifo()


def test_places_that_cannot_be_written_are_known_beforehand(tmp_path):
    check_writable(tmp_path / "new.state")
    with pytest.raises(UserError, match="it is a folder"):
        check_writable(tmp_path)
    with pytest.raises(UserError, match="there is no folder"):
        check_writable(tmp_path / "no" / "new.state")
