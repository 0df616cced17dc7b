"""Folders opened by their programs, as live models are, with the kernels and without."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.open_folders import CONFIGS, make_folder

import tarnn
from tarnn.conversion.opening import open_pretrained
from tarnn.decoding import from_program
from tarnn.decoding.from_program import open_folder as open_by_program
from tarnn.decoding.fused import FusedStep
from tarnn.decoding.lm import LM
from tarnn.decoding.opening import open_step
from tarnn.decoding.refusal import Refusal
from tarnn.kernels.cpu import library
from tarnn.models import TarnnConfig, TarnnForCausalLM
from tarnn.program.plain import PlainRuntime
from tarnn.program.recording import ProgramError
from tarnn.program.runtime import Runtime
from tarnn.tasks.checkpoint import open_model

needs_kernels = pytest.mark.skipif(not library.available(), reason="the compiled kernels can't be used here")


@pytest.fixture(scope="module")
def open_folder(tmp_path_factory):
    made = {}

    def get(family, dtype=torch.float32):
        if (family, dtype) not in made:
            made[family, dtype] = make_folder(tmp_path_factory.mktemp("f") / "tiny", family, dtype)
        return made[family, dtype]

    return get


def live(folder):
    return open_pretrained(folder, converted=False, text_only=True)


def ids(b, t, seed=0):
    return torch.randint(250, (b, t), generator=torch.Generator().manual_seed(seed))


def logits(opened, tokens):
    return opened.prefill(tokens, opened.new_state(*tokens.shape), every=True)[0]


@needs_kernels
@pytest.mark.parametrize("family", CONFIGS)
def test_a_live_model_of_transformers_is_opened_alike(open_folder, family):
    program, modules = open_step(open_folder(family)), open_step(live(open_folder(family)))
    assert (type(program.step), type(modules.step)) == (Runtime, FusedStep)
    mine, theirs = (logits(x, ids(2, 40)) for x in (program, modules))
    assert torch.equal(mine, theirs)
    facts = ("num_parameters", "config", "end_ids", "pad_id", "key_bytes", "dtype", "weights")
    assert [getattr(program, x) for x in facts] == [getattr(modules, x) for x in facts]


@needs_kernels
@pytest.mark.parametrize("family", ["Qwen3", "OLMo-hybrid"])
def test_int8_is_the_same_too(open_folder, family):
    program, modules = (open_step(x, "int8") for x in (open_folder(family), live(open_folder(family))))
    assert torch.equal(logits(program, ids(2, 40)), logits(modules, ids(2, 40)))


@needs_kernels
def test_sixteen_bits(open_folder):
    """bfloat16 stays as it is, float16 becomes float32; a dtype is taken by all weights."""
    narrow = open_step(open_folder("Qwen3", torch.bfloat16))
    assert (narrow.dtype, narrow.weights) == (torch.bfloat16, "bfloat16")
    half = open_step(open_folder("Qwen3", torch.float16))
    assert (half.dtype, half.weights) == (torch.float16, "float32")
    cast = open_step(open_folder("Qwen3"), dtype=torch.bfloat16)
    assert (cast.dtype, cast.weights) == (torch.bfloat16, "bfloat16")
    assert torch.equal(logits(cast, ids(1, 9)), logits(narrow, ids(1, 9)))
    assert cast.fingerprint == narrow.fingerprint


@pytest.mark.parametrize("family", ["Llama", "Qwen3.5", "Mamba-2"])
def test_without_kernels_the_definition_computes(open_folder, family, tmp_path, monkeypatch):
    """The same numbers to rounding; states are the same values, also in files; a line says why it is slow."""
    compiled = tarnn.load(open_folder(family)) if library.available() else None
    monkeypatch.setattr(library, "available", lambda: False)
    plain = tarnn.load(open_folder(family))
    assert isinstance(plain.opened.step, PlainRuntime)
    assert plain.opened.weights is None
    assert "no fused step: the compiled kernels can't be used" in plain.opened.about[1]
    whole = plain.read("Call me Ishmael")
    stepped = plain.read("Call me")
    for token in plain.ids(" Ishmael", starts=False)[:, None]:
        step, stepped = plain.step(token, stepped)
    tolerance = {"rtol": 0, "atol": 2e-6 * float(whole.logits.abs().max())}  # 17 roundings of the largest number
    torch.testing.assert_close(step, whole.logits, **tolerance)
    assert "".join(plain.generate(" ", state=stepped, max_new_tokens=4, temperature=0))
    with pytest.raises(Refusal, match="there is no fused step"):
        open_step(open_folder(family), "int8")
    if compiled is not None:
        plain.save(whole, tmp_path / "s")
        after = compiled.read("!", compiled.open_state(tmp_path / "s")).logits
        torch.testing.assert_close(after, plain.read("!", whole).logits, **tolerance)


def test_padding_and_rows_without_kernels(open_folder):
    """Rows of several lengths, with padding anywhere, give what each gives alone, and full caches are refused."""
    opened = open_by_program(open_folder("Llama"), plain=True)
    tokens = ids(2, 5)
    mask = torch.tensor([[1, 0, 1, 1, 0], [0, 0, 0, 0, 1]])
    every, state = opened.step.prefill(tokens, opened.new_state(2, 5), mask, every=True)
    alone, _ = opened.prefill(tokens[:1, [0, 2, 3]], opened.new_state(1, 3), every=True)
    torch.testing.assert_close(every[0, [0, 2, 3]], alone[0], rtol=1e-5, atol=1e-5)
    assert state.position.tolist() == [3, 1]
    _, state = opened.prefill(ids(2, 2), state)
    with pytest.raises(ValueError, match="cache is full"):
        opened.step(torch.tensor([1, 1]), state)


@needs_kernels
@pytest.mark.parametrize("family", ["Llama", "Qwen3.5"])
def test_what_the_kernels_lack(open_folder, family, monkeypatch):
    """Where a program has an instruction that they don't, its definition computes."""

    def refuse(*arguments):
        raise ProgramError("the runtime has no instruction hybrid")

    expected = logits(open_step(open_folder(family)), ids(1, 9))
    monkeypatch.setattr(from_program, "Runtime", refuse)
    opened = open_step(open_folder(family))
    assert isinstance(opened.step, PlainRuntime)
    torch.testing.assert_close(logits(opened, ids(1, 9)), expected, rtol=1e-4, atol=1e-4)
    with pytest.raises(Refusal, match="lack an instruction"):
        open_step(open_folder(family), "int8")


