"""A hundred bad inputs: each ends with one sentence and exit code 2, and nothing is left behind."""

import json
import os
import random
import shutil
import wave

import pytest
import torch
import transformers as hf
from support.damages import a_folder, cut, index, pickled, removes, sets, terabyte, weights, writes
from transformers import Wav2Vec2CTCTokenizer

from tarnn.cli.main import main
from tarnn.data.tokenizers import amino_tokenizer, byte_tokenizer
from tarnn.models import SpeechFeatures, TarnnConfig, TarnnForCausalLM, TarnnForCTC, TarnnForMaskedLM
from tarnn.tasks.text.task import with_mask

SIZE = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4}


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    """Folders that every command takes, by the kind of model in them."""
    top = tmp_path_factory.mktemp("good")
    torch.manual_seed(0)
    llama = hf.LlamaConfig(**SIZE, vocab_size=258, intermediate_size=32, max_position_embeddings=64)
    hf.LlamaForCausalLM(llama).save_pretrained(top / "llama")
    TarnnForCausalLM(TarnnConfig(**SIZE, vocab_size=258)).save_pretrained(top / "ours")
    TarnnForMaskedLM(TarnnConfig(**SIZE, vocab_size=258, causal=False)).save_pretrained(top / "masked")
    TarnnForCausalLM(TarnnConfig(**SIZE, vocab_size=28)).save_pretrained(top / "letters")
    amino_tokenizer().save_pretrained(top / "letters")
    for name in ("llama", "ours", "masked"):
        with_mask(byte_tokenizer()).save_pretrained(top / name)
    speech = TarnnConfig(**SIZE, vocab_size=5, pad_token_id=0, input_size=12, causal=False)
    TarnnForCTC(speech).save_pretrained(top / "speech")
    SpeechFeatures(12, 8000, num_filters=12).save_pretrained(top / "speech")
    (top / "vocab.json").write_text(json.dumps({x: i for i, x in enumerate(("<pad>", "|", "A", "B", "<unk>"))}))
    Wav2Vec2CTCTokenizer(top / "vocab.json", bos_token=None, eos_token=None, word_delimiter_token="|").save_pretrained(
        top / "speech"
    )
    text = top / "text.txt"
    text.write_text("the cat sat on the mat. " * 40)
    options = ["--texts", str(text), "--window", "8", "--features", "4", "--num-texts", "2", "--length", "32"]
    assert main(["convert", str(top / "llama"), str(top / "converted"), *options]) == 0
    return top


