"""The scripts that measure on a GPU go through everything on a CPU too, so that a mistake shows before a GPU is there."""

import json

import gpu_attention
import gpu_clock
import gpu_decode
import gpu_session
import pytest

from tarnn.kernels.cpu import linear as cpu


@pytest.mark.parametrize(
    ("name", "columns"),
    [("gpu_attention", "| tarnn | plain PyTorch | SDPA |"), ("gpu_decode", "| linear attention | softmax")],
)
def test_a_dry_run_fills_each_cell(script, data_of, folder, name, columns):
    code, out, _ = script(name, "--dry-run", "--quick")
    assert code == 0
    (rows,) = data_of(name)["results"].values()
    assert rows
    assert all(x is not None for row in rows for x in row.values())
    page = (folder / f"{name}.md").read_text()
    assert "A dry run on a CPU" in page
    assert columns in page
    assert out.count("dry_run")


@pytest.mark.parametrize("name", ["gpu_attention", "gpu_decode"])
def test_without_a_gpu_the_page_says_so(script, folder, name, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert script(name, "--quick").code == 0
    assert "Not measured on a GPU" in (folder / f"{name}.md").read_text()


def test_the_baseline_of_plain_pytorch_goes_backward_in_plain_pytorch(monkeypatch):
    """The backend of a backward pass is chosen when it runs."""
    monkeypatch.setattr(cpu, "backward", lambda *_: pytest.fail("by the kernels"))
    assert gpu_attention.time_of(gpu_attention.PLAIN, "8×1024×8×64", "both", "cpu") > 0


def test_a_baseline_that_does_not_run_leaves_its_cell_empty(monkeypatch, capsys):
    def fail(*_):
        raise RuntimeError("another version of Triton")

    monkeypatch.setattr(gpu_attention, "methods", lambda: {"theirs": fail, gpu_attention.OURS: fail})
    assert gpu_attention.time_of("theirs", "8×1024×8×64", "forward", "cpu") is None
    assert "another version" in capsys.readouterr().err
    with pytest.raises(RuntimeError):
        gpu_attention.time_of(gpu_attention.OURS, "8×1024×8×64", "forward", "cpu")


def test_the_cache_of_the_softmax_model_has_room_for_all_calls(monkeypatch):
    monkeypatch.setattr(gpu_decode, "SHAPE", gpu_decode.SHAPE | {"hidden_size": 16, "num_hidden_layers": 1})
    step = gpu_decode.softmax_step(1, "cpu", 4)
    for _ in range(gpu_clock.WARM_UP + gpu_clock.ROUNDS):
        step()


def test_a_session_on_a_gpu_stops_each_step_in_time(tmp_path, monkeypatch, capsys):
    steps = {
        "right": (1.0, ["-c", "print(41 + 1)"]),
        "wrong": (1.0, ["-c", "print('before'); raise SystemExit(3)"]),
        "slow": (0.02, ["-c", "import time; time.sleep(60)"]),
    }
    monkeypatch.setattr(gpu_session, "STEPS", steps)
    monkeypatch.setattr("sys.argv", ["gpu_session.py", "--out", str(tmp_path)])
    assert gpu_session.main() == 1
    found = json.loads((tmp_path / "session.json").read_text())
    assert [x["ended"] for x in found.values()] == ["ok", "failed", "stopped"]
    assert "42" in (tmp_path / "right.log").read_text()
    assert (tmp_path / "slow.log").exists()
    assert "42" in capsys.readouterr().out


def test_what_a_session_runs_is_there(tmp_path):
    for step in gpu_session.STEPS:
        words = gpu_session.command(step, tmp_path)
        assert all((gpu_session.ROOT / x).exists() for x in words if x.startswith(("tests/", "benchmarks/")))
    source = (gpu_session.ROOT / gpu_session.LAWS).read_text()
    assert all(f"def test_{name}" in source for name in ("the_definition", "a_step_is_recorded_in_a_cuda_graph"))
