"""`tarnn convert`: a checkpoint in, a calibrated one out; what can't be converted is one sentence, exit code 2."""

import errno

import pytest
import torch
import transformers as hf

SMALL = ["--window", "16", "--sinks", "2", "--features", "16", "--num-texts", "3", "--length", "64"]


@pytest.fixture
def llama(tmp_path):
    torch.manual_seed(0)
    config = hf.LlamaConfig(
        vocab_size=256, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=128, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    hf.LlamaForCausalLM(config).save_pretrained(tmp_path / "llama")
    return tmp_path / "llama"


def test_converts_and_says_what_it_cost(tarnn, llama, text, tmp_path):
    out = tmp_path / "out"
    code, shown, err = tarnn("convert", llama, out, "--texts", text, *SMALL, "--exact-layers", 1)
    assert code == 0, err
    assert shown.startswith("   checkpoint  ")  # resolved options first
    assert "nats per token" in shown
    assert "output errors of each head" in err
    loaded = hf.AutoModelForCausalLM.from_pretrained(out)
    assert loaded.config._attn_implementation == "tarnn_hybrid"
    assert {x.name for x in out.iterdir()} >= {"conversion.json", "conversion.md", "model.safetensors"}
    code, _, err = tarnn("convert", llama, out, "--texts", text, *SMALL)
    assert code == 2
    assert "exists already" in err
    code, _, err = tarnn("convert", out, tmp_path / "again", "--texts", text, *SMALL)
    assert code == 2
    assert "has been converted" in err


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (
            lambda: hf.BloomConfig(vocab_size=256, hidden_size=32, n_layer=1, n_head=4),
            "no attention interface",
        ),
        (
            lambda: hf.T5Config(vocab_size=256, d_model=32, d_kv=8, d_ff=64, num_layers=1, num_heads=4),
            "position_bias|no attention interface|decoder",
        ),
    ],
)
def test_models_that_cannot_be_converted(tarnn, text, tmp_path, config, words):
    config = config()
    kind = hf.BloomForCausalLM if config.model_type == "bloom" else hf.T5EncoderModel
    kind(config).save_pretrained(tmp_path / "model")
    code, _, err = tarnn("convert", tmp_path / "model", tmp_path / "out", "--texts", text, *SMALL)
    assert code == 2
    assert any(word in err for word in words.split("|"))
    assert err.strip().splitlines()[-1].startswith("tarnn: error: ")
    assert not (tmp_path / "out").exists()


def test_refusals(tarnn, llama, text, tmp_path):
    def refused(*argv):
        code, _, err = tarnn("convert", *argv)
        assert code == 2
        return err

    out = tmp_path / "out"
    assert "longer than window + sinks = 202" in refused(llama, out, "--texts", text, *SMALL, "--window", 200)
    assert "no config.json" in refused(tmp_path / "nothing", out, "--texts", text)
    assert "no such file" in refused(llama, out, *SMALL, "--texts", tmp_path / "nothing")
    assert "feature_map must be one of" in refused(llama, out, "--texts", text, *SMALL, "--feature-map", "x")
    assert "too small" in refused(llama, out, "--texts", text, *SMALL, "--budget", 10)
    assert "exact_layers must be 0 to 2" in refused(llama, out, "--texts", text, *SMALL, "--exact-layers", 3)
    assert "128 tokens at most" in refused(llama, out, "--texts", text, *SMALL, "--length", 4096)
    assert "--device meta can't be used" in refused(llama, out, "--texts", text, *SMALL, "--device", "meta")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "config.json").write_text('{"model_type": "nosuch"}')
    assert "can't be read as a checkpoint" in refused(tmp_path / "other", out, "--texts", text)
    assert not out.exists()


NUMBERS = {
    "convert": ["window -1", "window 0", "sinks -1", "slots -1", "features 0", "exact-layers -1", "budget 0", "num-texts 0",
                "length 1", "window 2.5"],
    "finetune": ["steps 0", "steps -3", "batch-size 0", "num-texts -1", "length 1", "learning-rate nan", "learning-rate -1",
                 "learning-rate inf", "learning-rate 0"],
}  # fmt: skip


@pytest.mark.parametrize(("name", "option"), [(x, y) for x, of in NUMBERS.items() for y in of])
def test_numbers_are_checked_before_any_work(command, tmp_path, name, option):
    """No folder is looked at: this one has nothing in it."""
    option, value = option.split()
    outcome = command(
        name, tmp_path / "in", tmp_path / "out", "--texts", tmp_path / "none", f"--{option}", value
    )
    assert outcome.is_refusal(option.replace("learning-rate", "learning"))
    assert "none" not in outcome.err
    assert not (tmp_path / "out").exists()


def test_lengths_are_checked_before_the_texts_are_read(command, llama, tmp_path):
    converted, options = tmp_path / "converted", ["--window", "16", "--sinks", "2", "--length", "18"]
    outcome = command("convert", llama, tmp_path / "out", "--texts", tmp_path / "none", *options)
    assert outcome.code == 2
    assert "longer than window + sinks = 18 tokens" in outcome.err
    (tmp_path / "text").write_text("the cat sat on the mat, " * 50)
    command("convert", llama, converted, "--texts", tmp_path / "text", *SMALL)
    outcome = command("finetune", converted, tmp_path / "out", "--texts", tmp_path / "none", "--length", "18")
    assert outcome.code == 2
    assert "longer than window + sinks = 18 tokens" in outcome.err
    assert not (tmp_path / "out").exists()


