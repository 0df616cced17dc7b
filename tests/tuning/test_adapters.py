"""Adapters: the loss falls, each of them learns, merged they compute what peft does, a killed run goes on bit for bit."""

import gc
import json
import os
import re
import subprocess
import sys
from unittest.mock import Mock
from weakref import ref

import pytest
import torch
import transformers as hf
from safetensors.torch import load_file, save_file
from support.open_folders import EVERY
from support.tuning_examples import losses

import tarnn as package
from tarnn.data.tokenizers import byte_tokenizer
from tarnn.errors import UserError
from tarnn.families.adapter import BASE, CONFIG, WEIGHTS
from tarnn.families.weights import Weights
from tarnn.huggingface.head_loss import Unread
from tarnn.log import silent
from tarnn.tuning.run import open_to_tune
from tarnn.tuning.task import TuneSettings

pytestmark = pytest.mark.filterwarnings("ignore")
OFTEN = ("Qwen3.5", "Mamba-2", "Kimi-Linear-48B-A3B", "Zamba2-1.2B")
FAMILIES = [pytest.param(x, marks=() if x in OFTEN else pytest.mark.slow) for x in EVERY]
SMALL = ["--lora", "3", "--length", "48", "--learning-rate", "1e-2", "--eval-every", "4", "--save-every", "4"]
SOFTMAX = {"Llama", "Mistral", "Qwen2", "Qwen3"}
IDS = torch.randint(0, 256, (2, 30), generator=torch.Generator().manual_seed(2))


def with_peft(folder, adapter):
    from peft import PeftModel

    model = hf.AutoModelForCausalLM.from_pretrained(folder)
    model.set_experts_implementation("eager")  # of any size
    return PeftModel.from_pretrained(model, adapter).eval()


@pytest.mark.parametrize("family", FAMILIES)
def test_the_loss_falls_and_merged_equals_unmerged(tarnn, folder_of, chats, tmp_path, family):
    folder, out = folder_of(family), tmp_path / "out"
    code, shown, err = tarnn("finetune", folder, chats, "--out", out, *SMALL, "--steps", 24)
    assert code == 0, err
    assert f"tarnn generate {folder} --adapter {out}" in shown
    assert err.count("its backward is torch's own") == (family in SOFTMAX)
    values = losses(out)
    assert values[-1] < 0.95 * values[0]
    tensors = load_file(out / WEIGHTS)
    assert all(x.any() for name, x in tensors.items() if "lora_B" in name)  # each began at 0, and learned
    assert (out / "last" / CONFIG).is_file()
    with torch.no_grad():
        unmerged = with_peft(folder, out)(input_ids=IDS, use_cache=False).logits
    merged = package.load(folder, adapter=out)
    assert any("with the adapter" in line for line in merged.opened.about)
    assert (merged.logits(IDS) - unmerged).abs().max() < 1e-5 * unmerged.abs().max()
    plain = package.load(folder)
    assert (merged.logits(IDS) - plain.logits(IDS)).abs().max() > 1e-2
    assert merged.opened.fingerprint != plain.opened.fingerprint


def test_rounded_weights_take_it_too(tarnn, folder_of, chats, tmp_path):
    folder, out = folder_of("Qwen3.5"), tmp_path / "out"
    assert tarnn("finetune", folder, chats, "--out", out, *SMALL, "--steps", 4)[0] == 0
    exact = package.load(folder, adapter=out).logits(IDS)
    rounded = package.load(folder, "int8", adapter=out).logits(IDS)
    assert 0 < (exact - rounded).abs().mean() < 0.1 * exact.abs().mean()
    assert tarnn("pack", folder, tmp_path / "both.tarnn", "--weights", "int8", "--adapter", out)[0] == 0
    assert torch.equal(package.load(tmp_path / "both.tarnn").logits(IDS), rounded)
    code, text, err = tarnn("generate", folder, "--adapter", out, "--prompt", "red", "--max-new-tokens", 5, "--greedy")
    assert (code, "with the adapter" in err) == (0, True)
    assert text


