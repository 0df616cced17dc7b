"""What a checkpoint brings along is data: no code in its folder runs, and nobody is asked whether it may."""

import io
import json
import socket
import sys

import pytest
import torch
import transformers as hf

from tarnn.cli.main import main
from tarnn.data.tokenizers import byte_tokenizer
from tarnn.models import TarnnConfig, TarnnForCausalLM, TarnnForMaskedLM
from tarnn.tasks.text.task import with_mask

TRAP = """
from pathlib import Path
Path({mark!r}).write_text("code of the checkpoint ran")
from transformers import PreTrainedTokenizerFast, PreTrainedConfig, PreTrainedModel
class Trap(PreTrainedTokenizerFast): pass
class TrapConfig(PreTrainedConfig): model_type = "tarnn"
class TrapModel(PreTrainedModel): pass
"""
AUTO_MAP = {
    "AutoTokenizer": ["trap.Trap", "trap.Trap"],
    "AutoConfig": "trap.TrapConfig",
    "AutoModelForCausalLM": "trap.TrapModel",
    "AutoModel": "trap.TrapModel",
}
TRAPS = {
    "tokenizer_config.json": {"auto_map": AUTO_MAP, "tokenizer_class": "Trap"},
    "config.json": {"auto_map": AUTO_MAP, "attn_implementation": "someone/kernels", "_attn_implementation": "a/b:c"},
    "generation_config.json": {"auto_map": AUTO_MAP, "custom_generate": ".", "trust_remote_code": True},
    "adapter_config.json": {
        "base_model_name_or_path": "someone/adapter",
        "peft_type": "LORA",
        "auto_mapping": AUTO_MAP,
    },
}
OURS = {"info": TarnnForCausalLM, "generate": TarnnForCausalLM, "show": TarnnForCausalLM, "predict": TarnnForMaskedLM}


@pytest.fixture
def trapped(tmp_path, tarnn, text):
    """trapped(command) → a good checkpoint for it with a trap in its folder, and the file that the trap would write."""

    def make(command):
        folder, mark = tmp_path / "checkpoint", tmp_path / "mark"
        torch.manual_seed(0)
        size = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "vocab_size": 258}
        if command in OURS:
            causal = OURS[command] is TarnnForCausalLM
            OURS[command](TarnnConfig(**size, causal=causal)).save_pretrained(folder)
        else:
            llama = hf.LlamaConfig(**size, intermediate_size=32, max_position_embeddings=64)
            hf.LlamaForCausalLM(llama).save_pretrained(folder)
        with_mask(byte_tokenizer()).save_pretrained(folder)
        if command == "finetune":
            options = ("--window", 8, "--features", 4, "--num-texts", 2, "--length", 32)
            code, _, err = tarnn("convert", folder, tmp_path / "converted", "--texts", text, *options)
            assert code == 0, err
            folder = tmp_path / "converted"
        (folder / "trap.py").write_text(TRAP.format(mark=str(mark)))
        (folder / "custom_generate").mkdir()
        (folder / "custom_generate" / "generate.py").write_text(TRAP.format(mark=str(mark)))
        return folder, mark

    return make


@pytest.fixture
def options(tmp_path, text):
    """What each command needs besides the checkpoint."""
    out, few = tmp_path / "out", ["--num-texts", "2", "--length", "32"]
    return {
        "info": [],
        "generate": ["--prompt", "x", "--max-new-tokens", "3"],
        "show": ["--input", "x", "--out", out],
        "predict": ["x<|mask|>"],
        "convert": [out, "--texts", text, "--window", "8", "--features", "4", *few],
        "finetune": [text, "--against-softmax", "--out", out, "--steps", "1", "--batch-size", "1", *few],
    }


@pytest.mark.parametrize("names", [*([name] for name in TRAPS), list(TRAPS)], ids=lambda names: "+".join(names))
@pytest.mark.parametrize("command", ["info", "generate", "show", "predict", "convert", "finetune"])
def test_neither_code_nor_a_question(trapped, options, names, command, monkeypatch, capsys):
    folder, mark = trapped(command)
    for name in names:
        file = folder / name
        file.write_text(json.dumps((json.loads(file.read_text()) if file.exists() else {}) | TRAPS[name]))
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("a question was asked"))
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: pytest.fail("the network was asked"))
    monkeypatch.setattr(sys, "stdin", answers := io.TextIOWrapper(io.BytesIO(b"y\ny\ny\n")))
    code = main([command, *map(str, [folder, *options[command]])])
    err = capsys.readouterr().err
    assert code == 0, err
    assert not mark.exists()
    assert answers.tell() == 0
    assert "remote" not in err


def test_a_converted_model_runs_our_attention_or_none(trapped, options, capsys):
    """The attention that config.json of a converted model names is one of ours, or the folder is refused."""
    folder, _ = trapped("finetune")
    fields = json.loads((folder / "config.json").read_text())
    fields["quantization_config"]["attention"] = "someone/kernels"
    (folder / "config.json").write_text(json.dumps(fields))
    with pytest.raises(ValueError, match="is tarnn_hybrid or tarnn_linear; got 'someone/kernels'"):
        hf.AutoModelForCausalLM.from_pretrained(folder)
    assert main(["finetune", *map(str, [folder, *options["finetune"]])]) == 2
    assert "Traceback" not in capsys.readouterr().err
