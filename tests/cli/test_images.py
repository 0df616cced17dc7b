"""`tarnn train --task image` and `tarnn generate` of its model: what they leave behind, and what they refuse."""

import json
import math
import shutil

import numpy as np
import pytest
import torch
from transformers import AutoModel

from tarnn.cli.images import HIDDEN
from tarnn.decoding.choice import fastest_step
from tarnn.decoding.pixels import pixel_sampler
from tarnn.kernels.cpu import library
from tarnn.models import TarnnForImageGeneration, TarnnImageConfig
from tarnn.tasks.checkpoint import open_model
from tarnn.tasks.images import read_images
from tarnn.tasks.images.drawing import GAP, LABEL, choose_labels, draw
from tarnn.tasks.images.opening import ImageProgram, open_images
from tarnn.training.safe_trainer import SafeTrainer

TINY = [
    "--task", "image", "--hidden-size", "32", "--layers", "2", "--heads", "2", "--batch-size", "4", "--steps", "12",
    "--eval-every", "4", "--save-every", "4", "--sample-images", "0",
]  # fmt: skip
SIDE, SCALE = 4, 16  # of an image, and how much larger it is in a grid
STEP = SIDE * SCALE + GAP


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """60 images to train on, 7 to test on: stripes whose shade is their class's, 0 to 2."""
    folder, rng = tmp_path_factory.mktemp("images"), np.random.default_rng(0)
    for part, n in (("train", 60), ("test", 7)):
        labels = np.arange(n) % 3
        shade = rng.integers(0, 40, (n, SIDE, 1, 1)) + 100 * labels[:, None, None, None]
        np.savez(folder / f"{part}.npz", images=shade.repeat(SIDE, 2).astype(np.uint8), labels=labels)
    return folder


@pytest.fixture
def train(tarnn, folder, tmp_path):
    """train(*options) → (exit code, stdout, stderr) of a tiny run on the folder into tmp_path/run."""

    def run(*options, source=folder, out=tmp_path / "run"):
        return tarnn("train", source, "--out", out, *TINY, *options)

    return run


def log_of(run):
    return [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]


def cell(picture, row, column, label=0):
    """The image at a place of a grid, at its own size. `label`: pixels above each image."""
    top, left = row * (STEP + label) + label, column * STEP
    return picture[top : top + SIDE * SCALE : SCALE, left : left + SIDE * SCALE : SCALE]


def test_a_run_and_all_that_it_writes(train, folder, tmp_path):
    out = tmp_path / "run"
    code, stdout, stderr = train("--sample-images", 5)
    assert code == 0
    for resolved in (
        f"{folder}:train: 54 of 4 × 4 pixels in grey",
        f"validation  6 images, {folder}:train",
        "position grid",
        "64 values: batch 4",
        "12 steps",
        "0.001, cosine",
        "step 4: validation",
    ):
        assert resolved in stderr, resolved
    lines = log_of(out)
    assert [line["step"] for line in lines] == [4, 4, 8, 8, 12, 12]
    assert [line["images"] for line in lines if "loss" in line] == [16, 32, 48]
    assert lines[-2]["bits_per_dim"] == pytest.approx(lines[-2]["loss"] / math.log(2))
    assert lines[-2]["bits_per_dim"] < lines[0]["bits_per_dim"]
    settings = json.loads((out / "settings.json").read_text())
    assert (settings["settings"]["task"], settings["run"]["images_per_step"]) == ("image", 4)
    assert settings["images"]["train"]["shape"] == [4, 4, 1]

    best = min(line["validation_bits_per_dim"] for line in lines if "validation_loss" in line)
    assert f"{best:.4f} bits/dim on the validation images" in stdout
    model = AutoModel.from_pretrained(out).double().eval()
    held_out = read_images(str(folder)).split(6)[1]
    bits = model.bits_per_dim(torch.from_numpy(held_out.pixels)).mean().item()
    assert bits == pytest.approx(best, rel=1e-5)
    assert read_images(str(out / "sample.png")).shape == (2 * STEP - GAP, 3 * STEP - GAP, 1)
    assert str(out / "sample.png") in stdout


