"""Each family against transformers: a released config, narrower, random weights, logits of the definition in float64."""

import copy
import json
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
import transformers as hf
from safetensors.torch import load_file, save_file
from support.damaged_configs import check_refusals
from support.family_models import MODELS, VARIANTS, defined, fields_of, model_of
from support.linear_families import FAMILIES as linear_families, forward
from support.published_configs import PUBLISHED
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from tarnn.errors import UserError
from tarnn.families.by_name import FAMILIES, LACKING, family_of, open_program
from tarnn.families.composites import COMPOSITES
from tarnn.families.config import Config
from tarnn.families.weights import Weights
from tarnn.kernels.cpu import library
from tarnn.ops.backends import products_by
from tarnn.program.definition import new_states, run
from tarnn.program.instructions import Instruction, View
from tarnn.program.runtime import Runtime

PADDING_IS_TEXT = ("xLSTM-7b", "recurrentgemma-2b")  # for transformers, whose rows alone are right


@pytest.fixture(params=PUBLISHED)
def name(request):
    return request.param


@pytest.fixture
def folder(name, tmp_path):
    """A folder with the published config.json."""
    return saved(name, tmp_path)


def saved(name, folder, **changes):
    model_of(name).save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps(fields_of(name) | changes))
    return folder


def stored(program):
    """Weights as the checkpoint has them: all but A of selective scans, which is computed from A_log."""
    return [x for i in program.instructions for role, x in i.weights.items() if role != "A"]


def rows(*lengths):
    generator = torch.Generator().manual_seed(len(lengths))
    return [torch.randint(3, 99, (n,), generator=generator) for n in lengths]


@torch.no_grad()
def allowed(model, ids, logits):
    """Twice the largest difference between the ways of transformers: in float64, and token by token behind the first two.

    Steps are others where Δ is limited, which transformers does in prompts alone.
    """
    ways, cache = [], None
    if not any(limits_steps(x) for x in model.modules()):
        for place in torch.arange(ids.shape[1])[None].tensor_split(tuple(range(2, ids.shape[1])), 1):
            out, cache = forward(model, ids[:, place[0]], cache, place)
            ways.append((out - logits[:, place[0]]).abs().max())
    ways.append((copy.deepcopy(model).double()(input_ids=ids).logits - logits).abs().max())
    return 2 * max(ways).item()


def limits_steps(module, reached=0.01):
    """Whether a mixer has a least Δ above `reached`, which random models reach often, or a largest one."""
    least, most = getattr(module, "time_step_limit", None) or (0.0, float("inf"))
    return least > reached or most < float("inf")


@torch.no_grad()
def test_logits(name, folder):
    model, ids = model_of(name), torch.stack(rows(23, 23, 23))
    logits = model(input_ids=ids).logits
    difference = (defined(open_program(folder), ids) - logits).abs().max().item()
    assert difference <= allowed(model, ids, logits)
    assert logits.std() > 0.02


@torch.no_grad()
@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_of_variants(variant, tmp_path):
    model, ids = model_of(variant), torch.stack(rows(23, 23, 23))
    logits = model(input_ids=ids).logits
    difference = (defined(open_program(saved(variant, tmp_path)), ids) - logits).abs().max().item()
    assert difference <= allowed(model, ids, logits)


@torch.no_grad()
def test_time_steps_are_limited_in_steps_too(tmp_path):
    """transformers limits Δ in prompts alone: a prompt is what each step equals here."""
    name, limit = "Mamba-Codestral-7B", (0.3, 0.5)
    model, ids = copy.deepcopy(model_of(name)), torch.stack(rows(17))
    free = model(input_ids=ids).logits
    for layer in model.backbone.layers:
        layer.mixer.time_step_limit = limit
    logits = model(input_ids=ids).logits
    program = open_program(saved(name, tmp_path, time_step_limit=limit))
    torch.testing.assert_close(defined(program, ids).float(), logits, rtol=0, atol=1e-4)
    assert (logits - free).abs().max() > 0.1