@pytest.mark.parametrize("weights", ["int8", "bfloat16"])
def test_a_merged_model_keeps_no_sums_beside_its_packed_weights(tarnn, folder_of, chats, tmp_path, weights):
    folder, out = folder_of("Qwen3.5"), tmp_path / "out"
    assert tarnn("finetune", folder, chats, "--out", out, *SMALL, "--steps", 1)[0] == 0
    sums = []
    with pytest.MonkeyPatch.context() as patched:
        add = Weights.changed

        def noted(self, names, change):
            def noting(name, x):
                sums.append(ref((total := change(name, x)).untyped_storage()))
                return total

            return add(self, names, noting)

        patched.setattr(Weights, "changed", noted)
        lm = package.load(folder, weights, adapter=out)
    gc.collect()
    assert sums
    assert not any(x() for x in sums)
    assert lm.logits(IDS).isfinite().all()


@pytest.mark.parametrize("kind", ["adapters", pytest.param("all weights", marks=pytest.mark.slow)])
def test_a_killed_run_goes_on_bit_for_bit(run_alone, folder_of, chats, tmp_path, kind):
    folder, whole, cut = folder_of("Qwen3.5"), tmp_path / "whole", tmp_path / "cut"
    options = [*(SMALL if kind == "adapters" else ["--full", *SMALL[2:]]), "--steps", "12"]
    files = (WEIGHTS, f"last/{WEIGHTS}") if kind == "adapters" else ("model.safetensors",)
    assert run_alone("finetune", folder, chats, "--out", whole, *options) == 0
    assert run_alone("finetune", folder, chats, "--out", cut, *options, moment="in a step", at=6) == -9
    assert not (cut / "last").exists()
    assert run_alone("finetune", folder, chats, "--out", cut, *options, "--resume") == 0
    for name in files:
        one, other = load_file(whole / name), load_file(cut / name)
        assert one.keys() == other.keys()
        assert all(torch.equal(x, other[key]) for key, x in one.items())
    assert losses(whole) == losses(cut)


@pytest.mark.parametrize("family", sorted(SOFTMAX))
def test_softmax_models_make_no_logits_for_the_loss(folder_of, family):
    plain = hf.AutoModelForCausalLM.from_pretrained(folder_of(family)).train()
    model = open_to_tune(folder_of(family), TuneSettings(sources=("",), out=folder_of(family)), silent).train()
    ours, theirs = (x(input_ids=IDS, labels=IDS) for x in (model, plain))
    assert type(vars(ours)["logits"]) is Unread
    assert torch.allclose(ours.loss, theirs.loss, rtol=1e-5)
    assert torch.allclose(ours.logits, theirs.logits, atol=1e-5)


def test_all_weights(tarnn, folder_of, chats, tmp_path):
    folder, out = folder_of("Qwen3.5"), tmp_path / "out"
    options = ["--full", "--length", "48", "--learning-rate", "3e-3", "--steps", "24"]
    code, shown, err = tarnn("finetune", folder, chats, "--out", out, *options)
    assert code == 0, err
    assert f"tarnn generate {out}" in shown
    assert losses(out)[-1] < 0.9 * losses(out)[0]
    code, _, err = tarnn("generate", out, "--prompt", "red", "--max-new-tokens", 5, "--greedy")
    assert code == 0, err


@pytest.fixture
def adapter(tmp_path, folder_of):
    """An adapter that nobody trained, on the first layer's gate."""
    out = tmp_path / "adapter"
    out.mkdir()
    (out / CONFIG).write_text(json.dumps({"peft_type": "LORA", "r": 2, "lora_alpha": 4}))
    torch.manual_seed(0)
    name = "base_model.model.model.layers.0.mlp.gate_proj.lora_"
    save_file({f"{name}A.weight": torch.randn(2, 32), f"{name}B.weight": torch.randn(48, 2)}, out / WEIGHTS)
    return out


