"""`tarnn pack`, and the commands that take its file."""

import json
import subprocess
import sys

import pytest
from support.open_folders import make_folder

from tarnn.cli.main import main
from tarnn.serving.model import open_served


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_folder(tmp_path_factory.mktemp("pack") / "tiny", "Qwen3.5")


@pytest.fixture(scope="module")
def file(folder):
    out = folder.parent / "small.tarnn"
    assert main(["pack", str(folder), str(out), "--weights", "int8", "--quiet"]) == 0
    return out


def test_the_command_names_the_next(command, folder, tmp_path):
    outcome = command("pack", folder, tmp_path / "x.tarnn", "--weights", "int4")
    assert (outcome.code, outcome.err) == (0, "")
    assert outcome.out.splitlines() == [
        f"{tmp_path}/x.tarnn: {(tmp_path / 'x.tarnn').stat().st_size:,} bytes",
        f'next: tarnn generate {tmp_path}/x.tarnn --prompt "Call me"',
    ]


def test_generate_writes_what_the_folder_writes(command, folder, file, tmp_path):
    line = ("--prompt", "Call me", "--max-new-tokens", 20, "--seed", 7)
    outcome = command("generate", file, *line)
    assert outcome.out == command("generate", folder, *line, "--weights", "int8").out
    assert "fused step (int8 weights)" in outcome.err
    command("generate", file, "--prompt", "Call me", "--max-new-tokens", 5, "--state-out", tmp_path / "s")
    assert command("generate", folder, "--weights", "int8", "--state-in", tmp_path / "s").code == 0


def test_info_tells_what_it_tells_of_the_folder(command, folder, file):
    packed, whole = (
        json.loads(command("info", place, "--json", *options).out)
        for place, options in ((file, ()), (folder, ("--weights", "int8")))
    )
    assert packed["step"] == [*whole["step"], "packed"]
    assert {**packed, "step": 0, "checkpoint": 0} == {**whole, "step": 0, "checkpoint": 0}


def test_eval_measures_it(command, folder, file, tmp_path):
    (tmp_path / "a.txt").write_text("Wunderland ist ueberall. " * 8)
    values = [
        json.loads(command("eval", place, tmp_path / "a.txt", "--json", *options).out)["bits_per_byte"]
        for place, options in ((file, ()), (folder, ("--weights", "int8")))
    ]
    assert values[0] == values[1]
    assert command("eval", file).is_refusal("Name a text")


def test_serve_opens_it(folder, file):
    """States of the folder, opened with the same weights, are those of the file."""
    packed, whole = open_served(file), open_served(folder, weights="int8")
    assert packed.key == whole.key
    assert packed.tokenizer.chat_template == whole.tokenizer.chat_template
    assert packed.chats


def test_it_opens_without_transformers(file):
    code = "import sys, tarnn; tarnn.load(sys.argv[1]); assert 'transformers' not in sys.modules"
    subprocess.run([sys.executable, "-c", code, str(file)], check=True)


def test_refusals(command, folder, file, tmp_path):
    assert command("pack", folder, file).is_refusal("exists already", "--force")
    assert command("pack", folder, file, "--weights", "int8", "--force").code == 0
    assert command("pack", folder, tmp_path).is_refusal("it is a folder")
    assert command("pack", folder, tmp_path / "none" / "x").is_refusal("there is no folder", "Make it first")
    assert command("pack", tmp_path / "none", tmp_path / "x").is_refusal("none")
    assert command("pack", folder, tmp_path / "x", "--weights", "int9").is_refusal("int9")
    (tmp_path / "text").write_text("Call me Ishmael.")
    for line in (["generate"], ["info"], ["serve", "--port", 0], ["eval", tmp_path / "text"]):
        outcome = command(line[0], tmp_path / "text", *line[1:])
        assert outcome.is_refusal("is no packed file, or one that was cut short", "tarnn pack FOLDER FILE")
    assert command("generate", file, "--weights", "int4").is_refusal("holds int8 weights", "--weights int4")
    assert not [x for x in tmp_path.iterdir() if x.name != "text"]
