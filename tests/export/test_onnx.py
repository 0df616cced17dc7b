"""Programs as ONNX graphs: onnxruntime, and ONNX's own definition, compute our logits and write our texts."""

import json
import subprocess
import sys
from importlib.util import find_spec

import numpy as np
import pytest
import torch
from support.exported import make_model, save_run
from support.open_folders import make_folder

from tarnn.cli.main import main
from tarnn.decoding.opening import open_step
from tarnn.errors import UserError
from tarnn.export.onnx import defined, export
from tarnn.families.by_name import open_program
from tarnn.log import silent
from tarnn.program.definition import new_states, run
from tarnn.program.extra import extra_rows

onnx = pytest.importorskip("onnx", reason="onnx is not installed")
pytest.importorskip("onnxruntime", reason="onnxruntime is not installed")
from tarnn.export.onnx_graphs.running import OnnxModel  # noqa: E402

SHORT = {"max_position_embeddings": 64}
CASES = {
    "linear": {},
    "no decay, one key head": {"decay": "none", "num_key_value_heads": 1, "qk_norm": False},
    "a decay a head": {"decay": "head", "num_key_value_heads": 2, "tie_word_embeddings": False},
    "a decay a channel": {"decay": "channel", "bias": True},
    "rotated features": {"position": "rotary", "num_key_value_heads": 2},
    "rotated vectors": {"position": "rotary", "feature_map": "identity", "normalize": False},
    "relu, squared": {"feature_map": ["relu", "squared_relu", "elu"], "mlp": "squared_relu"},
    "hedgehog": {"feature_map": "hedgehog"},
    "dpfp": {"feature_map": "dpfp", "feature_map_options": {"dpfp": {"nu": 2}}},
    "taylor, polynomial": {"feature_map": ["taylor", "polynomial2", "elu"], "head_dim": 6},
    "cosformer": {"feature_map": "cosformer", **SHORT},
    "generalized": {"feature_map": "generalized_random", "normalize": False},
    "waves": {"feature_map": "gaussian", "normalize": False},
    "sinusoids": {"position": "sinusoidal", "norm": "layer", "mlp": "gelu", "bias": True, "norm_position": "post"},
    "half of the channels": {"position": "sinusoidal_half"},
    "a table of positions": {"position": "learned", **SHORT},
    "delta": {"attention": "gated_delta"},
    "delta, a decay a channel": {"attention": "gated_delta", "decay": "channel", "num_key_value_heads": 2},
    "delta without decay": {"attention": "gated_delta", "decay": "none"},
    "mamba2": {"attention": "mamba2", "mlp": "none"},
    "hybrid": {"attention": ["linear", "softmax", "gated_delta"], "position": "rotary", "num_key_value_heads": 2},
    "convolved": {"conv_kernel": 5, "attention": ["linear", "mamba2", "softmax"]},
    "two streams": {"reversible": True, "attention": ["linear", "none", "softmax"]},
}
OFTEN = ("linear", "sinusoids", "delta", "hybrid")
FAMILIES = {"Llama": "llama", "Qwen3.5": "qwen3_5_text", "Mamba-2": "qwen3_5_text", "LFM2": "lfm2"}
MORE = (
    "Qwen2",
    "Qwen3-Next",
    "OLMo-hybrid",
    "Bamba-9B",
    "Falcon-H1-0.5B",
    "Granite-4.0-h-micro",
    "Nemotron-H-8B",
    "Zamba2-1.2B",
)


def written(folder, operators="onnx", rows=1):
    """(the folder of an export, its model in onnxruntime)"""
    out = folder.parent / f"{folder.name}-{operators}"
    out.mkdir()
    export(folder, out, report=silent, operators=operators)
    return out, OnnxModel(out / "model.onnx", out / "step.onnx", rows)


def check_pieces(folder, operators):
    """Two texts in pieces of several tokens and of one: their logits are the program's in float64, but for rounding."""
    _, model = written(folder, operators, rows=2)
    program, ids = open_program(folder), torch.randint(256, (2, 29), generator=torch.Generator().manual_seed(2))
    expected = torch.cat([defined(program, row[None]) for row in ids])
    for end, start in ((11, 0), (12, 11), (13, 12), (20, 13), (29, 20)):
        logits = torch.from_numpy(model.read(ids[:, start:end].numpy()))[:, 0]
        assert (logits - expected[:, end - 1]).abs().max() < 1e-5 * expected.abs().max()


@pytest.mark.parametrize("case", CASES)
def test_pieces_of_texts(tmp_path, case):
    save_run(tmp_path / "run", **CASES[case])
    check_pieces(tmp_path / "run", "onnx")


@pytest.mark.parametrize("case", [pytest.param(x, marks=() if x in OFTEN else pytest.mark.slow) for x in CASES])
def test_pieces_of_texts_by_operators_of_microsoft(tmp_path, case):
    save_run(tmp_path / "run", **CASES[case])
    check_pieces(tmp_path / "run", "microsoft")


