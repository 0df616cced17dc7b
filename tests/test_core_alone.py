"""With the core dependencies alone: the ops, the step and the layers run; what needs an extra names the line that installs it.

Each test is a process of its own, in which no other package can be imported.
"""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tarnn.extras import PACKAGES

PROJECT = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]
CORE_ALONE = f"""
import sys

class Absent:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name.partition(".")[0] in {sorted(PACKAGES)}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Absent)
"""


def run(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", CORE_ALONE + code], capture_output=True, text=True, timeout=600)


def names(requirements: list[str]) -> set[str]:
    return {re.split(r"[\[<>=!~;]", line)[0] for line in requirements}


def test_the_core_is_small():
    assert names(PROJECT["dependencies"]) == {"torch", "numpy", "safetensors", "jaxtyping", "typer", "rich"}


def test_every_package_is_in_the_extra_that_the_error_names():
    extras = PROJECT["optional-dependencies"]
    for package, extra in PACKAGES.values():
        assert package in names(extras[extra]) or package == "huggingface_hub", package  # which transformers brings
        assert package not in names(PROJECT["dependencies"])
    assert extras["all"] == ["tarnn[hf,train,images,lora,serve]"]


def test_ops_step_and_layers():
    done = run("""
import torch, tarnn
from tarnn.ops import random_feature_softmax

q, k, v = (torch.randn(2, 3, 9, 8, dtype=torch.float64, requires_grad=True) for _ in range(3))
for phi in (tarnn.Elu(), tarnn.PositiveRandomFeatures(8, 16, seed=0).double()):
    o = tarnn.linear_attention(q, k, v, phi, causal=True)
    assert all(x.isfinite().all() for x in torch.autograd.grad(o.sum(), (q, k, v)))
    _, state = tarnn.linear_attention(q[:, :, :-1], k[:, :, :-1], v[:, :, :-1], phi, causal=True, return_state=True)
    last, _ = tarnn.step(q[:, :, -1:], k[:, :, -1:], v[:, :, -1:], phi, state=state)
    assert (last - o[:, :, -1:]).abs().max() < 1e-10
assert tarnn.softmax_attention(q, k, v, causal=True).shape == tarnn.hybrid_attention(q, k, v, window=4, causal=True).shape
for layer in (tarnn.LinearAttention(16, 2, causal=True), tarnn.SoftmaxAttention(16, 2, causal=True)):
    x = torch.randn(2, 5, 16)
    y, state = layer.step(x[:, :1], layer.new_state(2, capacity=5))
    assert (layer(x)[:, :1] - y).abs().max() < 1e-5
""")
    assert done.returncode == 0, done.stderr


def test_a_model_runs_as_an_rnn():
    done = run("""
import torch
from tarnn.decoding.loop import TokenLoop
from tarnn.decoding.samplers import sampler
from tarnn.models.backbone import TextModel
from tarnn.models.config import ModelConfig

torch.manual_seed(0)
sizes = dict(vocab_size=31, hidden_size=16, num_hidden_layers=2, num_attention_heads=2)
model = TextModel(ModelConfig(**sizes, attention=["linear", "softmax"])).eval()
ids = torch.randint(31, (1, 7))
loop = TokenLoop(model, model.new_state(1, capacity=10))
loop.read(ids[:, :-1])
with torch.no_grad():
    stepped, _ = model.step(ids[:, -1], loop.state)
loop.read(ids[:, -1:])
assert (stepped - loop.logits).abs().max() < 1e-5
assert len(list(loop.tokens(sampler(temperature=0), 3))) == 3
""")
    assert done.returncode == 0, done.stderr


def test_models_of_transformers_name_their_extra():
    done = run("""
import tarnn
try:
    from tarnn import TarnnForCausalLM
except ImportError as error:
    print(type(error).__name__, error)
try:
    import tarnn.conversion
except ImportError as error:
    print(error)
""")
    assert done.stdout.splitlines() == [
        "MissingPackageError tarnn.huggingface needs transformers: pip install 'tarnn[hf]'.",
        "tarnn.conversion needs transformers: pip install 'tarnn[hf]'.",
    ], done.stderr


COMMANDS = {
    "--help": [],
    "--version": [],
    "info": [],
    "train": ["text", "--out", "run"],
    "generate": ["run"],
    "serve": ["run"],
    "convert": ["model", "converted", "--texts", "text"],
    "finetune": ["model", "text", "--out", "tuned"],
    "predict": ["run", "text"],
    "eval": ["run", "text"],
    "transcribe": ["run", "a.wav"],
    "show": ["run", "--input", "text", "--out", "page"],
    "demo": ["--out", "run"],
}


def test_commands_run_or_name_their_extra(tmp_path):
    calls = [*([name, *rest] for name, rest in COMMANDS.items()), ["info", "run"]]
    (tmp_path / "run").mkdir()
    done = run(f"""
import os
from tarnn.cli.main import main
os.chdir({str(tmp_path)!r})
for call in {calls!r}:
    print("CALL", *call[:1], main(call), flush=True)
""")
    assert done.returncode == 0, done.stderr
    codes = [line.split()[1:] for line in done.stdout.splitlines() if line.startswith("CALL")]
    free = ("--help", "--version", "info")
    assert codes == [[call[0], "0" if call[0] in free and len(call) == 1 else "2"] for call in calls]
    assert "tarnn 0." in done.stdout
    sentences = done.stderr.splitlines()
    assert len(sentences) == len(calls) - len(free), sentences
    told = [line for line in sentences if "run holds no checkpoint: it has no config.json" in line]
    assert len(told) == 3, sentences  # generate, eval and info need no extra to see that
    for line in sentences:
        extra = re.fullmatch(r"tarnn: error: .* needs \w+: pip install 'tarnn\[\w+\]'\.", line)
        assert extra or line in told, line


@pytest.mark.parametrize("name", sorted(PROJECT["optional-dependencies"]))
def test_extras_of_today_and_before(name):
    assert name in {"hf", "train", "images", "all", "lora", "onnx", "serve", "gpu", "datasets", "docs", "dev"}
