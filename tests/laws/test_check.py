"""`tarnn.check`: each law fails for a model that breaks it, and holds for those that keep it."""

import json

import pytest
import torch
from support.families import FAMILIES, model_of
from support.linear_families import linear_model
from support.open_folders import make_folder
from torch import nn

import tarnn
from tarnn.cli.main import main
from tarnn.huggingface.versions import as_called
from tarnn.kernels.cpu import library
from tarnn.laws import check as laws
from tarnn.laws.report import PASS, SKIPPED
from tarnn.laws.ways import LAWS
from tarnn.models import TarnnConfig, TarnnForCausalLM

PACKED = {"packed rows, by position_ids", "packed rows, by cu_seq_lens, seq_idx"}
SHORT = (9, 5, 3)
compiled = pytest.mark.skipif(not library.available(), reason="the compiled kernels are not here")


def failed(report):
    return {x.law for x in report.failed}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_folder(tmp_path_factory.mktemp("laws") / "tiny", "Qwen3.5")


class Wrong(nn.Module):
    """A Llama whose forward is wrong in one way."""

    def __init__(self, wrong):
        super().__init__()
        self.inner, self.wrong = model_of(FAMILIES["Llama"]), wrong
        self.config = self.inner.config

    def forward(self, input_ids, attention_mask=None, position_ids=None, cache=None, use_cache=None, **options):
        if self.wrong == "mask" and attention_mask is not None:
            attention_mask = torch.ones_like(attention_mask)
        if self.wrong == "packed" and not use_cache:
            position_ids = None
        more = {"attention_mask": attention_mask, "position_ids": position_ids, "use_cache": use_cache, **options}
        out = self.inner(input_ids, **as_called(self.inner.forward, cache), **more)
        x = out.logits
        if self.wrong == "batch" and len(x) > 1:
            x = x + 1e-3 * x.roll(1, 0)
        elif self.wrong == "cache" and use_cache:
            x = x * 1.001
        elif cache is not None and self.wrong == ("pieces" if x.shape[1] > 1 else "steps"):
            x = x + 1
        elif self.wrong == "crash" and x.shape[1] == 1:
            raise RuntimeError("sizes do not match")
        elif self.wrong == "NaN" and use_cache:
            x = x * float("nan")
        elif self.wrong == "refuses" and attention_mask is not None:
            raise NotImplementedError("no padding here")
        out.logits = x
        return out


STEPPED = {x for x in LAWS if "steps" in x} | {"token by token"}
PADDED = {x for x in LAWS if "padding" in x}
CACHED = STEPPED | {"cache against none", "prompt in pieces, with a cache"}
BREAKS = {
    "nothing": set(),
    "batch": set(LAWS) - PACKED,
    "cache": CACHED,
    "NaN": CACHED,
    "pieces": {"prompt in pieces, with a cache"},
    "steps": STEPPED,
    "crash": STEPPED,
    "mask": {"padding left", "padding left, then steps", "padding right, then steps"},
    "packed": PACKED,
    "refuses": set(),
}


@pytest.mark.parametrize("wrong", BREAKS)
def test_each_law_fails_where_it_is_broken(wrong):
    report = tarnn.check(Wrong(wrong), tokens=SHORT)
    assert failed(report) == BREAKS[wrong], report
    skipped = {x.law for x in report.results if x.outcome == SKIPPED}
    assert skipped == {"tarnn's runtime against it"} | (PADDED if wrong == "refuses" else set())
    assert json.loads(json.dumps(report.facts(), allow_nan=False))["failed"] == len(BREAKS[wrong])
    if wrong == "packed":
        assert {x.first for x in report.failed} == {"inner.model.layers.0.self_attn"}
    if wrong == "crash":
        assert {x.why for x in report.failed} == {"RuntimeError: sizes do not match"}


FOUND = {  # what transformers' own forward gets wrong, and where
    "Mamba": ({"prompt in pieces, with a cache", "padding right, then steps", *PACKED}, "backbone.layers.0.mixer"),
    "Mamba-2": ({"padding right, then steps", *PACKED}, "backbone.layers.0.mixer"),
}


