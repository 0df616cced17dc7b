"""Each experiment runs through at a tiny size, and leaves its results; one that trains goes on where it stopped."""

import re
import zipfile

import copy_task
import pytest
from measures.choosing_page import DEFAULT
from support.scripts import runnable

from tarnn.cli.main import main as command

FEATURES = ["--length", 40, "--head-dim", 4, "--draws", 3, "--features", 4, 64, "--sigma", 0.5]
COPY = ["--quick", "--updates", 4, "--every", 2, "--length", 8, "--hidden", 16, "--layers", 1, "--batch-size", 4]
TIME = ["--quick", "--lengths", 16, 32, 64, "--tokens", 64, "--hidden", 16, "--heads", 2, "--rounds", 1]
LANGUAGE = ["--quick", "--steps", 4, "--eval-every", 2, "--redraw-every", 2, "--only", "softmax"]
PROTEINS = ["--quick", "--only", "softmax", "Performer-ReLU", "--long", 0]
SPEECH = ["--quick", "--utterances", 6, "--batch-size", 3, "--epochs", 1, "--tasks", "fsdd letters"]
CHOOSING = ["--quick", "--minutes", 0.0003, "--recall-minutes", 0.0003, "--widths", 16, "--looks", 1]
TABLE = [
    "--quick",
    "--rows",
    "softmax",
    "window + sinks",
    "Transformer-XL",
    "Linformer",
    "--tasks",
    "copying",
    "pixels",
]
# script → its options, the option that takes its data, and the fixture that makes them
OPTIONS = {
    "approximation_error": (FEATURES, None, None),
    "baseline_table": (TABLE, "--mnist", "mnist"),
    "choosing": ([*CHOOSING, "--kinds", "gated delta", DEFAULT], "--books", "books"),
    "copy_task": ([*COPY, "--heads", 4], None, None),
    "image_bits": (["--quick", "--test-images", 5, "--batch-size", 2], "--mnist", "mnist"),
    "image_speed": (["--quick", "--batches", 1, 2, "--seconds", 0.01, "--positions", 2], None, None),
    "long_proteins": (["--quick", "--only", "softmax", "elu + 1"], "--data", "sequences"),
    "long_softmax": (LANGUAGE, "--books", "books"),
    "protein_families": (["--quick", "--only", "softmax"], "--data", "sequences"),
    "proteins": (PROTEINS, "--data", "sequences"),
    "reviews": (["--quick", "--only", "linear"], "--data", "reviews"),
    "speech": (SPEECH, "--data", "recordings"),
    "time_memory": (TIME, None, None),
    "tune_state": (["--quick"], None, None),
}
OTHERS = {"amino_acids", "byte_model", "pretrained"}  # see below
FIXED = {"approximation_error", "image_speed", "time_memory"}
pytestmark = pytest.mark.filterwarnings("ignore")  # transformers warns of random configs


def test_every_script_is_run():
    assert {*OPTIONS, *OTHERS} == set(runnable("experiments"))


@pytest.mark.parametrize("name", OPTIONS)
def test_a_quick_run_leaves_its_results(name, script, folder, data_of, tmp_path, request):
    options, flag, fixture = OPTIONS[name]
    options = options if flag is None else [*options, flag, request.getfixturevalue(fixture)]
    options = options if name in FIXED else [*options, "--runs", tmp_path / "runs"]
    code, _, err = script(name, *options)
    assert code == 0, err
    data = data_of(name)
    assert data["results"]
    assert data["command"].startswith(f"python experiments/{name}.py --threads 1")
    assert str(tmp_path) not in str(data)  # no paths of this machine in what is kept
    assert "\n| " in (folder / f"{name}.md").read_text()


def test_a_run_goes_on_and_trains_nothing_twice(script, books, tmp_path):
    options = [*LANGUAGE, "--books", books, "--runs", tmp_path / "runs"]
    assert script("long_softmax", *options).code == 0
    log = tmp_path / "runs" / "softmax_0" / "log.jsonl"
    before = log.read_text()
    assert script("long_softmax", *options).code == 0
    assert log.read_text() == before
    assert script("long_softmax", *options, "--steps", 6).code == 0
    assert log.read_text().startswith(before)
    assert '"step": 6' in log.read_text().removeprefix(before)


