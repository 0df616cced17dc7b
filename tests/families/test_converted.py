"""Converted models as programs: the logits of transformers' model with tarnn's attention, in float64, whole and in pieces."""

import json

import pytest
import torch
import transformers as hf
from support.damaged_configs import check_refusals
from support.families import FAMILIES, model_of

from tarnn.conversion import set_options
from tarnn.errors import UserError
from tarnn.families.by_name import open_program
from tarnn.kernels.cpu import library
from tarnn.program.definition import new_states, run
from tarnn.program.runtime import Runtime
from tarnn.program.state import check_state, new_state

pytestmark = pytest.mark.filterwarnings("ignore")  # what transformers has to say of random configs
NEAR = {"window": 6, "sinks": 2}
KINDS = {
    "window alone": NEAR | {"feature_map": None},
    "clusters": NEAR | {"feature_map": {"name": "clusters", "num_features": 19}, "far_bias": 0.4},
    "clusters that end": {"window": 5, "sinks": 0, "feature_map": "clusters", "far_until": 15},
    "favor": NEAR | {"feature_map": {"name": "favor", "num_features": 70}, "far_until": 15},
    "centred and balanced": NEAR
    | {"feature_map": {"name": "oprf", "num_features": 40, "centre": True, "balance": True}},
    "elu": NEAR | {"feature_map": "elu"},
    "heads of every mode": NEAR | {"feature_map": "clusters", "mode": ["exact", "features"]},
    "window and features": NEAR | {"feature_map": "favor", "mode": ["window", "features"]},
    "exact": {"mode": "exact"},
    "defaults": {},
}
CASES = [("Llama", kind) for kind in KINDS] + [
    (family, "heads of every mode") for family in ("Mistral", "Qwen2", "Qwen3")
]


def converted(family="Llama", attention="tarnn_hybrid", **options):
    """A converted model with random weights: those of its maps and its λ too."""
    torch.manual_seed(0)
    model = model_of(FAMILIES[family]) if isinstance(family, str) else family
    model.set_attn_implementation(attention)
    set_options(model, **options)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(4) if parameter.ndim > 1 else parameter.add_(0.3 * torch.randn_like(parameter))
        for name, x in model.named_buffers():
            if name.endswith(("_centre", "stretch")):
                x += 0.2 * torch.rand_like(x)
    return model.eval()


def differs_no_more_than_rounding(model, folder, tolerance=2e-4):
    """Of the program of the model's folder: all tokens at once, then in pieces."""
    model.save_pretrained(folder)
    program = open_program(folder)
    ids = torch.randint(model.config.vocab_size, (2, 23), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = model(ids, use_cache=False).logits
    states, outputs = new_states(program, 2, dtype=torch.float64), []
    for part in (slice(0, 1), slice(1, 9), slice(9, 23)):
        out, states = run(program, ids[:, part], states, positions=[part.start] * 2, dtype=torch.float64)
        outputs.append(out)
    logits = torch.cat(outputs, 1)
    assert (logits - expected).abs().max() <= tolerance * expected.abs().max()
    assert (logits[:, 12:].std(0) > 1e-2).any()
    check_state(new_state(program, 2, 3), program, 2, [3, 3])
    if library.available():
        runtime = Runtime(program)
        compiled, _ = runtime.prefill(ids, runtime.new_state(2, 23), every=True)
        assert (compiled - expected).abs().max() <= tolerance * expected.abs().max()
    return program


@pytest.mark.parametrize(("family", "kind"), CASES)
def test_logits(family, kind, tmp_path):
    differs_no_more_than_rounding(converted(family, **KINDS[kind]), tmp_path)


def test_layers_with_options_of_their_own(tmp_path):
    model = converted(**NEAR, feature_map="elu")
    set_options(model, layers=[1], window=3, mode="window")
    program = differs_no_more_than_rounding(model, tmp_path)
    (first, second) = (x.numbers for x in program.instructions if x.kind == "hybrid")
    assert (first["window"], second["window"], first["sinks"], second["sinks"]) == (6, 3, 2, 2)


def test_without_near_keys(tmp_path):
    program = differs_no_more_than_rounding(converted(attention="tarnn_linear", feature_map="elu"), tmp_path)
    assert {x.numbers["window"] for x in program.instructions if x.kind == "hybrid"} == {1}


REFUSED = {
    "slots": ({"slots": 3}, "slots must be 0 here; got 3"),
    "a window of none": ({"window": 0}, "window must be a whole number from 1"),
    "another mode": ({"mode": "both"}, "mode must be features or window or exact, or a list of"),
    "an option that there is not": ({"far_scale": 2.0}, "far_scale = 2.0 is not known"),
    "a map that there is not": ({"feature_map": "cubes"}, "feature_map must be one of"),
    "distances": ({"feature_map": {"name": "cosformer", "max_length": 9}}, "cosformer weighs keys by their distance"),
    "another map": ({"feature_map": "hedgehog"}, "lacks the weights .*tarnn.feature_map.weight"),
    "a layer that there is not": ({"layers": {"9": {}}}, "objects under layers from 0 to"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_not_handled_is_refused(case, tmp_path):
    changes, why = REFUSED[case]
    converted(**NEAR, feature_map="elu").save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    config = json.loads(file.read_text())
    file.write_text(json.dumps(config | {"tarnn_attention": config["tarnn_attention"] | changes}))
    with pytest.raises(UserError, match=why):
        open_program(tmp_path)


@pytest.mark.thorough
def test_damaged_configs_are_refused_in_a_sentence(tmp_path):
    phi = {"name": "favor", "num_features": 8, "centre": True}
    model = converted(**NEAR, feature_map=phi, mode=["window", "features"])
    set_options(model, layers=[1], window=3)
    model.save_pretrained(tmp_path)
    check_refusals(json.loads((tmp_path / "config.json").read_text()), model.state_dict())


def test_a_mark_without_options_and_the_other_way_round_are_refused(tmp_path):
    converted(**NEAR, feature_map="elu").save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    config = json.loads(file.read_text())
    for left in ("tarnn_attention", "quantization_config"):
        file.write_text(json.dumps({key: x for key, x in config.items() if key != left}))
        with pytest.raises(
            UserError, match=r"a converted model has tarnn_attention, its options, and in quantization_config"
        ):
            open_program(tmp_path)


def test_softmax_layers_of_qwen3_5(tmp_path):
    """Its layers with the delta rule stay; only those with softmax are counted."""
    sizes = {
        "hidden_size": 32,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "intermediate_size": 48,
    }
    delta = {
        "linear_num_key_heads": 2,
        "linear_key_head_dim": 8,
        "linear_num_value_heads": 4,
        "linear_value_head_dim": 6,
    }
    kinds = ["full_attention", "linear_attention", "full_attention"]
    config = hf.Qwen3_5TextConfig(**sizes, **delta, vocab_size=99, num_hidden_layers=3, layer_types=kinds)
    torch.manual_seed(0)
    model = converted(hf.Qwen3_5ForCausalLM(config), **NEAR, feature_map="clusters")
    set_options(model, layers=[1], window=3)
    program = differs_no_more_than_rounding(model, tmp_path)
    assert [x.kind for x in program.instructions if x.kind in ("delta", "hybrid")] == ["hybrid", "delta", "hybrid"]