@pytest.mark.parametrize(("name", "blocks"), [("Zamba2-1.2B", "3.shared"), ("Zamba-7B-v1", "2.shared")])
def test_a_shared_block_is_packed_once(name, blocks):
    """Where layers do not share, each has a block of its own."""
    tensors = {path: x.clone() for path, x in model_of(name).state_dict().items()}
    configs = [Config(fields_of(name) | {"tie_word_embeddings": tied}) for tied in (True, False)]
    shared, apart = (runtime_of(family_of(x)(x, Weights.of(tensors))).nbytes for x in configs)
    block = sum(x.nbytes for path, x in tensors.items() if blocks in path and "adapter" not in path and x.ndim > 1)
    assert apart - shared >= block


def test_a_block_that_is_not_shared_is_refused(tmp_path):
    folder = saved("Zamba2-1.2B", tmp_path)
    file, path = folder / "model.safetensors", "shared_transformer.self_attn.q_proj.weight"
    tensors = load_file(file)
    first = tensors[f"model.layers.1.{path}"]
    save_file(tensors | {f"model.layers.3.{path}": first.clone()}, file)
    open_program(folder)
    save_file(tensors | {f"model.layers.3.{path}": first + 1}, file)
    with pytest.raises(UserError, match=rf"has other numbers in model.layers.3.{path} than in model.layers.1.{path}"):
        open_program(folder)


def test_filters_in_one_tensor_or_in_three(tmp_path):
    """OLMo-hybrid's folders have three; a live model has one."""
    program = open_program(saved("Olmo-Hybrid-7B", tmp_path))
    config = Config(fields_of("Olmo-Hybrid-7B"))
    live = family_of(config)(config, Weights.of(model_of("Olmo-Hybrid-7B").state_dict()))
    ids = torch.stack(rows(9))
    torch.testing.assert_close(defined(program, ids), defined(live, ids), rtol=0, atol=0)
    file = tmp_path / "model.safetensors"
    save_file(load_file(file) | {"model.layers.0.linear_attn.k_conv1d.weight": torch.ones(31, 1, 4)}, file)
    with pytest.raises(UserError, match="calls for 96 filters of width 4"):
        open_program(tmp_path)


def test_a_text_model_under_the_names_of_one_with_images(tmp_path):
    program = open_program(saved("Qwen3.5, text alone", tmp_path))
    ids, file = rows(5), tmp_path / "model.safetensors"
    expected = defined(program, ids)[0]
    save_file({x.replace("model.", "model.language_model."): y for x, y in load_file(file).items()}, file)
    torch.testing.assert_close(defined(open_program(tmp_path), ids)[0], expected, rtol=0, atol=0)


def test_heads_for_several_tokens_and_images_are_left(tmp_path):
    folder = saved("Qwen3.5-0.8B", tmp_path)
    tensors = load_file(folder / "model.safetensors")
    assert any(x.startswith("model.visual.") for x in tensors)
    save_file(tensors | {"mtp.fc.weight": torch.ones(3, 5)}, folder / "model.safetensors")
    open_program(folder)


@torch.no_grad()
def test_the_config_that_transformers_writes(name, tmp_path):
    model, ids = model_of(name), torch.stack(rows(9))
    model.save_pretrained(tmp_path)
    torch.testing.assert_close(
        defined(open_program(tmp_path), ids).float(), model(input_ids=ids).logits, rtol=0, atol=1e-4
    )


@torch.no_grad()
def test_greedy_tokens(name, folder):
    """Of 200 prompts, each next token is the most likely one here too. A cache is used where it keeps the limits of Δ."""
    prompts, model = torch.stack(rows(*[3] * 200)), model_of(name)
    cached = not any(limits_steps(x, 0.0) for x in model.modules())
    options = {"do_sample": False, "pad_token_id": 0, "eos_token_id": 2, "use_cache": cached}
    written = model.generate(prompts, max_new_tokens=2, min_new_tokens=2, **options)
    logits = defined(open_program(folder), written[:, :-1])[:, 2:]
    logits[..., 2] = -torch.inf  # the end, which min_new_tokens does not allow
    assert torch.equal(logits.argmax(-1), written[:, 3:])


