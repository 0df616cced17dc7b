"""What several processes share: steps, examples, and errors. The rest is in tests/cli/test_train_processes.py."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from torch.utils.data import BatchSampler, SequentialSampler

from tarnn.errors import UserError
from tarnn.tasks import MaskedLMSettings, TextSettings
from tarnn.training.arguments import refuse_processes, training_arguments
from tarnn.training.processes import everywhere, gathered, is_loss, largest, refuse_disagreement, shared
from tarnn.training.run import keep_step
from tarnn.training.stretches import RepeatedBatches, Stretches
from tarnn.training.summary import over_processes

RUN = TextSettings(("text",), Path("out"), batch_size=6, accumulate=2)


@pytest.mark.parametrize(
    ("before", "now", "shared_by", "batch", "accumulate"),
    [(2, 2, 1, 6, 2), (2, 1, 1, 6, 4), (2, 4, 1, 6, 1), (2, 3, 1, 4, 2), (1, 6, 1, 2, 1), (2, 8, 2, 6, 1), (4, 8, 4, 6, 4)],
)  # fmt: skip
def test_a_step_keeps_its_examples_on_any_number_of_processes(before, now, shared_by, batch, accumulate):
    settings = replace(RUN, sequence_parallel=shared_by)
    args = SimpleNamespace(world_size=now, per_device_train_batch_size=6, gradient_accumulation_steps=2)
    here = keep_step(args, settings, {"run": {"examples_per_step": 12 * before}})
    assert (here.batch_size, here.accumulate) == (batch, accumulate)
    assert (args.per_device_train_batch_size, args.gradient_accumulation_steps) == (batch, accumulate)
    assert batch * accumulate * (now // shared_by) == 12 * before


def test_a_step_that_cannot_be_shared_equally_is_refused():
    with pytest.raises(UserError, match="a step of this run has 12 examples, which 5 processes can't share equally"):
        keep_step(SimpleNamespace(world_size=5), RUN, {"run": {"processes": 1}})  # as older runs recorded it


def test_processes_of_a_group_get_the_same_batches():
    batches = list(BatchSampler(RepeatedBatches(SequentialSampler(range(12)), 2, 3), 2, False))
    assert batches == [[i, i + 1] for i in range(0, 12, 2) for _ in range(3)]
    assert len(RepeatedBatches(SequentialSampler(range(12)), 2, 3)) == 36
    # as torch's loader and accelerate hand them out: batch after batch, rank after rank
    places = [Stretches(rank, 6, 1) for rank in range(6)]
    assert [(x.reader, x.readers) for x in places] == [(rank, 6) for rank in range(6)]


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


def test_sequences_are_not_cut_where_that_cannot_be(tmp_path):
    with pytest.raises(
        UserError, match=r"--sequence-parallel 3 needs 3 processes for each sequence, .* there are 1 in all"
    ):
        training_arguments(replace(RUN, out=tmp_path, sequence_parallel=3))
    with pytest.raises(UserError, match="--sequence-parallel 4 needs"):
        refuse_processes(4, SimpleNamespace(world_size=6, fsdp=None))
    for kind in (TextSettings, MaskedLMSettings):
        with pytest.raises(UserError, match="leaves some processes no token of a --context of 3"):
            kind(("text",), tmp_path, context=3, sequence_parallel=4)


@pytest.mark.parametrize(
    ("processes", "per_sequence", "text"),
    [
        (1, 1, ""),
        (4, 1, " × 4 processes"),
        (4, 4, ", each sequence over 4 processes"),
        (4, 2, " × 2 groups of processes, each sequence over 2 processes"),
    ],
)
def test_the_table_says_how_a_step_is_shared_out(processes, per_sequence, text):
    assert over_processes(processes, per_sequence) == text
