"""`tarnn export`: a folder in another layout, whole or not at all; options and folders that don't fit are refused."""

import pytest
from support.exported import save_run

from tarnn.errors import UserError
from tarnn.export import formats


@pytest.fixture
def run(tmp_path):
    save_run(tmp_path / "run", attention="gated_delta")
    return tmp_path / "run"


def test_the_folder_and_what_is_said_of_it(command, run, tmp_path):
    outcome = command("export", run, "--format", "hf", "--out", tmp_path / "a" / "out")
    assert outcome.code == 0, outcome.err
    assert outcome.out.startswith(f"{tmp_path}/a/out: Qwen3_5ForCausalLM; logits differ by ")
    names = {x.name for x in (tmp_path / "a" / "out").iterdir()}
    assert names == {
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    }
    assert command("generate", tmp_path / "a" / "out", "--prompt", "Call me", "--max-new-tokens", 3).code == 0


def test_refusals(command, run, tmp_path):
    out = tmp_path / "out"
    assert command("export", run, "--format", "hf", "--out", run).is_refusal("exists already")
    assert command("export", tmp_path, "--format", "hf", "--out", out).is_refusal("holds no model")
    outcome = command("export", run, "--format", "gguf", "--out", out)
    assert (outcome.code, "'hf'" in outcome.err) == (2, True)
    save_run(tmp_path / "linear")
    assert command("export", tmp_path / "linear", "--format", "hf", "--out", out).is_refusal("layers of linear")
    assert not out.exists()


def test_options_are_those_of_the_format(monkeypatch, tmp_path):
    def others(source, out, *, report, level=1):
        return f"level {level}"

    writers = {"hf": lambda source, out, *, report: "", "other": others}
    monkeypatch.setattr(formats, "FORMATS", dict.fromkeys(writers, ""))
    monkeypatch.setattr(formats, "exporter", writers.get)
    written = [formats.export("other", tmp_path, tmp_path, {"level": x}, print) for x in (None, 2)]
    assert written == ["level 1", "level 2"]
    with pytest.raises(UserError, match=r"--level is for --format other; leave it out with --format hf"):
        formats.export("hf", tmp_path, tmp_path, {"level": 2}, print)
