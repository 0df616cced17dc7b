"""`tarnn demo --quick`: every part of the demo, on a model of nothing."""

import json

import pytest

from tarnn.kernels.cpu import library


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("demo") / "run"


def test_all_of_it_and_once_more_into_the_same_folder(command, folder):
    outcome = command("demo", "--quick", "--out", folder)
    assert outcome.code == 0
    assert "bits/byte" in outcome.err  # the progress of training
    assert "The " in outcome.out
    figures = json.loads((folder / "demo.json").read_text())
    bits, decode = figures["bits_per_byte"], figures["decode"]
    log = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    assert bits["this model"] == min(line["validation_bits_per_byte"] for line in log if "validation_loss" in line)
    assert 4 < bits["this model"] < 8
    assert 1 < bits["xz -9e"]["after_training"] < bits["xz -9e"]["alone"] < 3
    assert f"{bits['xz -9e']['alone']:.3f}" in outcome.out
    assert [point["position"] for point in decode["linear"]] == [64, 256]
    assert decode["linear"][0]["state_bytes"] == decode["linear"][1]["state_bytes"] == 2 * 2 * (16 * 16 + 16) * 4
    assert [point["state_bytes"] for point in decode["softmax"]] == [64 * 2 * 2 * 32 * 4, 256 * 2 * 2 * 32 * 4]
    assert f"The {'fused' if library.available() else 'eager'} step" in outcome.out
    assert min(point["ms"] for points in decode.values() for point in points) > 0
    for name in ("model.safetensors", "demo.json", "log.jsonl"):
        assert (folder / name).stat().st_size > 0
    for path in (folder, folder / "demo.json", folder / "log.jsonl"):
        assert f"{path}\n" in outcome.out

    again = command("demo", "--quick", "--out", folder)  # replaces its own
    assert again.code == 0
    assert json.loads((folder / "demo.json").read_text())["bits_per_byte"]["this model"] == bits["this model"]


def test_the_run_of_another_is_left_alone(command, folder, tmp_path):
    settings = {"settings": {"training_arguments": {}}}
    (tmp_path / "settings.json").write_text(json.dumps(settings))
    assert command("demo", "--quick", "--out", tmp_path).is_refusal(tmp_path, "not a demo", "--out")
    assert json.loads((tmp_path / "settings.json").read_text()) == settings
    (tmp_path / "settings.json").rename(tmp_path / "thesis.tex")
    assert command("demo", "--quick", "--out", tmp_path).code == 2
    assert (tmp_path / "thesis.tex").exists()


@pytest.mark.parametrize(
    ("options", "word"), [(("--minutes", "0"), "minutes"), (("--corpus", "novels"), "--corpus"), ((), "--out")]
)
def test_bad_options_are_refused(command, tmp_path, options, word):
    out = ("--out", tmp_path / "run") if options else ()
    assert command("demo", *out, *options).is_refusal(word)
    assert not (tmp_path / "run").exists()