@torch.no_grad()
def test_padded_on_the_left_is_a_row_alone(name, folder):
    lengths = (11, 4, 7)
    ids, mask = torch.zeros(3, 11, dtype=torch.int64), torch.zeros(3, 11, dtype=torch.int64)
    for i, row in enumerate(rows(*lengths)):
        ids[i, 11 - len(row) :], mask[i, 11 - len(row) :] = row, 1
    places = (mask.cumsum(1) - 1).clamp(min=0)
    if name in PADDING_IS_TEXT:
        out = torch.cat([model_of(name)(input_ids=x[None]).logits[:, -1:] for x in rows(*lengths)])
    else:
        out, _ = forward(model_of(name), ids, positions=places, attention_mask=mask)
    logits = defined(open_program(folder), rows(*lengths))
    torch.testing.assert_close(torch.stack([x[-1] for x in logits]).float(), out[:, -1], rtol=0, atol=1e-4)


@torch.no_grad()
def test_a_folder_in_bfloat16(name, tmp_path):
    """Weights stay in their type; numbers are those of the rounded model in float32."""
    model, ids = copy.deepcopy(model_of(name)), torch.stack(rows(9))
    model.bfloat16().save_pretrained(tmp_path)
    program = open_program(tmp_path)
    assert {x.dtype for x in stored(program) if x.ndim > 1 and x.shape[-1] > 4} == {torch.bfloat16}
    rounded = type(model).from_pretrained(tmp_path, dtype=torch.float32)
    rounded.set_experts_implementation("eager")
    for path, x in rounded.named_buffers():
        if path.endswith(("slope_rate", "_decay")):  # of MiniMax, which its folders hold rounded: ours are computed
            x.copy_(model_of(name).get_buffer(path))
    logits = rounded(input_ids=ids).logits
    torch.testing.assert_close(defined(program, ids).float(), logits, rtol=0, atol=1e-4)
    if library.available():
        runtime = Runtime(program, "bfloat16")  # which rounds no weight again
        out, _ = runtime.prefill(ids, runtime.new_state(1, 9), every=True)
        if products_by()["bfloat16"] == "float32":
            torch.testing.assert_close(out, logits, rtol=0, atol=1e-4)
        assert share_off(out, logits) < (0.04 if name in SENSITIVE else 0.02)  # rows of products are rounded


def test_steps_are_the_whole(name, folder):
    program, (ids,) = open_program(folder), rows(8)
    states, outputs = new_states(program, 1, dtype=torch.float64), []
    for i, token in enumerate(ids):
        (out,), states = run(program, [token[None]], states, positions=[i], dtype=torch.float64)
        outputs.append(out)
    torch.testing.assert_close(torch.cat(outputs), defined(program, [ids])[0], rtol=0, atol=1e-9)


def runtime_of(program, weights="float32"):
    if not library.available():
        pytest.skip("the compiled kernels can't be used")
    return Runtime(program, weights)


@torch.no_grad()
def test_compiled(name, folder):
    """The runtime is as near to the definition as float32 lets transformers be; rows and pieces change no bit."""
    program, ids = open_program(folder), torch.stack(rows(23, 23))
    runtime, exact = runtime_of(program), defined(program, ids)
    logits, _ = runtime.prefill(ids, runtime.new_state(2, 23), every=True)
    noise = (model_of(name)(input_ids=ids).logits - exact).abs().max()
    assert (logits - exact).abs().max() <= 4 * noise
    state, outputs = runtime.new_state(1, 23), []
    for piece in (ids[1:, :7], ids[1:, 7:8], ids[1:, 8:]):
        out, state = runtime.prefill(piece, state, every=True)
        outputs.append(out)
    assert torch.equal(torch.cat(outputs, 1)[0], logits[1])


SENSITIVE = {  # rounding grows twice as much:
    "Zamba2-1.2B",  # a whole block lies between what its layers read and add
    "Kimi-Linear-48B-A3B",  # norms magnify what the delta rule puts out, which is small
    "Ling-3.0-Flash",
}


