"""One seed, one text: by `tarnn.load`, by the command, and by a server, of a model of each kind."""

import pytest
from support.http_server import http_server
from support.open_folders import CONFIGS_OF_5_24, make_folder
from support.rwkv_models import save_rwkv
from support.served import save_served

import tarnn
from tarnn.cli.main import main
from tarnn.serving.model import open_served

OURS = ["linear", "hybrid"]
FAMILIES = ["Llama", "Qwen3.5", "Mamba-2", "LFM2"]
WAYS = [{"temperature": 0}, {"temperature": 0.8, "top_p": 0.9}, {"temperature": 1.3, "top_k": 20, "min_p": 0.02}]
PENALTY = {"temperature": 0.8, "repetition_penalty": 1.5}


@pytest.fixture(scope="module", params=[*OURS, *FAMILIES, "RWKV-7"])
def folder(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("folders") / "tiny"
    if request.param == "RWKV-7":
        return save_rwkv(folder, "fla")
    save_served(folder, request.param)
    return folder


@pytest.fixture(scope="module")
def server(folder):
    with http_server({"tiny": open_served(folder)}) as server:
        yield server


@pytest.mark.parametrize("way", [*WAYS, PENALTY], ids=lambda x: " ".join(x))
def test_the_same_seed_is_the_same_text(folder, server, capsys, way):
    prompt, seed, most = "Call me Ishmael", 7, 30
    text = "".join(tarnn.load(folder).generate(prompt, max_new_tokens=most, seed=seed, **way))
    options = [f"--{name.replace('_', '-')}={x}" for name, x in way.items()]
    line = ["generate", str(folder), "--prompt", prompt, "--max-new-tokens", str(most), "--seed", str(seed), *options]
    assert (main([*line, "--quiet"]), capsys.readouterr().out) == (0, text)
    served = server.post("/v1/completions", {"prompt": prompt, "seed": seed, "max_tokens": most, **way}).json()
    assert served["choices"][0]["text"] == text
    other = "".join(tarnn.load(folder).generate(prompt, max_new_tokens=most, seed=seed + 1, **way))
    assert (other == text) == (way["temperature"] == 0)


def test_samples_are_the_choices_of_a_request(folder, server, capsys):
    way = {"temperature": 0.8, "top_p": 0.9}
    line = ["generate", str(folder), "--prompt", "Call", "--seed", "3", "--temperature", "0.8", "--top-p", "0.9"]
    assert main([*line, "--max-new-tokens", "9", "--num-samples", "3", "--quiet"]) == 0
    said = capsys.readouterr().out
    served = server.post("/v1/completions", {"prompt": "Call", "seed": 3, "max_tokens": 9, "n": 3, **way}).json()
    texts = [x["text"] for x in sorted(served["choices"], key=lambda x: x["index"])]
    assert said == "".join(f"--- sample {i + 1} ---\n{text}\n" for i, text in enumerate(texts))
    assert len(set(texts)) == 3


def test_a_text_goes_on_from_a_state_as_the_command_goes_on(folder, capsys, tmp_path):
    """A penalty looks at the last tokens before the state, by both."""
    lm = tarnn.load(folder)
    state = lm.read("aaaa")
    lm.save(state, tmp_path / "s")
    text = "".join(lm.generate("b", state=state, max_new_tokens=20, seed=1, **PENALTY))
    line = ["generate", str(folder), "--prompt", "b", "--state-in", str(tmp_path / "s"), "--max-new-tokens", "20"]
    options = ["--seed", "1", "--temperature", "0.8", "--repetition-penalty", "1.5", "--quiet"]
    assert (main([*line, *options]), capsys.readouterr().out) == (0, text)


@pytest.mark.skipif(not CONFIGS_OF_5_24, reason="transformers has no LFM3 before 5.24")
def test_of_lfm3(tmp_path, capsys):
    """By `tarnn.load` and by the command, which run without compiled kernels too."""
    folder = make_folder(tmp_path / "tiny", "LFM3")
    text = "".join(tarnn.load(folder).generate("Call me", max_new_tokens=20, seed=7, temperature=0.8, top_p=0.9))
    line = ["generate", str(folder), "--prompt", "Call me", "--max-new-tokens", "20", "--seed", "7"]
    assert main([*line, "--temperature", "0.8", "--top-p", "0.9", "--quiet"]) == 0
    assert capsys.readouterr().out == text