UP = "model.layers.0.mlp.up_proj.weight"
ANY = {  # of any folder with weights and a config
    "weights: cut": cut("model.safetensors"),
    "weights: cut in the header": cut("model.safetensors", 0.01),
    "weights: empty": writes("model.safetensors", b""),
    "weights: a header of 2⁶³ bytes": writes("model.safetensors", b"\xff" * 7 + b"\x7f{}"),
    "weights: pickled": pickled,
    "weights: a pickle by the name of safetensors": writes("model.safetensors", b"\x80\x04\x95\x0b\x00\x00\x00"),
    "weights: a terabyte, not written": terabyte,
    "weights: none": removes("model.safetensors"),
    "weights: a folder": a_folder("model.safetensors"),
    "weights: one is missing": weights(lambda x: x.pop(UP)),
    "weights: integers": weights(lambda x: x.update({UP: x[UP].int()})),
    "weights: eight bits": weights(lambda x: x.update({UP: x[UP].to(torch.float8_e4m3fn)})),
    "weights: NaN": weights(lambda x: x[UP].view(-1)[5:6].fill_(torch.nan)),
    "weights: an infinity": weights(lambda x: x[UP].view(-1)[5:6].fill_(-torch.inf)),
    "weights: another shape": weights(lambda x: x.update({UP: x[UP][:, :3].clone()})),
    "weights: a number": weights(lambda x: x.update({UP: torch.tensor(1.0)})),
    "weights: none in the file": weights(dict.clear),
    "index: a path above": index({"weight_map": {UP: "../a.safetensors"}}),
    "index: a zero byte": index({"weight_map": {UP: "a\0.safetensors"}}),
    "index: no such file": index({"weight_map": {UP: "b.safetensors"}}),
    "index: a number": index({"weight_map": {UP: 3}}),
    "config: cut": cut("config.json"),
    "config: empty": writes("config.json", b""),
    "config: a list": writes("config.json", b"[]"),
    "config: not UTF-8": writes("config.json", b'{"model_type": "\xff"}'),
    "config: nested": writes("config.json", b'{"a":' + b"[" * 100_000),
    "config: a folder": a_folder("config.json"),
    "config: none": removes("config.json"),
    "config: model_type of nobody": sets("config.json", model_type="nosuch"),
    "config: model_type a list": sets("config.json", model_type=["llama"]),
    "config: no heads": sets("config.json", num_attention_heads=0),
    "config: −1 layers": sets("config.json", num_hidden_layers=-1),
    "config: 10⁹ heads": sets("config.json", num_attention_heads=10**9, num_key_value_heads=10**9, head_dim=1),
    "config: 10⁹ layers": sets("config.json", num_hidden_layers=10**9),
    "config: 10¹² words": sets("config.json", vocab_size=10**12),
    "config: width in words": sets("config.json", hidden_size="many"),
    "config: half a width": sets("config.json", hidden_size=16.5),
    "config: width of 10⁴⁰": sets("config.json", hidden_size=10**40),
    "config: dtype of nobody": sets("config.json", dtype="float33"),
    "config: dtype a number": sets("config.json", dtype=3),
}
FOREIGN = {
    "config: RoPE with factors in words": sets(
        "config.json",
        max_position_embeddings=64,
        rope_parameters={
            "rope_type": "longrope",
            "rope_theta": 1.0,
            "short_factor": [1.0],
            "long_factor": "x",
            "original_max_position_embeddings": 3,
        },
    ),
    "generation_config: cannot be saved again": sets("generation_config.json", temperature="hot", do_sample=1),
    "config: an unknown activation": sets("config.json", hidden_act="nosuch"),
    "config: RoPE of nobody": sets("config.json", rope_parameters={"rope_type": "nosuch", "rope_theta": 1.0}),
    "config: RoPE a number": sets("config.json", rope_parameters=7),
    "config: quantized": sets("config.json", quantization_config={"quant_method": "gptq", "bits": 4}),
    "config: quantized by a list": sets("config.json", quantization_config=[1]),
    "config: eps a word": sets("config.json", rms_norm_eps="small"),
    "generation_config: a list": writes("generation_config.json", b"[1]"),
    "generation_config: wrong types": sets("generation_config.json", max_length="long", num_beams="x"),
}
TOKENIZER = {
    "tokenizer: cut": cut("tokenizer.json"),
    "tokenizer: empty": writes("tokenizer.json", b""),
    "tokenizer: a list": writes("tokenizer.json", b"[]"),
    "tokenizer: no vocabulary": sets("tokenizer.json", model={"type": "BPE"}),
    "tokenizer: of nobody": sets("tokenizer.json", model={"type": "Nosuch", "vocab": {}}),
    "tokenizer: not UTF-8": writes("tokenizer.json", b'{"\xff": 1}'),
    "tokenizer: config a list": writes("tokenizer_config.json", b"[]"),
    "tokenizer: config cut": cut("tokenizer_config.json"),
    "tokenizer: added tokens a number": sets("tokenizer.json", added_tokens=7),
    "tokenizer: of another class, that has no [UNK]": sets("tokenizer_config.json", tokenizer_class="BertTokenizer"),
    "tokenizer: larger than the vocabulary": sets(
        "tokenizer.json", "model", vocab={chr(i): i + 900 for i in range(33, 127)}
    ),
}
CONVERTED = {
    "options: a list": sets("config.json", tarnn_attention=[1]),
    "options: unknown": sets("config.json", "tarnn_attention", nosuch=1),
    "options: a window in words": sets("config.json", "tarnn_attention", window="wide"),
    "options: a window of −1": sets("config.json", "tarnn_attention", window=-1),
    "options: a window of 2.5": sets("config.json", "tarnn_attention", window=2.5),
    "options: a window of true": sets("config.json", "tarnn_attention", window=True),
    "options: sinks null": sets("config.json", "tarnn_attention", sinks=None),
    "options: −3 slots": sets("config.json", "tarnn_attention", slots=-3),
    "options: 10⁹ slots": sets("config.json", "tarnn_attention", slots=10**19),
    "options: layers a list": sets("config.json", "tarnn_attention", layers=[1]),
    "options: a layer of words": sets("config.json", "tarnn_attention", layers={"first": {}}),
    "options: a layer a number": sets("config.json", "tarnn_attention", layers={"0": 7}),
    "options: layer 7": sets("config.json", "tarnn_attention", layers={"7": {"window": 3}}),
    "options: mode a number": sets("config.json", "tarnn_attention", layers={"0": {"mode": 7}}),
    "options: modes of nobody": sets("config.json", "tarnn_attention", layers={"0": {"mode": ["nosuch"] * 4}}),
    "options: modes of lists": sets("config.json", "tarnn_attention", layers={"0": {"mode": [[], [], [], []]}}),
    "options: a map of nobody": sets("config.json", "tarnn_attention", layers={"0": {"feature_map": "nosuch"}}),
    "options: a map a number": sets("config.json", "tarnn_attention", layers={"0": {"feature_map": 7}}),
    "options: a map without a name": sets("config.json", "tarnn_attention", layers={"0": {"feature_map": {}}}),
    "options: 10⁹ features": sets(
        "config.json",
        "tarnn_attention",
        layers={"0": {"mode": "features", "feature_map": {"name": "favor", "num_features": 10**9}}},
    ),
    "options: a bias in words": sets("config.json", "tarnn_attention", far_bias="strong"),
    "options: attention of somebody": sets(
        "config.json", quantization_config={"quant_method": "tarnn", "attention": "someone/kernels"}
    ),
}
STRANGE = {  # which our own commands may take, or refuse
    "config.json": [
        {"model_type": None}, {"architectures": 7}, {"hidden_size": 10**8}, {"vocab_size": "many"},
        {"feature_map": {"elu": 1}}, {"feature_map_options": [1]}, {"max_position_embeddings": 10**30},
        {"feature_map": "favor", "feature_map_options": {"favor": {"num_features": 10**9}}},
        {"position": "learned", "max_position_embeddings": 10**12}, {"eos_token_id": "x"}, {"eos_token_id": 10**20},
        {"attention": [[]]}, {"id2label": 3}, {"label2id": [1]}, {"attn_implementation": "someone/kernels"},
        {"quantization_config": {"quant_method": "bitsandbytes"}}, {"norm_eps": "1"}, {"tie_word_embeddings": 1},
        {"transformers_version": 5}, {"use_cache": "no"}, {"problem_type": 1}, {"output_hidden_states": "yes"},
        {"return_dict": 1}, {"chunk_size_feed_forward": "x"}, {"is_encoder_decoder": 3}, {"dtype": "int8"},
    ],
    "generation_config.json": [
        {"eos_token_id": "x"}, {"eos_token_id": -1}, {"eos_token_id": [1, None]}, {"eos_token_id": 10**30},
        {"eos_token_id": {}}, {"temperature": "hot"}, {"max_length": -1}, {"bos_token_id": "x"},
    ],
    "tokenizer_config.json": [
        {"tokenizer_class": 7}, {"eos_token": 7}, {"eos_token": {"content": []}}, {"eos_token": "<nowhere>"},
        {"auto_map": 3}, {"added_tokens_decoder": 7}, {"model_max_length": "x"},
    ],
    "tokenizer.json": [{"model": 3}, {"decoder": {"type": "none"}}],
}  # fmt: skip
OURS = {f"{name}: {fields!r:.60}": sets(name, **fields) for name, changes in STRANGE.items() for fields in changes}
for name in ("generation_config.json", "tokenizer_config.json"):
    OURS |= {f"{name}: none": removes(name), f"{name}: a folder": a_folder(name), f"{name}: cut": cut(name)}
    OURS |= {
        f"{name}: {data!r:.20}": writes(name, data) for data in (b"", b"7", b"null", b"[" * 100_000, b'{"a": "\xff"}')
    }