def test_a_resumed_run_is_the_run_that_was_not_interrupted(train, tmp_path, monkeypatch):
    """With the paper's model and optimizer, classes and dropout."""
    options = ("--preset", "paper", "--class-conditional", "--dropout", 0.1, "--val-fraction", 0.1)
    assert train(*options, out=tmp_path / "whole")[0] == 0

    def interrupted(self, model, inputs, **kwargs):
        if self.state.global_step == 6:
            raise KeyboardInterrupt
        return compute_loss(self, model, inputs, **kwargs)

    compute_loss = SafeTrainer.compute_loss
    monkeypatch.setattr(SafeTrainer, "compute_loss", interrupted)
    code, _, stderr = train(*options)
    assert (code, "--resume goes on from" in stderr) == (130, True)
    monkeypatch.setattr(SafeTrainer, "compute_loss", compute_loss)
    code, _, stderr = train(*options, "--resume")
    assert (code, "checkpoint-4" in stderr) == (0, True)
    assert "0.0001, constant; RAdam, weight decay 0.01" in stderr
    whole, resumed = (tmp_path / name for name in ("whole", "run"))
    drop = ("seconds",)
    assert [{k: v for k, v in line.items() if k not in drop} for line in log_of(resumed)] == [
        {k: v for k, v in line.items() if k not in drop} for line in log_of(whole)
    ]
    for name in ("model.safetensors", "checkpoints/checkpoint-12/model.safetensors"):
        assert (whole / name).read_bytes() == (resumed / name).read_bytes()
    assert {line["learning_rate"] for line in log_of(whole) if "loss" in line} == {1e-4}
    config = AutoModel.from_pretrained(resumed).config
    assert (config.num_classes, config.norm_position, config.position) == (3, "post", "sinusoidal_half")


def test_radam_decouples_its_weight_decay(train, monkeypatch):
    made = []
    create = SafeTrainer.create_optimizer
    monkeypatch.setattr(SafeTrainer, "create_optimizer", lambda self, *a: made.append(create(self, *a)) or made[0])
    assert train("--optimizer", "radam", "--steps", 1, "--learning-rate", 5e-4, "--set", "adam_epsilon=1e-6")[0] == 0
    (optimizer,) = made
    assert type(optimizer) is torch.optim.RAdam
    group = max(optimizer.param_groups, key=lambda group: group["weight_decay"])
    assert (group["weight_decay"], group["decoupled_weight_decay"], group["eps"]) == (0.01, True, 1e-6)
    assert (group["initial_lr"], group["betas"]) == (5e-4, (0.9, 0.999))


def test_what_is_validated_on(train, folder, tmp_path):
    """Images of a source of their own; the source's valid part; at most so many values unless asked for."""
    code, _, stderr = train("--val", f"{folder}:test", "--steps", 1)
    assert (code, f"validation  7 images, {folder}:test" in stderr) == (0, True)
    code, stdout, stderr = train("--val-fraction", 0, "--steps", 1, "--overwrite")
    assert (code, "none: the latest model is kept" in stderr, "no validation images" in stdout) == (0, True, True)
    parts = tmp_path / "parts"
    parts.mkdir()
    for name, n in (("train", 4), ("valid", 9)):
        np.savez(parts / f"{name}.npz", images=np.zeros((n, 181, 181), np.uint8))
    code, _, stderr = train("--steps", 1, "--batch-size", 1, "--attention", "none", "--overwrite", source=parts)
    assert (code, f"8 images, the first of 9 of {parts}:valid" in stderr) == (0, True)


@pytest.fixture(scope="module")
def runs(tmp_path_factory, folder):
    """Trained checkpoints by name."""
    from tarnn.cli.main import main

    made = {}
    for name, options in {
        "plain": ["--steps", "60"],
        "classes": ["--class-conditional", "--steps", "60"],
        "categorical": ["--likelihood", "categorical", "--attention", "linear,softmax"],
    }.items():
        made[name] = tmp_path_factory.mktemp(name) / "run"
        options = [*TINY, *options, "--learning-rate", "0.01"]
        assert main(["train", str(folder), "--out", str(made[name]), *options]) == 0
    return made


@pytest.mark.parametrize("name", ["plain", "classes", "categorical"])
def test_images_from_nothing(command, runs, name, tmp_path):
    def draw(file, *options):
        found = command("generate", runs[name], "--num-samples", 7, "--out", tmp_path / file, *options)
        assert found.code == 0, found.err
        assert found.out == f"{tmp_path / file}\n"
        return found.err

    told = draw("a.png", "--seed", 1)
    for part in (f"{runs[name]}, float32 on cpu", "seed 1", " step (", "7 images in"):
        assert part in told
    assert draw("b.png", "--seed", 1, "--quiet", "--task", "image") == ""
    draw("c.png", "--seed", 2, "--temperature", 0.7, "--top-p", 0.9)
    pictures = [read_images(str(tmp_path / f"{x}.png")).pixels[0] for x in "abc"]
    label = LABEL if name == "classes" else 0
    assert pictures[0].shape == (3 * (STEP + label) - GAP, 3 * STEP - GAP, 1)
    assert np.array_equal(pictures[0], pictures[1])
    assert not np.array_equal(pictures[0], pictures[2])


