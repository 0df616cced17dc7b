"""The page on several processes: its tables are those of the model of cost, and its commands work as typed."""

import runpy
import shlex
import subprocess
import sys

import pytest
from support.code_blocks import ROOT, blocks, commands

SCRIPT = runpy.run_path(str(ROOT / "scripts" / "scale.py"))
PAGE = SCRIPT["PAGE"]
LINES = [words for block in blocks(PAGE) if block.language == "sh" for words in commands(block)]
SHORT = ["--steps", "3", "--hidden-size", "32", "--layers", "1", "--heads", "2", "--context", "30", "--batch-size", "2"]


def test_the_tables_are_those_of_the_model():
    text = PAGE.read_text(encoding="utf-8")
    assert SCRIPT["with_tables"](text) == text, "write it anew: python scripts/scale.py"


def test_what_is_sent_is_what_the_benchmark_counts():
    """For any number of heads and processes."""
    assert SCRIPT["state_bytes"](width=256, head_dim=32) == 8 * (32 * 33 + 1) * 4
    rates = SCRIPT["Rates"](flops=1e12, latency=0.0, bandwidth=1e9)
    assert SCRIPT["message_seconds"](5, rates, 1000) == pytest.approx(4 * 1e-6)
    assert SCRIPT["waiting_seconds"](2, rates, 256, head_dim=32) == pytest.approx((2 * 33824 + 16) / 1e9)


def test_computing_takes_as_long_as_waiting_at_break_even():
    rates = SCRIPT["Rates"](flops=1e12, latency=1e-4, bandwidth=1e9)
    for tree in (False, True):
        for processes in (2, 64):
            tokens = SCRIPT["break_even"](processes, rates, 1024, tree)
            seconds = tokens * SCRIPT["flops_per_token"](1024) / rates.flops
            waiting = SCRIPT["waiting_seconds"](processes, rates, 1024, tree)
            assert 0 <= seconds - waiting <= seconds / tokens
    assert SCRIPT["break_even"](64, rates, 1024, tree=True) < SCRIPT["break_even"](64, rates, 1024)


@pytest.mark.slow
@pytest.mark.parametrize("words", LINES, ids=shlex.join)
def test_the_commands_work_as_typed(words, furnished, tmp_path):
    """But for their length."""
    assert words[:1] == ["torchrun"]
    argv = [str(tmp_path / "run") if word == "runs/mine" else word for word in words[1:]]
    command = [sys.executable, "-m", "torch.distributed.run", *argv, *SHORT]
    run = subprocess.run(command, cwd=furnished, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr[-3000:]
    assert "3 steps in" in run.stdout
    assert run.stdout.count("log.jsonl") == 1
    assert (tmp_path / "run" / "model.safetensors").is_file()