SPEECH = {
    "front end: none": removes("preprocessor_config.json"),
    "front end: a list": writes("preprocessor_config.json", b"[]"),
    "front end: other frames": sets("preprocessor_config.json", feature_size=13, num_filters=13),
    "front end: 10⁹ filters": sets("preprocessor_config.json", num_filters=10**9),
    "front end: no rate": sets("preprocessor_config.json", sampling_rate=0),
    "front end: a hop of nothing": sets("preprocessor_config.json", hop=0.0),
    "front end: a window in words": sets("preprocessor_config.json", window="long"),
    "front end: means of another size": sets("preprocessor_config.json", mean=[0.0]),
}
# which damages a command meets, on a copy of which folder
MET = {
    "convert": ("llama", ANY | FOREIGN | TOKENIZER),
    "finetune": ("converted", ANY | TOKENIZER | CONVERTED),
    "show": ("llama", ANY | TOKENIZER),
    "eval": ("llama", ANY | TOKENIZER),
    "predict": (
        "masked",
        {k: v for k, v in (ANY | TOKENIZER).items() if not any(x in k for x in ("dtype of", "[UNK]"))},
    ),
    "info": ("ours", ANY | TOKENIZER | OURS),
    "generate": ("ours", ANY | TOKENIZER | OURS),
}
SAID = {  # three words of the sentence
    "weights: none": "holds no weights",
    "weights: none in the file": "no floating-point weights",
    "weights: NaN": f"NaN or an infinity in {UP}",
    "weights: an infinity": f"NaN or an infinity in {UP}",
    "weights: integers": f"{UP} as I32",
    "weights: cut": "can't be read",
    "index: a path above": "must hold",
    "index: no such file": "lacks b.safetensors",
}
CASES = [(command, case) for command, (_, cases) in MET.items() for case in cases]