def test_images_of_a_class(command, runs, tmp_path):
    """Trained on shades of 0 to 39, 100 to 139 and 200 to 239 by class, it draws them by class; all in turn by default."""

    def shades(*options):
        options = ("--num-samples", 6, "--seed", 0, "--out", tmp_path / "a.png", *options)
        assert command("generate", runs["classes"], *options).code == 0
        picture = read_images(str(tmp_path / "a.png")).pixels[0]
        return [np.median(cell(picture, i // 3, i % 3, LABEL)) for i in range(6)]

    by_class = shades()
    for drawn in (by_class, shades("--batch-size", 4)):
        assert all(drawn[i] < drawn[i + 1] for i in (0, 1, 3, 4))
    assert (
        np.abs(
            np.array(shades("--class-label", 2, "--class-label", 0, "--batch-size", 4)).reshape(3, 2)
            - [[by_class[2], by_class[0]]]
        ).max()
        < 60
    )


@pytest.mark.parametrize("name", ["plain", "classes", "categorical"])
def test_half_of_an_image_completed(command, runs, folder, name, tmp_path):
    out = tmp_path / "a.png"
    options = ("--complete", folder, "--num-samples", 5, "--hidden", 0.3, "--batch-size", 2, "--seed", 0)
    assert command("generate", runs[name], *options, "--out", out).out == f"{out}\n"
    picture, originals = read_images(str(out)).pixels[0], read_images(f"{folder}:test").pixels
    assert picture.shape == (LABEL + 5 * STEP - GAP, 3 * STEP - GAP, 1)
    headings, picture = picture[:LABEL], picture[LABEL:]
    strips = [headings[:, j * STEP :][:, : STEP - GAP] for j in range(3)]
    assert all(strip.max() > 200 for strip in strips)  # letters
    assert not np.array_equal(strips[0], strips[1])
    for i in range(5):
        seen, made, original = (cell(picture, i, j) for j in range(3))
        assert np.array_equal(original, originals[i])
        assert np.array_equal(seen[:3], original[:3])
        assert (seen[3] == HIDDEN).all()
        assert np.array_equal(made[:3], original[:3])
        assert (made[3] != HIDDEN).any()


def test_what_generate_refuses(command, runs, folder, checkpoints, tmp_path):
    plain, classes = runs["plain"], runs["classes"]
    np.savez(tmp_path / "large.npz", images=np.zeros((2, 5, 5), np.uint8))
    np.savez(tmp_path / "bare.npz", images=np.zeros((2, 4, 4), np.uint8))
    np.savez(tmp_path / "more.npz", images=np.zeros((2, 4, 4), np.uint8), labels=np.array([0, 3]))
    nowhere = tmp_path / "nowhere" / "a.png"
    for arguments, words in [
        ((plain, "--task", "text"), ["--task text", plain, "images"]),
        ((plain, "--prompt", "x"), ["--prompt does not go with a model of images"]),
        ((checkpoints["linear"], "--complete", folder), ["--complete does not go with a model of text"]),
        ((checkpoints["linear"], "--task", "image"), ["--task image", "a model of text"]),
        ((plain, "--complete", tmp_path / "large.npz", "--num-samples", 1), ["large.npz", "5 × 5 pixels", "4 × 4"]),
        ((plain, "--complete", folder), ["has 7 images, and 16 were asked for"]),
        ((plain, "--complete", folder, "--hidden", 0), ["--hidden must be above 0"]),
        ((classes, "--complete", folder, "--class-label", 1), ["leave --class-label out"]),
        ((classes, "--class-label", 3), ["--class-label 3", "0 to 2"]),
        ((plain, "--class-label", 0), ["knows no classes"]),
        ((plain, "--num-samples", 0), ["--num-samples must be 1 or more"]),
        ((plain, "--evaluate", folder), [f"--evaluate and --limit are gone: `tarnn eval {plain} IMAGES` measures"]),
        ((classes, "--complete", tmp_path / "bare.npz", "--num-samples", 1), ["has no labels", "3 classes"]),
        ((classes, "--complete", tmp_path / "more.npz", "--num-samples", 2), ["a label 3", "3 classes"]),
        ((plain, "--complete", f"{folder}:valid"), ["no part called valid; it has train, test"]),
        ((plain, "--batch-size", 0), ["must be 1 or more"]),
        ((plain, "--top-k", -1), ["top-k must be 0 (off) or above"]),
        ((plain, "--num-samples", 1, "--out", nowhere), [nowhere, "there is no folder"]),
    ]:
        assert command("generate", *arguments, "--quiet").is_refusal(*words) or arguments


def test_what_train_refuses(train, folder, tmp_path):
    (tmp_path / "torn.npz").write_bytes((folder / "train.npz").read_bytes()[:900])
    np.savez(tmp_path / "bare.npz", images=np.zeros((9, 4, 4), np.uint8))
    np.savez(tmp_path / "large.npz", images=np.zeros((9, 5, 5), np.uint8))
    (tmp_path / "config.json").write_text(json.dumps({"image_height": 5}))
    bare = {"source": tmp_path / "bare.npz"}
    for options, others, words in [
        (["--tokenizer", "bpe:300"], {}, ["--tokenizer is for --task text; leave it out with --task image"]),
        (["--task", "text", "--mixtures", 5], {}, ["--mixtures is for --task image"]),
        (["--likelihood", "normal"], {}, ["likelihood must be one of logistic_mixture, categorical"]),
        (["--position", "spiral"], {}, ["position must be one of", "grid"]),
        (["--optimizer", "sgd"], {}, ["--optimizer sgd"]),
        (["--val-fraction", 1], {}, ["--val-fraction 1.0 is not possible", "below 1"]),
        (["--config", tmp_path / "config.json"], {}, ["image_height is 5 in", "4 by the data"]),
        (["--class-conditional"], bare, ["bare.npz has no labels; leave --class-conditional out"]),
        (["--class-conditional", "--val", tmp_path / "bare.npz"], {}, ["bare.npz has no labels", "3 classes"]),
        (["--val", tmp_path / "large.npz"], {}, ["large.npz has images of 5 × 5", "of 4 × 4"]),
        ([], {"source": tmp_path / "torn.npz"}, ["torn.npz can't be read", "Take an intact copy"]),
        ([], {"source": tmp_path / "gone"}, ["gone: no such file or folder; expected a folder"]),
        ([], {"source": f"{folder}:valid"}, ["has no part called valid"]),
    ]:
        code, _, err = train(*options, **others)
        sentence = err.splitlines()[-1]
        assert (code, sentence.startswith("tarnn: error: "), "Traceback" in err) == (2, True, False), err
        for word in words:
            assert word in sentence, (word, sentence)


def test_a_run_goes_on_with_its_own_images_only(train, folder, tmp_path):
    mine = shutil.copytree(folder, tmp_path / "mine")
    assert train("--steps", 4, source=mine)[0] == 0
    shutil.copy(mine / "test.npz", mine / "train.npz")
    code, _, err = train("--steps", 8, "--resume", source=mine)
    assert (code, "no longer those that the run" in err) == (2, True)
    code, _, err = train("--steps", 8, "--resume", "--mixtures", 4, source=mine)
    assert (code, "--mixtures was null, is 4" in err) == (2, True)


@pytest.mark.parametrize("options", [{}, {"num_classes": 3}, {"likelihood": "categorical", "attention": "softmax"}])
def test_the_program_of_a_folder_draws_what_the_module_draws(tmp_path, options):
    """The same seed, the same images: drawn by the program that the folder says, without a module, and by the live model's."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "initializer_range": 0.3}
    config = TarnnImageConfig(**sizes, image_height=5, image_width=4, num_channels=3, num_mixtures=3, **options)
    TarnnForImageGeneration(config).save_pretrained(tmp_path)
    opened, step, about = open_images(tmp_path)
    module = open_model(tmp_path, tasks=("image",))
    labels = choose_labels((), 7, config.num_classes)
    assert (type(opened) is ImageProgram, "fused step" in about) == (library.available(),) * 2
    drawn = [
        draw(model, 7, 4, sample, step=its_step, labels=labels)
        for model, its_step in ((opened, step), (module, fastest_step(module).step))
        for sample in [pixel_sampler(model.likelihood, generator=torch.Generator().manual_seed(3))]
    ]
    assert np.array_equal(*drawn)
    with pytest.raises(ValueError, match="class"):
        opened.new_state(2, class_labels=torch.tensor([0, 9]))