def test_window_and_sinks_alone(tarnn, command, llama, text, tmp_path):
    out = tmp_path / "out"
    code, shown, err = tarnn(
        "convert", llama, out, "--texts", text, *SMALL[:4], "--feature-map", "none", *SMALL[6:]
    )
    assert code == 0, err
    assert "features  none" in shown
    assert shown.splitlines()[-1].split(maxsplit=1) == [
        "next",
        f'tarnn generate {out} --prompt "Once upon a time"',
    ]
    loaded = hf.AutoModelForCausalLM.from_pretrained(out)
    assert not any("centres" in x for x, _ in loaded.named_parameters())
    both = command(
        "convert", llama, tmp_path / "other", "--texts", text, "--feature-map", "none", "--features", "8"
    )
    assert both.is_refusal("--feature-map none has no features")


def test_finetune_goes_on_from_what_convert_wrote(tarnn, llama, text, tmp_path):
    converted, out = tmp_path / "converted", tmp_path / "out"
    tarnn("convert", llama, converted, "--texts", text, *SMALL, "--feature-map", "hedgehog")
    options = ["--texts", text, "--num-texts", "4", "--length", "64", "--steps", "3", "--batch-size", "1"]
    code, shown, err = tarnn("finetune", converted, out, *options)
    assert code == 0, err
    assert "before: " in err
    assert "nats per token" in shown
    hf.AutoModelForCausalLM.from_pretrained(out)
    assert tarnn("finetune", converted, out, *options, "--resume")[0] == 0  # nothing left to do, and no error
    code, _, err = tarnn("finetune", llama, tmp_path / "other", *options)
    assert code == 2
    assert "not been converted" in err
    code, _, err = tarnn("finetune", converted, tmp_path / "other", *options, "--device", "meta")
    assert code == 2
    assert "--device meta can't be used" in err


def die(*_, **__):
    raise KeyboardInterrupt  # as a kill would, but that this process goes on


def no_room(*_, **__):
    raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize("end", [die, no_room])
def test_a_conversion_that_ends_early_leaves_nothing(tarnn, llama, text, tmp_path, end, monkeypatch):
    out = tmp_path / "out"
    with monkeypatch.context() as patch:
        patch.setattr("tarnn.conversion.report.Report.save", end)
        code, _, err = tarnn("convert", llama, out, "--texts", text, *SMALL)
    assert code == (130 if end is die else 2)
    assert end is die or "the disk is full" in err.splitlines()[-1]
    assert sorted(x.name for x in tmp_path.iterdir()) == ["llama", "text.txt"]
    (tmp_path / ".out.partial").mkdir()  # of one that was killed
    (tmp_path / ".out.partial" / "model.safetensors").write_bytes(b"half")
    assert tarnn("convert", llama, out, "--texts", text, *SMALL)[0] == 0
    assert sorted(x.name for x in tmp_path.iterdir()) == ["llama", "out", "text.txt"]


@pytest.mark.parametrize("end", [die, no_room])
def test_a_training_that_ends_early_blocks_nothing(tarnn, llama, text, tmp_path, end, monkeypatch):
    converted, out = tmp_path / "converted", tmp_path / "out"
    tarnn("convert", llama, converted, "--texts", text, *SMALL, "--feature-map", "hedgehog")
    options = ["--texts", text, "--num-texts", "4", "--length", "64", "--steps", "2", "--batch-size", "1"]
    with monkeypatch.context() as patch:  # before its first checkpoint: the corrected command just runs
        patch.setattr("tarnn.conversion.fit.run", end)
        assert tarnn("finetune", converted, out, *options)[0] == (130 if end is die else 2)
    assert not out.exists()
    out.mkdir()
    for name in ("run.lock", "log.jsonl"):  # of one that was killed
        (out / name).touch()
    with monkeypatch.context() as patch:  # after it: nothing half-written, and --resume
        patch.setattr("tarnn.conversion.report.Report.save", end)
        code, _, err = tarnn("finetune", converted, out, *options)
        assert code == (130 if end is die else 2)
    assert sorted(x.name for x in out.iterdir()) == ["checkpoints", "log.jsonl", "run.lock"]
    code, _, err = tarnn("finetune", converted, out, *options)
    assert (code, "go on in it with --resume" in err) == (2, True)
    assert tarnn("finetune", converted, out, *options, "--resume")[0] == 0
    hf.AutoModelForCausalLM.from_pretrained(out)


def test_where_nothing_can_be_written(tarnn, text, tmp_path):
    (tmp_path / "file").touch()
    for command in ("convert", "finetune"):
        code, _, err = tarnn(command, tmp_path / "nothing", tmp_path / "file" / "out", "--texts", text)
        assert (code, "no folder that can be written" in err) == (2, True)
        code, _, err = tarnn(command, tmp_path / "nothing", tmp_path / "file", "--texts", text)
        assert (code, "name a new folder" in err) == (2, True)