def run(capsys, command, folder, out, *options):
    """The last line on stderr, after checking that the command was refused in one sentence and left nothing."""
    before = sorted(out.parent.iterdir())
    code = main([command, *map(str, [folder, *options])])
    shown = capsys.readouterr()
    assert code == 2, shown
    assert "Traceback" not in shown.err + shown.out
    *_, last = shown.err.splitlines()
    assert last.startswith("tarnn: error: "), shown.err
    assert sum(line.startswith("tarnn: error: ") for line in shown.err.splitlines()) == 1
    assert len(last) < 700
    assert sorted(out.parent.iterdir()) == before
    return last


@pytest.fixture
def options(good, tmp_path):
    """What each command is given besides the folder."""
    out, text = tmp_path / "out", good / "text.txt"
    few = ["--texts", text, "--num-texts", 2, "--length", 32]
    return {
        "convert": [out, *few, "--window", 8, "--features", 4],
        "finetune": ["--against-softmax", "--out", out, *few[1:], "--steps", 1, "--batch-size", 1],
        "show": ["--input", "the cat", "--out", out],
        "eval": [text, "--quiet"],
        "predict": ["the <|mask|> sat"],
        "info": [],
        "generate": ["--prompt", "x", "--max-new-tokens", 2, "--quiet"],
    }


# what a model opened by its program does without: the type that config.json names, the class of the tokenizer
UNREAD = {"config: dtype of nobody", "config: dtype a number", "tokenizer: of another class, that has no [UNK]"}


@pytest.mark.parametrize(("command", "case"), CASES, ids=lambda x: x)
def test_a_damaged_folder(good, options, tmp_path, capsys, command, case):
    kind, cases = MET[command]
    folder = shutil.copytree(good / kind, tmp_path / "copy")
    cases[case](folder)
    if kind == "ours" or (command == "eval" and case in UNREAD):
        may_work(capsys, command, folder, *options[command], says=SAID.get(case, "") if command == "generate" else "")
    else:
        run(capsys, command, folder, tmp_path / "out", *options[command])


@pytest.mark.parametrize("case", ANY | TOKENIZER)
def test_a_damaged_folder_of_transformers(good, options, tmp_path, capsys, case):
    """The same of a Llama that `tarnn generate` opens."""
    folder = shutil.copytree(good / "llama", tmp_path / "copy")
    (ANY | TOKENIZER)[case](folder)
    may_work(capsys, "generate", folder, *options["generate"])


def may_work(capsys, command, folder, *options, says=""):
    """The command works and is silent on stderr, or is refused in one sentence, which names the folder."""
    code = main([command, *map(str, [folder, *options])])
    shown = capsys.readouterr()
    assert (code == 0 and not says and not shown.err) or (code == 2 and not shown.out)
    if code == 2:
        (line,) = shown.err.splitlines()
        assert line.startswith("tarnn: error: ")
        assert str(folder) in line or "the model's own tokenizer" in line
        assert says in line