@pytest.mark.parametrize(("fields", "words"), [
    ({"peft_type": "IA3"}, "of type 'IA3'; expected LORA"),
    ({"use_dora": True}, "use_dora is True"),
    ({"modules_to_save": ["lm_head"]}, "modules_to_save is"),
    ({"lora_alpha": "much"}, "lora_alpha must be a number"),
    ({"alpha_pattern": {"(a+)+$": 1}}, "alpha_pattern must give"),
])  # fmt: skip
def test_adapters_that_are_not_added(folder_of, adapter, fields, words):
    path = adapter / CONFIG
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))
    with pytest.raises(UserError) as error:
        package.load(folder_of("Qwen3.5"), adapter=adapter)
    assert words in str(error.value)


def test_alphas(folder_of, adapter):
    folder, path = folder_of("Qwen3.5"), adapter / CONFIG
    plain, once = package.load(folder).logits(IDS), package.load(folder, adapter=adapter).logits(IDS)
    assert (plain - once).abs().max() > 1e-2
    fields = json.loads(path.read_text())
    path.write_text(json.dumps(fields | {"lora_alpha": 1, "alpha_pattern": {"gate_proj": 4}}))
    assert torch.equal(package.load(folder, adapter=adapter).logits(IDS), once)
    path.write_text(json.dumps(fields | {"lora_alpha": 4 / 2**0.5, "use_rslora": True}))
    assert torch.allclose(package.load(folder, adapter=adapter).logits(IDS), once, atol=1e-4)


def test_an_adapter_of_another_base(folder_of, adapter):
    folder = folder_of("Qwen3.5")
    name = "base_model.model.model.layers.0.mlp.gate_proj.lora_"
    with pytest.raises(UserError, match=r"adapts model.layers.0.mlp.gate_proj, which .* does not have"):
        package.load(folder_of("Mamba-2"), adapter=adapter)
    (adapter / BASE).write_text(json.dumps({"fingerprint": "0" * 64}))
    with pytest.raises(UserError, match="is an adapter of other weights than those of"):
        package.load(folder, adapter=adapter)
    (adapter / BASE).unlink()
    save_file({f"{name}A.weight": torch.randn(2, 31), f"{name}B.weight": torch.randn(48, 2)}, adapter / WEIGHTS)
    with pytest.raises(UserError, match=r"of shape \(48, 31\), which has shape \(48, 32\)"):
        package.load(folder, adapter=adapter)
    save_file({f"{name}A.weight": torch.randn(2, 32)}, adapter / WEIGHTS)
    with pytest.raises(UserError, match="expected pairs of lora_A"):
        package.load(folder, adapter=adapter)
    with pytest.raises(UserError, match="holds no adapter"):
        package.load(folder, adapter=folder)


def test_more_memory_than_there_is(tarnn, folder_of, chats, tmp_path, monkeypatch):
    monkeypatch.setattr("tarnn.tuning.memory.available_bytes", lambda: 1000)
    code, _, err = tarnn("finetune", folder_of("Qwen3.5"), chats, "--out", tmp_path / "out", *SMALL, "--steps", 1)
    assert (code, "this run would take" in err, "choose a smaller --length" in err) == (2, True, True)
    assert not any((tmp_path / "out").glob("**/*.safetensors"))


@pytest.mark.parametrize(("kind", "words"), [
    ("packed", "is a file; expected a folder of transformers. Give the one that it was packed from."),
    ("tarnn", "holds a model of tarnn's own; expected one of transformers. `tarnn train` trains it."),
    ("rwkv7", "holds RWKV-7, which transformers lacks, so it runs and can't be tuned. Take another family."),
])  # fmt: skip
@pytest.mark.parametrize("command", ["finetune", "tune-state"])
def test_what_runs_and_is_not_tuned(tarnn, chats, tmp_path, command, kind, words):
    model = tmp_path / "model"
    if kind == "packed":
        model.write_bytes(b"")
    else:
        model.mkdir()
        (model / "config.json").write_text(json.dumps({"model_type": kind}))
    code, _, err = tarnn(command, model, chats, "--out", tmp_path / "out")
    assert (code, err.splitlines()[-1]) == (2, f"tarnn: error: {model} {words}")


