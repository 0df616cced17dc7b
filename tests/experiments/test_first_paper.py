"""The experiments of the first paper: what the scripts write, and that they measure what they say."""

import gzip
import importlib
import struct
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from support.scripts import lines_of

from tarnn.ops import softmax_attention


def module(name):
    return importlib.import_module(name)


def test_what_is_to_be_copied():
    copy_task = module("copy_task")
    ids, labels = copy_task.draw(torch.Generator().manual_seed(0), 5, 7)
    assert ids.shape == labels.shape == (5, 16)
    assert torch.equal(ids[:, 1:8], ids[:, 9:])
    assert (ids[:, [0, 8]] == copy_task.SEPARATOR).all()
    assert (ids[:, 1:8].min(), ids[:, 1:8].max()) == (1, 10)
    assert (labels[:, :9] == -100).all()
    assert torch.equal(labels[:, 9:], ids[:, 9:])


def test_a_model_that_copies_is_seen_to_copy():
    copy_task = module("copy_task")
    curve, held_out = copy_task.Curve(), copy_task.draw(torch.Generator().manual_seed(0), 3, 4)

    class Copies(torch.nn.Module):
        def forward(self, input_ids, labels, use_cache):
            logits = torch.nn.functional.one_hot(input_ids.roll(-1, 1), 11).float()
            logits[:, 5] = 0  # all but the first copied symbol, which it takes for a separator
            return SimpleNamespace(logits=logits, loss=torch.tensor(0.5))

    copy_task.look(Copies(), held_out, curve, 3, [1.0, 2.0], 0.25)
    assert (curve.accuracy, curve.loss, curve.training_loss, curve.update) == ([0.75], [0.5], [1.5], [3])


TINY = {
    "updates": 6,
    "drop_at": 4,
    "every": 2,
    "length": 8,
    "hidden": 16,
    "layers": 1,
    "batch_size": 4,
    "heads": 4,
    "seed": 0,
    "save_every": 3,
}


def test_a_copy_run_that_was_stopped_goes_on(tmp_path):
    copy_task = module("copy_task")

    def trained(folder, updates):
        training = copy_task.Training("linear", SimpleNamespace(**TINY | {"updates": updates}, runs=folder))
        training.run(keep=lambda: None)
        return training

    def stop():
        raise KeyboardInterrupt

    def numbers(training):
        return training.curve.update, training.curve.loss, training.curve.training_loss

    whole = trained(tmp_path / "whole", 6)
    with pytest.raises(KeyboardInterrupt):
        copy_task.Training("linear", SimpleNamespace(**TINY, runs=tmp_path / "cut")).run(stop)
    assert numbers(trained(tmp_path / "cut", 6)) == numbers(whole)
    with pytest.raises(Exception, match="take another --runs"):
        copy_task.Training("linear", SimpleNamespace(**TINY | {"length": 10}, runs=tmp_path / "cut"))


def test_the_copy_task(script, data_of, pictures, folder):
    tiny = ("--updates", 30, "--drop-at", 20, "--every", 10, "--length", 8, "--hidden", 16, "--layers", 1)
    code, out, _ = script("copy_task", "--quick", *tiny, "--batch-size", 4, "--heads", 4, "--runs", folder / "runs")
    assert code == 0
    data = data_of("copy_task")
    assert set(data["results"]) >= {"softmax", "linear"}
    for curve in data["results"].values():
        assert curve["update"] == [0, 10, 20, 30]
        assert curve["loss"][-1] < curve["loss"][0]
    assert data["settings"]["updates"] == 30
    assert "updates  30" in out
    [axes] = pictures["copy_task.png"].axes
    assert lines_of(axes) == {method: (x["update"], x["loss"]) for method, x in data["results"].items()}
    assert axes.get_yscale() == "log"


@torch.no_grad()
def test_softmax_with_its_matrix_is_softmax():
    time_memory = module("time_memory")
    layer = time_memory.MatrixAttention(12, 3, causal=True).double()
    x = torch.randn(2, 7, 12, dtype=torch.float64)
    q, k, v = (layer.heads(f(x), 3) for f in (layer.q_proj, layer.k_proj, layer.v_proj))
    torch.testing.assert_close(layer(x), layer.merge(softmax_attention(q, k, v, causal=True), v.dtype))


