"""A checkpoint is whole or not there, in whatever order things happen."""

import pytest

from tarnn.errors import UserError
from tarnn.training import checkpoints
from tarnn.training.checkpoints import RunState, complete, finish, latest, read_state, rotate, sweep


def write(folder, step, content=b"x" * 100):
    checkpoint = folder / f"checkpoint-{step}"
    checkpoint.mkdir(parents=True)
    (checkpoint / "optimizer.pt").write_bytes(content)
    (checkpoint / "config.json").write_text('{"model_type": "tarnn"}')
    (checkpoint / "trainer_state.json").write_text("{}")
    return checkpoint


def test_it_counts_when_it_is_finished_and_not_before(tmp_path):
    checkpoint = write(tmp_path, 5)
    assert latest(tmp_path) is None
    state = RunState(step=5, seconds=1.5, best_step=4, best_measure=2.25)
    finish(checkpoint, state)
    assert checkpoint == latest(tmp_path)
    assert read_state(checkpoint) == state


def test_the_newest_is_the_one_with_the_most_steps(tmp_path):
    for step in (8, 10, 9):
        finish(write(tmp_path, step), RunState(step))
    (tmp_path / "checkpoint-11").mkdir()  # without a marker
    (tmp_path / "checkpoint-12-copy").mkdir()
    assert [path.name for path in complete(tmp_path)] == ["checkpoint-8", "checkpoint-9", "checkpoint-10"]
    assert latest(tmp_path) == tmp_path / "checkpoint-10"


def test_rotation_keeps_the_last_ones(tmp_path):
    for step in (1, 2, 3):
        finish(write(tmp_path, step), RunState(step))
    rotate(tmp_path, keep=2)
    assert [path.name for path in complete(tmp_path)] == ["checkpoint-2", "checkpoint-3"]
    rotate(tmp_path, keep=1)
    rotate(tmp_path, keep=1)
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-3"]
    with pytest.raises(AssertionError):
        rotate(tmp_path, keep=0)


def test_half_written_and_half_deleted_ones_are_swept_away(tmp_path):
    finish(write(tmp_path, 1), RunState(1))
    write(tmp_path, 2)
    (tmp_path / checkpoints.DOOMED).mkdir()  # of an earlier version
    (tmp_path / "checkpoint-2-copy").mkdir()
    sweep(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint-1", "checkpoint-2-copy"]


def test_damage_is_told_with_a_way_out(tmp_path):
    finish(write(tmp_path, 1), RunState(1))
    finish(last := write(tmp_path, 2), RunState(2))
    (last / "optimizer.pt").write_bytes(b"x" * 99)
    with pytest.raises(
        UserError, match=r"optimizer\.pt has 99 bytes where 100 .* --resume goes on from .*checkpoint-1"
    ):
        read_state(last)
    (last / "optimizer.pt").unlink()
    with pytest.raises(UserError, match=r"optimizer\.pt is missing"):
        read_state(last)
