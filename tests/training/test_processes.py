"""What several processes share: steps, examples, and errors. The rest is in tests/cli/test_train_processes.py."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from tarnn.errors import UserError
from tarnn.tasks import TextSettings
from tarnn.training.processes import everywhere, gathered, is_loss, largest, refuse_disagreement, shared
from tarnn.training.run import keep_step

RUN = TextSettings(("text",), Path("out"), batch_size=6, accumulate=2)


@pytest.mark.parametrize(
    ("before", "now", "batch", "accumulate"), [(2, 2, 6, 2), (2, 1, 6, 4), (2, 4, 6, 1), (2, 3, 4, 2), (1, 6, 2, 1)]
)
def test_a_step_keeps_its_examples_on_any_number_of_processes(before, now, batch, accumulate):
    args = SimpleNamespace(world_size=now, per_device_train_batch_size=6, gradient_accumulation_steps=2)
    here = keep_step(args, RUN, {"run": {"examples_per_step": 12 * before}})
    assert (here.batch_size, here.accumulate) == (batch, accumulate)
    assert (args.per_device_train_batch_size, args.gradient_accumulation_steps) == (batch, accumulate)
    assert batch * accumulate * now == 12 * before


def test_a_step_that_cannot_be_shared_equally_is_refused():
    with pytest.raises(UserError, match="a step of this run has 12 examples, which 5 processes can't share equally"):
        keep_step(SimpleNamespace(world_size=5), RUN, {"run": {"processes": 1}})  # as older runs recorded it


def test_a_process_that_is_alone_agrees_with_itself():
    assert everywhere(lambda: 3) == 3
    with pytest.raises(KeyError):
        everywhere(lambda: {}["key"])
    assert shared(1.5, 2.0) == [1.5, 2.0]
    assert largest(7) == 7
    assert gathered("a") == ["a"]
    refuse_disagreement("settings", {"context": 3})


def test_only_the_loss_of_a_process_is_one():
    assert is_loss(RuntimeError("[pair.cc:534] Connection closed by peer [127.0.0.1]:1234"))
    assert not is_loss(RuntimeError("mat1 and mat2 shapes cannot be multiplied"))
    assert not is_loss(ValueError("Connection closed by peer"))


def test_a_run_of_before_whose_sequences_were_cut_goes_on(tmp_path):
    saved = RUN.as_json()
    assert RUN.differences({**saved, "sequence_parallel": 2}) == []
    assert RUN.differences({**saved, "context": 3}) != []