def test_packed_rows_take_layers_that_begin_anew(tarnn, folder_of, chats, tmp_path, monkeypatch):
    differs = Mock(side_effect=ValueError("this transformers differs."))
    monkeypatch.setattr("tarnn.conversion.opening.patch_transformers", differs)
    line = ("finetune", folder_of("Qwen3.5"), chats, "--out", tmp_path / "out", *SMALL, "--steps", 1)
    code, _, err = tarnn(*line)
    assert (code, "differs. Without tarnn's layers packed rows would leak" in err) == (2, True)
    code, _, err = tarnn(*line, "--no-packing")
    assert (code, "this transformers differs." in err) == (0, True)


def test_bad_input(tarnn, folder_of, chats, tmp_path):
    def refused(*options, data=chats, folder="Qwen3.5"):
        code, _, err = tarnn("finetune", folder_of(folder), data, "--out", tmp_path / "out", *options)
        assert code == 2, err
        return err.splitlines()[-1]

    assert "give one of them" in refused("--full", "--lora", 2)
    assert "no linear layer of this Qwen3_5ForCausalLM is wider" in refused("--lora", 4000)
    assert "--train is for --against-softmax" in refused("--train", "maps")
    assert "longer than this model's context" in refused("--length", 10**6)
    (tmp_path / "table.csv").write_text("question,answer\na,b\n")
    assert "has the columns 'question', 'answer'; expected messages, or prompt" in refused(data=tmp_path / "table.csv")
    (tmp_path / "empty.jsonl").write_text('{"messages": [{"role": "user", "content": "a"}]}\n')
    assert "have no example with a token to learn" in refused(data=tmp_path / "empty.jsonl")
    assert tarnn("finetune", folder_of("Qwen3.5"), chats, "--out", tmp_path / "run", *SMALL, "--steps", 4)[0] == 0
    with chats.open("a") as file:
        file.write('{"text": "more"}\n')
    code, _, err = tarnn(
        "finetune", folder_of("Qwen3.5"), chats, "--out", tmp_path / "run", *SMALL, "--steps", 4, "--resume"
    )
    assert (code, "the data are no longer those that the run" in err) == (2, True)


@pytest.mark.slow
@pytest.mark.parametrize("checkpointing", ["--checkpointing", "--no-checkpointing"])
def test_memory_is_what_was_said(tmp_path, checkpointing):
    """Within a tenth, in a process of its own, on a model whose activations outweigh its weights."""
    sizes = {"hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 4, "vocab_size": 257}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 128, "eos_token_id": 256}
    hf.Qwen3_5ForCausalLM(hf.Qwen3_5TextConfig(**sizes, **heads, tie_word_embeddings=True)).save_pretrained(tmp_path)
    byte_tokenizer().save_pretrained(tmp_path)
    (tmp_path / "text.txt").write_text("the cat sat on the mat. " * 200)
    options = ["--lora", "4", "--length", "2048", "--steps", "2", "--val-fraction", "0", checkpointing]
    argv = ["finetune", str(tmp_path), str(tmp_path / "text.txt"), "--out", str(tmp_path / "out"), *options]
    code = f"""
import resource, sys
from tarnn.cli.main import main
assert main({argv!r}) == 0
print("peak", resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024, file=sys.stderr)
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"}
    )
    assert done.returncode == 0, done.stderr
    said = 1e9 * float(re.search(r"memory  ([\d.]+) GB", done.stderr)[1])
    taken = int(re.search(r"peak (\d+)", done.stderr)[1])
    assert abs(said / taken - 1) < 0.1, (said, taken)