def test_slopes_are_exponents():
    time_memory = module("time_memory")
    lengths = [512, 1024, 2048, 4096]
    assert time_memory.slope(lengths, [3e-4 * t**1.7 for t in lengths]) == pytest.approx(1.7)
    assert time_memory.slope(lengths[:1], [1.0]) is None
    assert time_memory.slope(lengths, [1.0, None, 2.0, 3.0]) is None
    points = [time_memory.Cost(t, 1, t if t < 1000 else t**2, 0, 0, float(t)) for t in lengths]
    fitted = time_memory.slopes_of(points)
    assert (fitted["time"], fitted["memory"]) == (pytest.approx(2), pytest.approx(1))
    assert (fitted["from"], fitted["to"]) == (1024, 4096)


def test_what_would_take_too_long_or_too_much_is_left_out():
    time_memory = module("time_memory")
    options = SimpleNamespace(tokens=4096, patience=10.0, room=1.0)
    last = time_memory.Cost(1024, 4, 1000.0, 0, 0, 2.0**28)
    assert time_memory.too_much(last, 4096, "linear", options) == ""
    assert time_memory.too_much(last, 4096, "softmax, fused", options) == "about 16 s a step"
    assert time_memory.too_much(last, 2048, "softmax, matrix", options) == "about 2 GiB a step"
    assert time_memory.too_much(last, 2048, "softmax, fused", options) == ""


def test_time_and_memory(script, data_of, pictures, folder):
    tiny = ("--lengths", 16, 32, 64, "--tokens", 64, "--hidden", 16, "--heads", 2, "--rounds", 1)
    code, *_ = script("time_memory", "--quick", *tiny)
    assert code == 0
    data = data_of("time_memory")
    for method in ("softmax, matrix", "softmax, fused", "linear"):
        assert [(p["length"], p["batch_size"]) for p in data["results"][method]] == [(16, 4), (32, 2), (64, 1)]
        assert data["slopes"][method]["time"] is not None
    assert "| slope |" in (folder / "time_memory.md").read_text()
    times, sizes = map(lines_of, pictures["time_memory.png"].axes)
    for method, points in data["results"].items():
        assert times[method] == ([16, 32, 64], [p["ms"] for p in points])
        assert all(method in sizes for p in points if p["bytes"])


def test_a_parabola_is_summed_over_every_position():
    image_speed = module("image_speed")
    for a, b, c in ((3.0, 0.0, 0.0), (2.0, 0.01, 0.0), (1.0, 0.2, 0.03)):
        cost = lambda p, a=a, b=b, c=c: a + b * p + c * p * p  # noqa: E731
        positions = [0, 196, 392, 588, 783]
        expected = sum(cost(p) for p in range(784))
        found = image_speed.summed(positions, [cost(p) for p in positions], 784)
        assert found == pytest.approx(expected, rel=1e-7)
    assert image_speed.summed([0, 9], [1.0, 10.0], 10) == pytest.approx(55)
    assert image_speed.summed([5], [2.0], 10) == pytest.approx(20)


def test_targets_are_judged():
    image_speed = module("image_speed")

    def speed(seconds, batch):
        return image_speed.Speed(batch, 1, seconds, [], [], [])

    found = {
        "softmax, recomputed": {"one": speed(80.0, 1), "best": speed(40.0, 1)},
        "softmax, KV cache": {"one": speed(8.0, 1), "best": speed(16.0, 32)},
        "linear": {"one": speed(1.4, 1), "best": speed(14.0, 128)},
    }
    judged = image_speed.judge("mnist", found)
    assert [x["reached"] for x in judged.values()] == pytest.approx([1.4, 128 / 14, 64 / 14, 128 / 14 * 40])
    assert [x["met"] for x in judged.values()] == [True, False, True, True]
    assert image_speed.judge("mnist", {"linear": found["linear"]}) == {}
    found["linear, int8 weights"] = {"one": speed(1.5, 1), "best": speed(7.0, 128)}
    assert image_speed.judge("mnist", found) == judged  # not known to keep the likelihood
    both = image_speed.judge("mnist", found, kept=True)
    assert [x["reached"] for x in both.values()] == pytest.approx([1.4, 128 / 7, 128 / 14, 128 / 7 * 40])
    assert [x["by"] for x in both.values()] == ["linear", *["linear, int8 weights"] * 3]
    assert image_speed.judge("cifar10", found)["images a second"]["met"] is None