@pytest.mark.parametrize("family", [*FAMILIES, *(pytest.param(x, marks=pytest.mark.slow) for x in MORE)])
def test_families_of_others(tmp_path, family):
    check_pieces(make_folder(tmp_path / "run", family), "onnx")


@pytest.mark.parametrize("case", ["rotated features", "sinusoids"])
def test_angles_are_right_far_into_a_text(tmp_path, case):
    save_run(tmp_path / "run", **CASES[case])
    (_, model), program, ids = written(tmp_path / "run"), open_program(tmp_path / "run"), torch.arange(7)[None]
    model.position = start = 10**7
    extra = extra_rows(program, torch.arange(start, start + 7))
    states, rows = new_states(program, 1, dtype=torch.float64), None if extra is None else extra[None]
    expected, _ = run(program, ids, states, positions=[start], extra=rows, dtype=torch.float64)
    logits = torch.from_numpy(model.read(ids.numpy()))[:, 0]
    assert (logits - expected[:, -1]).abs().max() < 1e-5 * expected.abs().max()


@pytest.mark.parametrize("case", ["linear", "delta", "hybrid"])
def test_a_thousand_tokens_are_ours(tmp_path, case):
    save_run(tmp_path / "run", **CASES[case], eos_token_id=None)
    (_, model), opened, prompt = written(tmp_path / "run"), open_step(tmp_path / "run"), list(b"Call me Ishmael.")
    expected, state = opened.prefill(torch.tensor([prompt]), opened.new_state(1, 1100))
    logits, ours = model.read(np.array([prompt])), []
    for _ in range(1000):
        ours.append(int(expected.argmax()))
        assert ours[-1] == int(logits.argmax()), len(ours)
        expected, state = opened.step(torch.tensor(ours[-1:]), state)
        logits = model.read(np.array([ours[-1:]]))
    assert len(set(ours)) > 20  # it goes round in no circle