@pytest.mark.parametrize(("weights", "most"), [("bfloat16", 0.025), ("int8", 0.1), ("int4", 0.65)])
def test_compiled_formats(name, folder, weights, most):
    """Rounded weights change the logits by a share of their size; one matrix in a wrong place would by all of it."""
    program, ids = open_program(folder), torch.stack(rows(23))
    runtime, exact = runtime_of(program, weights), defined(program, ids)
    logits, _ = runtime.prefill(ids, runtime.new_state(1, 23), every=True)
    most = most * 2 if name in SENSITIVE else most
    assert share_off(logits, exact) < most


def share_off(logits, exact):
    """By how much of their size logits are off: the median of tokens, some of which may choose other experts."""
    shares = (logits - exact).square().mean(-1) / exact.square().mean(-1)
    return shares.median().sqrt()


def test_large_weights_are_not_copied(name):
    """All but vectors are views of the tensors in the folder."""
    tensors = model_of(name).state_dict()
    config = Config(copy.deepcopy(PUBLISHED[name]))
    made = family_of(config)(config, Weights.of(tensors))
    places = {x.untyped_storage().data_ptr() for x in tensors.values()}
    large = [x for x in stored(made) if x.ndim > 1 and x.shape[-1] > 7]  # no filters
    assert all(x.untyped_storage().data_ptr() in places for x in large)


def test_a_key_that_is_not_known_is_refused(folder):
    config = json.loads((folder / "config.json").read_text())
    config.get("text_config", config)["logit_scale"] = 0.5
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match=r"logit_scale = 0.5 is not known for this family"):
        open_program(folder)


def test_tensors_must_be_those_of_the_config(folder):
    file = folder / "model.safetensors"
    tensors = load_file(file)
    taken = next(x for x in tensors if x.endswith("norm.weight"))
    save_file(tensors | {"model.extra.weight": torch.ones(2)}, file)
    with pytest.raises(UserError, match=r"weights that its config does not call for: model.extra.weight"):
        open_program(folder)
    save_file({x: y for x, y in tensors.items() if x != taken}, file)
    with pytest.raises(UserError, match=f"lacks the weights {taken}"):
        open_program(folder)
    lost = [x for x in tensors if x.endswith("norm.weight") and (".layers." in x or ".blocks." in x)][:2]
    save_file({x: y for x, y in tensors.items() if x not in lost}, file)
    with pytest.raises(UserError, match=r"lacks the weights \S+, \S+\. "):  # some have another name for one of them
        open_program(folder)
    save_file(tensors | {taken: tensors[taken].long()}, file)
    with pytest.raises(UserError, match=f"has {taken} in torch.int64; expected real numbers"):
        open_program(folder)
    save_file(tensors | {taken: torch.ones(3)}, file)
    with pytest.raises(UserError, match=rf"has {taken} of shape \(3,\) where the config calls for"):
        open_program(folder)