@pytest.mark.parametrize("name", FOUND)
def test_it_finds_what_transformers_gets_wrong(name):
    model, (laws_broken, place) = linear_model(name), FOUND[name]
    report = tarnn.check(model, tokens=(20, 9, 4))
    assert failed(report) == laws_broken, report
    assert {x.first for x in report.failed} == {place}
    tolerance = report.sections[0].tolerance
    assert tolerance < 1e-4
    assert all(x.largest > 100 * tolerance for x in report.failed)
    tarnn.patch_transformers(model)
    report = tarnn.check(model, tokens=(20, 9, 4))
    assert not report.failed, report
    assert "patched by tarnn" in report.sections[0].name


def test_our_own_model_keeps_them_and_training_goes_on():
    torch.manual_seed(0)
    config = TarnnConfig(
        vocab_size=99, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, initializer_range=0.3
    )
    model = TarnnForCausalLM(config).train()
    report = tarnn.check(model, tokens=SHORT)
    assert {x.outcome for x in report.results} == {PASS}, report
    assert model.training
    assert model.model.layers[0].training


def test_a_bfloat16_model_is_judged_by_its_own_rounding():
    report = tarnn.check(model_of(FAMILIES["Llama"]).bfloat16(), tokens=SHORT)
    assert not report.failed, report
    assert report.sections[0].tolerance > 1e-3
    assert "bfloat16 and float64" in report.sections[0].origin


@compiled
def test_a_folder(folder):
    report = tarnn.check(folder, ["float32", "int4"], also=["patched"], tokens=SHORT)
    assert not report.failed, report
    assert [x.tolerance for x in report.sections[:2]] == [0, 0]
    results = [{x.law: x for x in section.results} for section in report.sections]
    assert results[0]["in float32, against PyTorch's model"].outcome == PASS
    assert results[0]["against the definition, in float64"].outcome == PASS
    assert "int4 rounds the weights" in results[1]["against the definition, in float64"].why
    assert str(report).endswith(f"{len(report.results)} checks: {len(report.results) - 5} passed, 0 failed, 5 skipped")


def test_the_first_layer_unlike_pytorchs_is_named(folder, monkeypatch):
    opened = laws.opened_model

    def damaged(*args):
        forward = opened(*args)
        forward.model.model.layers[1].mlp.down_proj.weight.data[3] += 1
        return forward

    monkeypatch.setattr(laws, "opened_model", damaged)
    (result,) = tarnn.check(folder, tokens=SHORT).failed
    assert (result.law, result.first) == ("in float32, against PyTorch's model", "model.layers.1")


@compiled
def test_a_runtime_that_rounds_differently_in_company_fails(folder, monkeypatch):
    whole = laws.Running.whole

    def off(self, ids, mask=None):
        stages = whole(self, ids, mask)
        return stages | {"logits": [x + 1e-7 * (len(ids) > 1) for x in stages["logits"]]}

    monkeypatch.setattr(laws.Running, "whole", off)
    report = tarnn.check(folder, tokens=SHORT)
    assert {"batch against alone", "padding left"} <= failed(report)


@compiled
def test_the_command(folder, capsys, tmp_path):
    line = ["check", str(folder), "--quiet", "--tokens", "9,5,3"]
    assert main([*line, "--weights", "int8", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["failed"] == 0
    assert main([*line, "--also", "transformers"]) == 1
    assert "FAIL    packed rows, by position_ids" in capsys.readouterr().out
    file = tmp_path / "x.tarnn"
    assert main(["pack", str(folder), str(file), "--quiet"]) == 0
    assert main(["check", str(file), "-q", "--tokens", "9,5,3"]) == 0
    assert "check the folder that it was made of" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--tokens", "7"], "the lengths of two rows or more"),
        (["--tokens", "9,9"], "not all the same"),
        (["--tokens", "9,x"], "--tokens takes positive whole numbers"),
        (["--tokens", "60000,9"], "positions; rows of"),
        (["--also", "llama"], "also must be of transformers, patched; got 'llama'"),
        (["--weights", "int3"], "weights must be one of"),
    ],
)
def test_bad_input_is_one_sentence(folder, options, words, capsys):
    assert main(["check", str(folder), "-q", *options]) == 2
    err = capsys.readouterr().err
    assert words in err
    assert err.count("\n") == 1


def test_other_sources_are_refused(tmp_path, capsys):
    assert main(["check", str(tmp_path), "-q"]) == 2
    assert "no config.json" in capsys.readouterr().err
    with pytest.raises(ValueError, match="known families, not for Linear"):
        tarnn.check(nn.Linear(2, 2))