@pytest.mark.parametrize("case", ["linear", "delta without decay", "hybrid"])
def test_by_the_definition_of_onnx(tmp_path, case):
    """The checker knows every operator and type; ONNX's reference evaluator computes the logits."""
    from onnx.reference import ReferenceEvaluator

    save_run(tmp_path / "run", **CASES[case])
    out, model = written(tmp_path / "run")
    for name in ("model.onnx", "step.onnx"):
        onnx.checker.check_model(str(out / name), full_check=True)
    graph, ids = ReferenceEvaluator(onnx.load(out / "model.onnx")), np.arange(9)[None]
    inputs = {"input_ids": ids, **model.states} | ({"position_ids": ids} if model.needs_positions else {})
    logits, *states = graph.run(None, inputs)
    np.testing.assert_allclose(model.read(ids), logits, rtol=1e-4, atol=1e-4)
    for x, y in zip(states, model.states.values(), strict=True):
        np.testing.assert_allclose(y, x, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("operators", ["onnx", "microsoft"])
def test_one_set_of_weights_and_the_operators_that_were_asked_for(tmp_path, operators):
    model = save_run(tmp_path / "run", **CASES["delta"])
    out, _ = written(tmp_path / "run", operators)
    graphs = [onnx.load(out / name, load_external_data=False) for name in ("model.onnx", "step.onnx")]
    weights = [{x.name for x in g.graph.initializer if x.data_location == x.EXTERNAL} for g in graphs]
    assert weights[0] == weights[1]
    size = sum(x.numel() * 4 for x in model.parameters())
    assert size * 0.9 < (out / "weights.bin").stat().st_size < size + 4096 * len(weights[0])
    for graph in graphs:
        domains = {x.op_type: x.domain for x in graph.graph.node}
        assert {domains[x] for x in ("LinearAttention", "CausalConvWithState")} == {
            "" if operators == "onnx" else "com.microsoft"
        }
        assert next((x.domain, x.version) for x in graph.opset_import) == ("", 27 if operators == "onnx" else 21)
        assert not {"Loop", "Scan"} & domains.keys()


REFUSED = {
    "exponentials": ({"feature_map": "favor"}, "have a running maximum; the state of ONNX's LinearAttention has none"),
    "exp": ({"feature_map": "exp"}, "running maximum"),
    "waves with a length": ({"feature_map": "trigonometric", "normalize": False}, "running maximum"),
    "a window": ({"attention": "window"}, "softmax over a window of tokens"),
    "RWKV-7": ({"attention": "rwkv7"}, "erases along another vector than it writes"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_onnx_lacks_is_refused_with_the_reason(tmp_path, case):
    choices, why = REFUSED[case]
    make_model(**choices).save_pretrained(tmp_path / "run")
    with pytest.raises(UserError, match=why):
        export(tmp_path / "run", tmp_path, report=silent)
    with pytest.raises(ValueError, match=r"operators must be one of onnx, microsoft; got 'ms'"):
        export(tmp_path / "run", tmp_path, report=silent, operators="ms")
    assert [x.name for x in tmp_path.iterdir()] == ["run"]


@pytest.mark.parametrize(
    ("family", "why"),
    [("Mamba", "a selective scan"), ("LFM2-8B-A1B", "experts, of which"), ("xLSTM-7b", "denominator of an mLSTM")],
)
def test_families_that_onnx_lacks_operators_for(tmp_path, family, why):
    with pytest.raises(UserError, match=why):
        export(make_folder(tmp_path / "run", family), tmp_path, report=silent)


def test_logits_that_differ_are_refused(tmp_path, monkeypatch):
    from tarnn.export.onnx_graphs import row_wise

    save_run(tmp_path / "run")
    monkeypatch.setitem(row_wise.FUNCTIONS, "silu", row_wise.FUNCTIONS["sigmoid"])
    with pytest.raises(UserError, match="onnxruntime computes logits that differ by"):
        export(tmp_path / "run", tmp_path, report=silent)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_config_of_genai_names_what_the_graph_has(tmp_path, family):
    out, model = written(make_folder(tmp_path / "run", family))
    config = json.loads((out / "genai_config.json").read_text())["model"]
    decoder = config["decoder"]
    assert config["type"] == FAMILIES[family]
    assert config["eos_token_id"] == [257, 259]
    assert (config["bos_token_id"], config["pad_token_id"], config["vocab_size"]) == (256, 258, 264)
    layers = range(decoder["num_hidden_layers"])
    assert len(decoder["layer_types"]) == len(layers)
    names = {x % i for key, x in decoder["inputs"].items() if key.startswith("past") for i in layers}
    assert model.states.keys() <= names
    after = {x % i for key, x in decoder["outputs"].items() if key.startswith("present") for i in layers}
    assert set(model.outputs[1:]) <= after


def test_models_that_genai_can_not_run_have_no_config_for_it(tmp_path):
    save_run(tmp_path / "run")
    (tmp_path / "out").mkdir()
    about = export(tmp_path / "run", tmp_path / "out", report=silent)
    assert "no genai_config.json, since onnxruntime-genai can't run it: " in about
    assert "these have recurrent" in about
    assert not (tmp_path / "out" / "genai_config.json").exists()


GENAI = """
import sys, numpy as np, onnxruntime_genai as genai
model = genai.Model(sys.argv[1])
parameters = genai.GeneratorParams(model)
parameters.set_search_options(max_length=40, do_sample=False)
generator, ids = genai.Generator(model, parameters), []
generator.append_tokens(np.array([list(b"Call me")], np.int32))
while not generator.is_done():
    generator.generate_next_token()
    ids.append(int(generator.get_next_tokens()[0]))
print(*ids)
"""


@pytest.mark.skipif(find_spec("onnxruntime_genai") is None, reason="onnxruntime-genai is not installed")
@pytest.mark.parametrize("family", FAMILIES)
def test_genai_writes_our_text(tmp_path, family):
    out, model = written(make_folder(tmp_path / "run", family))
    done = subprocess.run([sys.executable, "-c", GENAI, str(out)], capture_output=True, text=True, check=True)
    ids, logits = list(map(int, done.stdout.split())), model.read(np.array([list(b"Call me")]))
    assert len(ids) == 33 or ids[-1] in (257, 259)
    for token in ids:
        assert token == int(logits[0, 0].argmax())
        logits = model.read(np.array([[token]]))


def test_the_command(tmp_path, capsys):
    save_run(tmp_path / "run", **CASES["mamba2"])
    line = ["export", str(tmp_path / "run"), "--format", "onnx", "--out", str(tmp_path / "out"), "--quiet"]
    assert main([*line, "--operators", "microsoft"]) == 0
    assert "genai_config.json; onnxruntime's logits differ by" in capsys.readouterr().out
    names = {"model.onnx", "step.onnx", "weights.bin", "genai_config.json", "tokenizer.json", "tokenizer_config.json"}
    assert {x.name for x in (tmp_path / "out").iterdir()} == names
    assert main([*line[:3], "hf", "--out", str(tmp_path / "other"), "--operators", "onnx"]) == 2
    assert "--operators is for --format onnx; leave it out with --format hf" in capsys.readouterr().err


def test_without_onnxruntime_it_says_that_nothing_was_run(tmp_path, monkeypatch):
    save_run(tmp_path / "run")
    monkeypatch.setattr("tarnn.export.onnx.find_spec", lambda name: None)
    (tmp_path / "out").mkdir()
    assert export(tmp_path / "run", tmp_path / "out", report=silent).endswith(
        "not run, since onnxruntime is not installed"
    )


def test_without_onnx_it_says_what_to_install(tmp_path, monkeypatch):
    save_run(tmp_path / "run")
    for name in [x for x in sys.modules if x.partition(".")[0] == "onnx" or "onnx_graphs" in x]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "onnx", None)
    with pytest.raises(UserError, match=r"tarnn export --format onnx needs onnx: pip install 'tarnn\[onnx\]'"):
        export(tmp_path / "run", tmp_path, report=silent)