@torch.no_grad()
@pytest.mark.parametrize("method", ["softmax, recomputed", "softmax, KV cache", "linear"])
def test_a_step_of_the_measurement_is_a_step_of_the_model(method, monkeypatch):
    """At a position p each method reads p earlier values and puts out one distribution an image."""
    image_speed = module("image_speed")
    model = image_speed.build("mnist", method, quick=True)
    seen = []
    head = model.head.forward
    monkeypatch.setattr(model.head, "forward", lambda x: seen.append(x.shape) or head(x))
    drawn = []
    monkeypatch.setattr(
        image_speed,
        "pixel_sampler",
        lambda *_, **__: lambda p: drawn.append(p.shape) or torch.zeros(len(p), dtype=torch.long),
    )
    make = image_speed.prefixes if method == "softmax, recomputed" else image_speed.states  # here, the model's own step
    before = []
    embed = model.embed
    monkeypatch.setattr(
        model, "embed", lambda ids, places, c: before.append((ids.shape, int(places.max()))) or embed(ids, places, c)
    )
    step = make(model, 3)(17)
    step()
    step()
    assert seen == [(3, 32)] * 2
    assert drawn == [(3, 30)] * 2
    assert before == [((3, 18 if method == "softmax, recomputed" else 1), 17)] * 2


def test_image_speed(script, data_of, tmp_path):
    code, out, _ = script("image_speed", "--quick", "--batches", 1, 2, "--seconds", 0.01, "--positions", 2)
    assert code == 0
    data = data_of("image_speed")
    assert data["likelihood"] is None
    for found in data["results"]["mnist"].values():
        assert found["one"]["batch_size"] == 1
        assert found["one"]["positions"] == [0, 783]
        assert found["one"]["seconds"] > 0
    assert data["targets"]["mnist"]["times the KV cache"]["target"] == 4
    assert "| linear |" in out


def test_runs_are_compared_at_equal_updates_and_at_equal_time():
    image_bits = module("image_bits")

    def run(seconds, *points):
        curve = [dict(zip(("update", "bits"), p)) for p in points]
        return {"curve": curve, "updates": points[-1][0], "seconds_an_update": seconds}

    linear = run(0.1, (10, 3.0), (20, 2.0), (30, 1.5), (40, 1.0))
    found = image_bits.compare({"linear": linear, "softmax": run(0.2, (10, 2.9), (20, 1.9), (30, 1.4))})
    assert [found[m]["at_updates"] for m in found] == [30, 30]
    assert [found[m]["bits_at_updates"] for m in found] == [1.5, 1.4]
    assert [found[m]["at_seconds"] for m in found] == pytest.approx([4, 4])
    assert [found[m]["bits_at_seconds"] for m in found] == [1.0, 1.9]


@pytest.fixture
def mnist(tmp_path):
    """MNIST's files, with a few noisy images of 8 × 8."""
    folder = tmp_path / "mnist"
    folder.mkdir()
    for part, n in (("train", 40), ("t10k", 6)):
        pixels = np.random.default_rng(n).integers(100, 110, (n, 8, 8), dtype=np.uint8)
        data = struct.pack(">BBBB3I", 0, 0, 8, 3, *pixels.shape) + pixels.tobytes()
        (folder / f"{part}-images-idx3-ubyte.gz").write_bytes(gzip.compress(data))
    return folder


def test_image_bits(script, data_of, pictures, tmp_path, mnist):
    options = ("--quick", "--mnist", mnist, "--runs", tmp_path / "runs", "--test-images", 5, "--batch-size", 2)
    code, *_ = script("image_bits", *options)
    assert code == 0
    data = data_of("image_bits")
    for run in data["results"]["mnist"].values():
        assert [point["update"] for point in run["curve"]] == [5, 10]
        assert 0 < run["test_bits"] < 10
        assert (run["test_images"], run["updates"], run["images"]) == (5, 10, 20)
        assert 0 < run["seconds_an_update"] < 5
    [axes] = pictures["image_bits.png"].axes
    assert axes.get_title() == "mnist"
    for method, (_, bits) in lines_of(axes).items():
        assert bits == [point["bits"] for point in data["results"]["mnist"][method]["curve"]]
    assert len(np.load(tmp_path / "runs" / "mnist-data" / "valid.npz")["images"]) == 4

    logs = [tmp_path / "runs" / f"mnist-{method}" / "log.jsonl" for method in ("linear", "softmax")]
    before = [log.read_text() for log in logs]
    assert script("image_bits", *options)[0] == 0
    assert [log.read_text() for log in logs] == before
    assert script("image_bits", *options, "--updates", 15)[0] == 0
    assert all(log.read_text().startswith(old) and '"step": 15' in log.read_text() for log, old in zip(logs, before))
