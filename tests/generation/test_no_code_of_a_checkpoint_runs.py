"""What a checkpoint brings along is data: no code in its folder runs, and nobody is asked whether it may."""

import io
import json
import sys

import pytest
import torch

from tarnn.cli.main import main
from tarnn.data.tokenizers import byte_tokenizer
from tarnn.models import TarnnConfig, TarnnForCausalLM

TRAP = """
from pathlib import Path
Path({mark!r}).write_text("code of the checkpoint ran")
from transformers import PreTrainedTokenizerFast, PreTrainedConfig, PreTrainedModel
class Trap(PreTrainedTokenizerFast): pass
class TrapConfig(PreTrainedConfig): model_type = "tarnn"
class TrapModel(PreTrainedModel): pass
"""
AUTO_MAP = {
    "AutoTokenizer": ["trap.Trap", "trap.Trap"], "AutoConfig": "trap.TrapConfig",
    "AutoModelForCausalLM": "trap.TrapModel", "AutoModel": "trap.TrapModel",
}  # fmt: skip
TRAPS = {
    "tokenizer_config.json": {"auto_map": AUTO_MAP, "tokenizer_class": "Trap"},
    "config.json": {"auto_map": AUTO_MAP},
    "generation_config.json": {"auto_map": AUTO_MAP, "custom_generate": ".", "trust_remote_code": True},
}


@pytest.fixture
def trapped(tmp_path):
    """A good checkpoint with a trap in its folder, and the file that the trap would write."""
    folder, mark = tmp_path / "checkpoint", tmp_path / "mark"
    torch.manual_seed(0)
    TarnnForCausalLM(TarnnConfig(hidden_size=32, num_hidden_layers=1, num_attention_heads=4)).save_pretrained(
        folder
    )
    byte_tokenizer().save_pretrained(folder)
    (folder / "trap.py").write_text(TRAP.format(mark=str(mark)))
    (folder / "custom_generate").mkdir()
    (folder / "custom_generate" / "generate.py").write_text(TRAP.format(mark=str(mark)))
    return folder, mark


@pytest.mark.parametrize(
    "names", [*([name] for name in TRAPS), list(TRAPS)], ids=lambda names: "+".join(names)
)
@pytest.mark.parametrize("command", ["info", "generate"])
def test_neither_code_nor_a_question(trapped, names, command, monkeypatch, capsys):
    folder, mark = trapped
    for name in names:
        file = folder / name
        file.write_text(json.dumps(json.loads(file.read_text()) | TRAPS[name]))
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("a question was asked"))
    monkeypatch.setattr(sys, "stdin", answers := io.TextIOWrapper(io.BytesIO(b"y\ny\ny\n")))
    options = [] if command == "info" else ["--prompt", "x", "--max-new-tokens", "3"]
    assert main([command, str(folder), *options]) == 0
    assert not mark.exists()
    assert answers.tell() == 0
    assert "remote" not in capsys.readouterr().err