@pytest.mark.parametrize("name", ["choosing", "baseline_table"])
def test_models_that_train_in_turns_are_kept(name, script, data_of, books, mnist, tmp_path):
    options, flag, _ = OPTIONS[name]
    options = [*options, flag, books if name == "choosing" else mnist, "--runs", tmp_path / "runs"]
    assert script(name, *options).code == 0
    results, before = data_of(name)["results"], {p: p.read_bytes() for p in (tmp_path / "runs").rglob("*.pt")}
    assert script(name, *options).code == 0
    assert before == {p: p.read_bytes() for p in (tmp_path / "runs").rglob("*.pt")}
    assert data_of(name)["results"] == results
    assert len(before) > 6


def test_a_run_that_breaks_is_a_result(script, data_of, books, tmp_path):
    options = [*LANGUAGE, "--books", books, "--runs", tmp_path / "runs", "--learning-rate", "1e30"]
    assert script("long_softmax", *options).code == 0
    [result] = data_of("long_softmax")["results"]["softmax"]
    assert "not finite" in result["stopped"]


@pytest.mark.parametrize(
    ("name", "options", "sentence"),
    [
        ("choosing", ["--quick", "--books", "."], "pride_and_prejudice"),
        ("long_softmax", ["--quick", "--books", "."], "pride_and_prejudice"),
        ("proteins", ["--quick"], "--data FOLDER"),
        ("approximation_error", [*FEATURES, "--encoder", "."], "--encoder and --texts go together"),
    ],
)
def test_data_that_are_not_there_are_named(script, tmp_path, monkeypatch, name, options, sentence):
    monkeypatch.chdir(tmp_path)
    code, _, err = script(name, *options)
    assert (code, sentence in err) == (1, True), err


def test_amino_acids_by_attention(script, data_of, sequences, data, tmp_path):
    for name in ("BLOSUM62.txt", "BPT1_BOVIN.fasta"):
        (sequences / name).write_bytes(data(f"proteins/{name}").read_bytes())
    options = [*PROTEINS[:-2], "--data", sequences, "--runs", tmp_path / "runs"]
    assert script("amino_acids", *options).code == 1  # proteins.py makes the models
    assert script("proteins", *options, "--long", 0).code == 0
    assert script("amino_acids", *options).code == 0
    assert data_of("amino_acids")["results"]["BLOSUM62"]["closest"][:3] == ["FY", "IV", "DE"]


def test_converted_models_have_their_controls(script, data, data_of, tmp_path):
    options = ["--quick", "--parts", "stories", "--data", data("stories260k").parent]
    assert script("pretrained", *options).code == 0
    rows = {name.removeprefix("stories, ") for name in data_of("pretrained")["results"]}
    assert rows == {"softmax", "far off", "equal bytes", "features, seed 0", "after stage 1"}


def test_a_run_of_speech_transcribes_as_a_stream_and_as_a_whole(script, recordings, tmp_path, capsys):
    assert script("speech", *SPEECH, "--data", recordings, "--runs", tmp_path / "runs").code == 0
    with zipfile.ZipFile(recordings / "fsdd" / "recordings.zip") as archive:
        (tmp_path / "a.wav").write_bytes(archive.read("7_b_40.wav"))
    words = ["transcribe", str(tmp_path / "runs" / "fsdd_letters_linear_causal_0" / "model"), str(tmp_path / "a.wav")]
    capsys.readouterr()
    assert command([*words, "--stream"]) == command(words) == 0
    streamed, whole = capsys.readouterr().out.splitlines()
    assert streamed == whole
    assert re.fullmatch(r"[A-Z |']*", whole)


def test_every_method_copies_with_a_rate_that_falls_to_zero(script, data_of, tmp_path):
    options = [*COPY, "--heads", 4, "--schedule", "cosine", "--runs", tmp_path / "runs"]
    assert script("copy_task", *options, "--methods", *copy_task.METHODS).code == 0
    curves = data_of("copy_task")["results"]
    assert list(curves) == list(copy_task.METHODS)
    others = [curve["loss"][-1] for name, curve in curves.items() if name != "window + sinks"]
    assert len(set(others)) == len(others)  # each is another function; a window over all that there is, is softmax
    assert script("copy_task", *options, "--methods", "linear", "--updates", 6).code == 1  # of another cosine