@needs_kernels
@pytest.mark.parametrize(
    ("choices", "atol"),
    [({}, 0), ({"attention": ["linear", "softmax"]}, 0), ({"decay": "head", "feature_map": "sderf"}, 1e-5)],
)
def test_own_models_keep_their_fingerprint(choices, atol, tmp_path):
    """Numbers, ends and states are those of the step over the model's modules: a state of one goes on in the other."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "initializer_range": 0.3}
    TarnnForCausalLM(TarnnConfig(vocab_size=256, eos_token_id=10, **sizes | choices)).save_pretrained(tmp_path)
    program, modules = open_step(tmp_path), open_step(open_model(tmp_path))
    assert (type(program.step), type(modules.step)) == (Runtime, FusedStep)
    facts = (
        "num_parameters",
        "num_bytes",
        "fingerprint",
        "config",
        "end_ids",
        "pad_id",
        "key_bytes",
        "dtype",
        "weights",
    )
    assert [getattr(program, x) for x in facts] == [getattr(modules, x) for x in facts]
    torch.testing.assert_close(logits(program, ids(2, 40)), logits(modules, ids(2, 40)), rtol=0, atol=atol)
    first, second = tarnn.load(tmp_path), LM(modules, tarnn.load(tmp_path).tokenizer)
    for mine, other in ((first, second), (second, first)):
        state = mine.read("Call me")
        mine.save(state, tmp_path / "s")
        after = other.read(" x", other.open_state(tmp_path / "s")).logits
        torch.testing.assert_close(after, mine.read(" x", state).logits, rtol=0, atol=atol)


def test_own_models_that_do_not_run_compiled_run_in_pytorch(tmp_path, monkeypatch):
    TarnnForCausalLM(TarnnConfig(vocab_size=256, hidden_size=32, num_attention_heads=4)).save_pretrained(tmp_path)
    monkeypatch.setattr(library, "available", lambda: False)
    opened = open_step(tmp_path)
    assert opened.weights is None
    assert not isinstance(opened.step, Runtime)


def test_the_fingerprint_is_of_weights_and_config(open_folder, tmp_path):
    """It changes with one number of one weight and with the config, and not with the place or what others add to the config."""
    first = open_step(open_folder("Qwen2")).fingerprint
    folder = shutil.copytree(open_folder("Qwen2"), tmp_path / "copy")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"transformers_version": "9", "use_cache": False}))
    assert open_step(folder).fingerprint == first
    (folder / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 1e-3}))
    other = open_step(folder).fingerprint
    (folder / "config.json").write_text(json.dumps(config))
    weights = load_file(folder / "model.safetensors")
    weights["model.norm.weight"][3] += 1e-7 + weights["model.norm.weight"][3].abs() * 1e-6
    save_file(weights, folder / "model.safetensors")
    assert len({first, other, open_step(folder).fingerprint}) == 3


def test_tied_weights_are_counted_once(open_folder, tmp_path):
    folder = shutil.copytree(open_folder("Qwen2"), tmp_path / "copy")
    weights = load_file(folder / "model.safetensors")
    before = open_step(folder)
    save_file(weights | {"lm_head.weight": weights["model.embed_tokens.weight"].clone()}, folder / "model.safetensors")
    after = open_step(folder)
    assert after.num_parameters == before.num_parameters == sum(x.numel() for x in weights.values())
    assert (after.num_bytes, after.fingerprint) == (before.num_bytes, before.fingerprint)


def test_weights_of_other_parts_are_named(open_folder):
    said = []
    for family in ("Llama", "Qwen3.5 with images"):
        tarnn.load(open_folder(family), report=said.append)
    assert ["does not use: model.visual" in line for line in said] == [True]