def test_keys_that_are_missing_and_bits_at_random(good, options, tmp_path, capsys):
    """Another number or a sentence, and never a traceback."""
    keys = json.loads((good / "ours" / "config.json").read_text())
    for seed, key in enumerate([*keys, *[None] * 30]):
        folder, drawn = shutil.copytree(good / "ours", tmp_path / "copy"), random.Random(seed)
        if key is not None:
            (folder / "config.json").write_text(json.dumps({k: v for k, v in keys.items() if k != key}))
        else:
            names = [
                "model.safetensors",
                "config.json",
                "generation_config.json",
                "tokenizer_config.json",
                "tokenizer.json",
            ]
            file = folder / drawn.choice(names)
            data = bytearray(file.read_bytes())
            data[drawn.randrange(min(len(data), 3000))] ^= 1 << drawn.randrange(8)
            file.write_bytes(data)
        may_work(capsys, "generate", folder, *options["generate"])
        shutil.rmtree(folder)


@pytest.mark.parametrize("case", SPEECH)
def test_a_damaged_front_end(good, tmp_path, capsys, case):
    folder = shutil.copytree(good / "speech", tmp_path / "copy")
    SPEECH[case](folder)
    with wave.open(str(tmp_path / "a.wav"), "wb") as file:
        file.setparams((1, 2, 8000, 0, "NONE", ""))
        file.writeframes(bytes(4000))
    run(capsys, "predict", folder, tmp_path / "out", tmp_path / "a.wav")
    code = main(["transcribe", str(folder), str(tmp_path / "a.wav")])
    assert (code, "Traceback" in capsys.readouterr().err) == (2, False)


@pytest.mark.parametrize("command", MET)
@pytest.mark.parametrize("name", ["\0", "a\0b", "x" * 300, "nothing", "\udcff"])
def test_a_folder_that_is_no_name(options, tmp_path, capsys, command, name):
    run(capsys, command, name, tmp_path / "out", *options[command])


BYTES = {"not UTF-8": b"the c\xe4t\n", "cut within a character": "é".encode()[:1], "zero bytes": b"\0\0\0"}


@pytest.mark.parametrize("data", BYTES.values(), ids=BYTES)
def test_inputs_that_are_not_text(good, tmp_path, capsys, data):
    (tmp_path / "input").write_bytes(data)
    out = tmp_path / "out"
    if b"\0" not in data:
        run(capsys, "predict", good / "masked", out, tmp_path / "input")
        run(capsys, "show", good / "ours", out, "--input", tmp_path / "input", "--out", out)
        typed = os.fsdecode(data)
        run(capsys, "show", good / "llama", out, "--input", typed, "--out", out)
        run(capsys, "predict", good / "masked", out, typed)


def test_an_alphabet_without_the_letters_of_the_prompt(good, tmp_path, capsys):
    said = run(capsys, "generate", good / "letters", tmp_path / "out", "--prompt", "*")
    assert "expected ACDEFGHIKLMNPQRSTVWYBJOUXZ" in said


def test_a_device_is_no_text(good, tmp_path, capsys):
    said = run(capsys, "eval", good / "ours", tmp_path / "out", "/dev/null")
    assert "/dev/null is a device" in said


@pytest.mark.parametrize("option", ["--steps", "--batch-size"])
def test_a_training_without_end(good, options, tmp_path, capsys, option):
    run(capsys, "finetune", good / "converted", tmp_path / "out", *options["finetune"], option, 10**30)


@pytest.mark.parametrize("size", [1, 2, 12])
def test_a_text_of_a_few_bytes(tmp_path, capsys, size):
    (tmp_path / "text").write_bytes(b"x" * size)
    code = main(["train", str(tmp_path / "text"), "--out", str(tmp_path / "run"), "--steps", "1", "--context", "8"])
    shown = capsys.readouterr()
    assert code in (0, 2)
    assert "Traceback" not in shown.err
    assert code == 0 or shown.err.splitlines()[-1].startswith("tarnn: error: ")
