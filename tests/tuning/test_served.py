"""`tarnn serve --adapter NAME=FOLDER`: each name answers as `tarnn.load` with that adapter writes."""

import json

import httpx
import pytest
import torch
from safetensors.torch import save_file
from support.live_server import running

import tarnn as package
from tarnn.families.adapter import CONFIG, WEIGHTS
from tarnn.serving.http import server

ASK = {"prompt": "red", "max_tokens": 12, "temperature": 0}


@pytest.fixture
def adapters(tmp_path):
    """Two adapters that nobody trained."""
    folders = {}
    for seed, name in enumerate(("cats", "dogs")):
        folders[name] = tmp_path / name
        folders[name].mkdir()
        torch.manual_seed(seed)
        module = "base_model.model.model.layers.1.mlp.down_proj.lora_"
        factors = {f"{module}A.weight": torch.randn(2, 48), f"{module}B.weight": torch.randn(32, 2)}
        save_file(factors, folders[name] / WEIGHTS)
        (folders[name] / CONFIG).write_text(json.dumps({"peft_type": "LORA", "r": 2, "lora_alpha": 4}))
    return folders


@pytest.mark.parametrize("weights", ["float32", "int8"])
def test_adapters_side_by_side(tarnn, folder_of, adapters, monkeypatch, weights):
    folder, answers, listed = folder_of("Qwen3.5"), {}, []

    def ask(self, **_):
        with running(self.app) as address, httpx.Client(base_url=f"{address}/v1", timeout=60) as http:
            listed.extend(x["id"] for x in http.get("/models").json()["data"])
            for name in listed:
                answer = http.post("/completions", json={**ASK, "model": name})
                answers[name] = answer.json()["choices"][0]["text"]

    monkeypatch.setattr(server.Server, "run", ask)
    named = [x for name, path in adapters.items() for x in ("--adapter", f"{name}={path}")]
    code, _, err = tarnn("serve", folder, "--weights", weights, "--port", 0, *named)
    assert code == 0, err
    assert listed == [folder.name, "cats", "dogs"]
    for name, answer in answers.items():
        lm = package.load(folder, weights, adapter=adapters.get(name))
        assert "".join(lm.generate("red", max_new_tokens=12, temperature=0)) == answer
    assert len({*answers.values()}) == 3