REFUSED = {
    "a window": ("Mistral-7B-v0.3", {"sliding_window": 4096}, "sliding_window must be null.* got 4096"),
    "windows in some layers": ("Qwen2.5-0.5B", {"use_sliding_window": True}, "use_sliding_window must be False"),
    "other heads": ("Llama-3.2-1B", {"num_key_value_heads": 3}, r"a divisor of num_attention_heads \(4\)"),
    "another function": ("Llama-3.2-1B", {"hidden_act": "gelu"}, "hidden_act must be 'silu'"),
    "another width of filters": ("LFM2-1.2B", {"conv_dim": 64}, "conv_dim must be 32 here; got 64"),
    "more experts a token than there are": (
        "LFM2-8B-A1B",
        {"num_experts_per_tok": 8},
        "num_experts_per_tok must be a whole number from 1 to 7 here; got 8",
    ),
    "more experts than weights": (
        "MiniMax-Text-01",
        {"num_local_experts": 9},
        r"gate.weight of shape \(7, 32\) where the config calls for \(9, 32\)",
    ),
    "other experts": (
        "Qwen3.5-35B-A3B",
        {"moe_intermediate_size": 12},
        r"of shape .* where the config calls for|moe_intermediate_size",
    ),
    "weights of experts that are no shares": (
        "Qwen3.5-MoE, text alone",
        {"norm_topk_prob": False},
        "norm_topk_prob must be True",
    ),
    "dense layers": ("Qwen3.5-MoE, text alone", {"mlp_only_layers": [0]}, "mlp_only_layers must be an empty list"),
    "a window of MiniMax": ("MiniMax-Text-01", {"sliding_window": 9}, "sliding_window must be None here; got 9"),
    "whole heads rotated": (
        "Lara-4-Mini-Base",
        {"rope_parameters": {"rope_type": "default", "rope_theta": 100.0, "partial_rotary_factor": 0.5}},
        r"partial_rotary_factor must be 1 .whole heads are rotated. here; got 0.5",
    ),
    "no number of key heads": ("Lara-4-Mini-Base", {"num_key_value_heads": None}, "lacks num_key_value_heads"),
    "another kind of layer": (
        "Lara-4-Mini-Base",
        {"layer_types": ["conv"] * 3},
        "layer_types must be a list of 'full_attention' or 'linear_attention' or 'sliding_attention' here; got 'conv'",
    ),
    "projections of other sizes": (
        "Lara-4-Mini-Base",
        {"linear_num_value_heads": 2},
        r"has model.layers.0.linear_attn.in_proj.weight of shape \(136, 32\) where the config calls for \(84, 32\)",
    ),
    "no gate": ("Qwen3.5, text alone", {"attn_output_gate": False}, "attn_output_gate must be True"),
    "other value heads": ("Olmo-Hybrid-7B", {"linear_num_value_heads": 6}, r"a multiple of linear_num_key_heads \(4\)"),
    "another width": ("Mamba-Codestral-7B", {"num_heads": 4}, "64 channels .* divided by head_dim"),
    "experts that are not there": (
        "Granite-4.0-h-micro",
        {"num_local_experts": 4, "num_experts_per_tok": 2},
        "lacks the weights model.layers.0.block_sparse_moe.router.layer.weight",
    ),
    "no expert of a token": (
        "Granite-4.0-h-tiny",
        {"num_experts_per_tok": 0},
        "num_experts_per_tok must be a whole number from 1 to 7 here; got 0",
    ),
    "several shared experts": (
        "Nemotron-3-Nano-30B-A3B",
        {"n_shared_experts": 2},
        "n_shared_experts must be 1 here; got 2",
    ),
    "groups of experts": (
        "Nemotron-3-Nano-30B-A3B",
        {"n_group": 3},
        "n_group must be 1, or a divisor of the 8 experts",
    ),
    "two lists of layers": (
        "Nemotron-H-8B",
        {"layer_types": ["mamba"] * 5},
        "must be 'MMMMM', as the list of layers says",
    ),
    "other layers with softmax": (
        "Bamba-9B",
        {"layer_types": ["mamba"] * 2},
        "layer_types must be as attn_layer_indices",
    ),
    "another share rotated": (
        "Bamba-9B",
        {"partial_rotary_factor": 1.0},
        "partial_rotary_factor must be 0.5 here; got 1.0",
    ),
    "other heads of mixers": ("Bamba-9B", {"mamba_n_heads": 4}, r"64 channels divided by mamba_d_head \(8\)"),
    "groups": (
        "Falcon-H1-0.5B",
        {"mamba_n_groups": 4},
        r"mamba_n_groups must be a divisor of the number of heads \(6\)",
    ),
    "a limit of steps": (
        "Zamba2-1.2B",
        {"time_step_limit": [0.1, 0.5]},
        r"must be \[0, Infinity\] .time_step_min alone",
    ),
    "other positions": (
        "Granite-4.0-h-micro",
        {"position_embedding_type": "alibi"},
        "must be 'rope', 'nope' or null here",
    ),
    "gates of another kind": (
        "xLSTM-7b",
        {"forget_gate_soft_cap": 9.0},
        "forget_gate_soft_cap must be 15.0 here; got 9.0",
    ),
    "matrices in one": ("xLSTM-7b", {"weight_mode": "fused"}, "weight_mode must be 'single'"),
    "other names, other sizes": ("mamba-130m-hf", {"d_inner": 96}, "d_inner must be 64 here; got 96"),
    "no turns": ("recurrentgemma-2b", {"block_types": []}, "block_types must be a list of one kind or more"),
    "latents with positions": ("Kimi-Linear-48B-A3B", {"mla_use_nope": False}, "mla_use_nope must be True"),
    "fewer keys than queries": ("Ling-3.0-Flash", {"num_key_value_heads": 1}, "num_key_value_heads must be 3"),
    "groups of one expert": (
        "Ling-3.0-Flash",
        {"n_group": 8},
        "n_group must be 1, or a divisor of the 8 experts with two or more",
    ),
    "names that differ": ("Ling-3.0-Flash", {"num_experts": 4, "num_local_experts": 8}, "num_local_experts must be 4"),
    "experts by another name": ("Jamba-v0.1", {"num_local_experts": 5}, "num_local_experts must be 7 here; got 5"),
    "another function of mixers": ("Zamba-7B-v1", {"hidden_mamba_act": "gelu"}, "hidden_mamba_act must be 'silu' here"),
    "heads that don't fit": ("Zamba-7B-v1", {"n_mamba_heads": 3}, r"a divisor of mamba_expand · hidden_size \(64\)"),
    "a block of another width": ("Zamba-7B-v1", {"attention_hidden_size": 32}, "attention_hidden_size must be 64 here"),
    "long contexts": ("Qwen3-0.6B", {"rope_scaling": {"type": "yarn", "factor": 4.0}}, "type 'yarn' are not handled"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_what_is_not_handled_is_refused(kind, tmp_path):
    name, changes, message = REFUSED[kind]
    saved(name, tmp_path, **changes)
    with pytest.raises(UserError, match=message):
        open_program(tmp_path)


def test_a_window_that_never_matters_bounds_positions(tmp_path):
    assert open_program(saved("Mistral-7B-v0.3", tmp_path, sliding_window=40000)).limit == 40000


OPTIONS = {
    "biases of convolutions": ("LFM2-1.2B", {"conv_bias": True}),
    "wider": ("LFM2-1.2B", {"block_ffn_dim_multiplier": 1.3}),
    "as wide as it says": ("LFM2-1.2B", {"block_auto_adjust_ff_dim": False}),
    "a head of its own": ("LFM2-1.2B", {"tie_embedding": False}),
    "no gate": ("LFM3-1.7B", {"use_attention_gate": False}),
    "no norms behind": ("LFM3-1.7B", {"use_sandwich_norm": False}),
    "biases": ("LFM3-1.7B", {"attention_bias": True}),
    "defaults": ("LFM3-1.7B", {"rope_parameters": None, "layer_types": None, "sliding_window": None}),
}


@torch.no_grad()
@pytest.mark.parametrize("case", OPTIONS)
def test_options_that_released_models_leave(case, monkeypatch, tmp_path):
    name, changes = OPTIONS[case]
    fields = {key: x for key, x in (PUBLISHED[name] | changes).items() if key not in changes or x is not None}
    monkeypatch.setitem(PUBLISHED, "changed", fields)
    model_of("changed").save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(fields))
    ids = torch.stack(rows(9))
    logits = MODELS.pop("changed")(input_ids=ids).logits
    torch.testing.assert_close(defined(open_program(tmp_path), ids).float(), logits, rtol=0, atol=1e-4)


OF_EXPERTS = (
    "Qwen3.5-35B-A3B",
    "Qwen3-Next-80B-A3B",
    "LFM2-8B-A1B",
    "every number of LFM2-MoE",
    "MiniMax-Text-01",
    "every number of Lara-mini",
    "Nemotron-3-Nano-30B-A3B",
    "Nemotron 3, experts with all options",
    "Granite-4.0-h-tiny",
    "Jamba-v0.1",
)
TOLERANCE, LEFT_OUT = 1e-4, 0.01


def put_out(program, i, view):
    """Return the program up to its i-th instruction, putting out a view."""
    out = View(len(program.registers), 0, 1, view.size)
    head = Instruction("head", (view,), (out,), {"weight": torch.eye(view.size)})
    return replace(
        program, instructions=(*program.instructions[: i + 1], head), registers=(*program.registers, view.size)
    )


def routed(program, ids):
    """Numbers and weights of the chosen, and logits, of each router."""
    places = [i for i, x in enumerate(program.instructions) if x.kind == "route"]
    for i in places:
        x = program.instructions[i]
        yield [defined(put_out(program, i, view), ids).flatten(0, 1) for view in (*x.outputs, *x.inputs)]


@torch.no_grad()
@pytest.mark.parametrize("case", OF_EXPERTS)
def test_choices_of_experts_are_those_of_transformers(case, tmp_path):
    """The same experts wherever the choice is no near tie."""
    program, ids, seen = open_program(saved(case, tmp_path)), torch.stack(rows(23, 23, 23)), []
    model = model_of(case)
    routers = [x for x in model.modules() if type(x).__name__.endswith("Router")]
    hooks = [x.register_forward_hook(lambda _, __, out: seen.append(out)) for x in routers]
    model(input_ids=ids)
    for hook in hooks:
        hook.remove()
    found = list(routed(program, ids))
    assert len(found) == len(seen) > 0
    for (chosen, weights, logits), (theirs, their_weights, their_chosen) in zip(found, seen, strict=True):
        torch.testing.assert_close(logits.float(), theirs.flatten(0, -2).float(), rtol=0, atol=TOLERANCE)
        order = their_chosen.argsort(-1)
        same = (chosen == their_chosen.gather(-1, order)).all(-1)
        assert (~same).float().mean() <= LEFT_OUT
        expected = their_weights.gather(-1, order)
        torch.testing.assert_close(weights[same].float(), expected[same].float(), rtol=0, atol=TOLERANCE)


@pytest.mark.thorough
def test_damaged_configs_are_refused_in_a_sentence(name):
    check_refusals(PUBLISHED[name], model_of(name).state_dict())


@pytest.mark.thorough
def test_transformers_is_not_loaded(tmp_path):
    folders = [saved(name, tmp_path / str(i)) for i, name in enumerate(PUBLISHED)]
    code = (
        "import sys; from tarnn.families.by_name import open_program; [open_program(x) for x in sys.argv[1:]]; "
        "assert 'transformers' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code, *map(str, folders)], check=True)


def test_an_unknown_family_is_named():
    with pytest.raises(
        UserError,
        match=r"models of type 'gpt2' are not handled; expected one of bailing_hybrid, bamba, .*llama, mamba, mamba2",
    ):
        family_of(Config({"model_type": "gpt2"}))


def test_every_family_has_a_released_config():
    others = {"rwkv7", "tarnn", "tarnn_image", *COMPOSITES}
    assert {x["model_type"] for x in PUBLISHED.values()} == set(FAMILIES) - others


def test_what_does_not_open_is_refused_by_what_lacks():
    """Each linear model of transformers opens, or one sentence says what tarnn lacks for it."""
    for name, make in linear_families.items():
        kind = make().model_type
        if kind not in FAMILIES:
            with pytest.raises(
                UserError, match=f"models of type '{kind}' are not handled: tarnn lacks .{{20,}}[.]$"
            ) as error:
                family_of(Config({"model_type": kind}))
            assert str(error.value).count(". ") == 0, name


def test_models_that_lack_something_are_known_to_transformers():
    known = {getattr(x, "model_type", None) for x in map(hf.__dict__.get, dir(hf)) if isinstance(x, type)}
    known |= {*CONFIG_MAPPING, *("_".join((x, "text")) for x in CONFIG_MAPPING)}
    assert set(LACKING) <= known
