"""What people do with models of transformers, with tarnn's ops in them: generate, train, pack, fine-tune, compile."""

import os
import subprocess
import sys
import textwrap

import pytest
import torch
from support.linear_families import (
    FAMILIES,
    PADDED,
    TOKENS,
    WITHOUT,
    in_turns,
    linear_model,
    nightly_but,
    whole,
    with_gaps,
)
from transformers import DataCollatorWithFlattening, DynamicCache, Qwen3_5Config, Qwen3_5ForConditionalGeneration

import tarnn
from tarnn.huggingface.versions import as_called

pytestmark = pytest.mark.filterwarnings("ignore")
SOME = ["Qwen3-Next", "Kimi Linear", "Mamba-2", "Mamba", "LFM2", "MiniMax", "RecurrentGemma"]


def gradients(model, **options):
    model.zero_grad()
    out = model(input_ids=TOKENS, use_cache=False, **options)[0]
    (out * torch.linspace(-1, 1, out.numel()).view(out.shape).sin()).sum().backward()
    return {path: x.grad.clone() for path, x in model.named_parameters() if x.grad is not None}


def assert_same(ours, theirs, tolerance=1e-4):
    assert set(ours) == set(theirs)
    for path, expected in theirs.items():
        assert (ours[path] - expected).abs().amax() <= tolerance * expected.abs().amax() + 1e-7, path


@pytest.mark.parametrize("name", SOME)
def test_generate(name):
    """The same tokens as transformers for each prompt alone; the shorter one has padding before it."""
    model = linear_model(name)
    mask = torch.ones(2, 30, dtype=torch.int64)
    mask[1, :PADDED] = 0
    ids = torch.where(mask.bool(), TOKENS[:, :30], 0)
    options = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False}
    first, second = model.generate(ids[:1], **options), model.generate(ids[1:, PADDED:], **options)
    with tarnn.patch_transformers():
        ours = model.generate(ids, attention_mask=mask, **options)
    assert torch.equal(ours[0], first[0])
    assert torch.equal(ours[1, PADDED:], second[0])


@torch.no_grad()
@pytest.mark.parametrize("gap", [[0, 0, 1, 1, 1, 1], [1, 1, 1, 0, 0, 0], [0, 0, 0, 0, 0, 0], [1, 0, 1, 1, 0, 1]])
@pytest.mark.parametrize("name", nightly_but(SOME, [x for x in FAMILIES if (x, "right") not in WITHOUT]))
def test_padding_among_the_new_tokens_of_a_cache(name, gap):
    """The second row, as if it had been alone."""
    model = linear_model(name)
    with tarnn.patch_transformers():
        found = with_gaps(model, gap)
        expected = whole(model, TOKENS[1:, : found.shape[1]])
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("name", SOME)
@pytest.mark.parametrize("options", [{"use_cache": False}, {"cache_implementation": "static"}])
def test_padded_prompts_without_a_cache_or_with_another(name, options):
    if "cache_implementation" in options and name in ("MiniMax", "RecurrentGemma"):
        pytest.skip("transformers has no static cache for it")
    model, mask = linear_model(name), torch.ones(2, 20, dtype=torch.int64)
    mask[1, :5] = 0
    ids = torch.where(mask.bool(), TOKENS[:, :20], 0)
    usual = {"attention_mask": mask, "max_new_tokens": 4, "min_new_tokens": 4, "do_sample": False}
    with tarnn.patch_transformers():
        assert torch.equal(model.generate(ids, **usual, **options), model.generate(ids, **usual))


def test_gradient_checkpointing_reaches_the_layers_of_jamba():
    """What is checkpointed runs twice."""
    model, calls = linear_model("Jamba").train(), []
    model.gradient_checkpointing_enable()
    with tarnn.patch_transformers():
        mixers = [x for x in model.modules() if type(x).__name__ == "JambaMambaMixer"]
        for mixer in mixers:
            mixer.register_forward_hook(lambda *_: calls.append(1))
        found = gradients(model)
        assert len(calls) == 2 * len(mixers) > 0
        with pytest.raises(ValueError, match="Turn gradient checkpointing off"):
            model(input_ids=TOKENS, position_ids=torch.arange(70).expand(2, -1) % 35, use_cache=False)
    model.gradient_checkpointing_disable()
    assert_same(found, gradients(model))


@pytest.mark.parametrize("name", ["Qwen3-Next", "Mamba-2"])
def test_layers_of_caches_keep_their_types(name):
    model = linear_model(name)
    with tarnn.patch_transformers(), torch.no_grad():
        plain, recorded = (DynamicCache(config=model.config) for _ in range(2))
        recorded.activate_past_recording()
        kinds = [type(x) for x in plain.layers]
        for cache in (plain, recorded):
            model(TOKENS[:, :20], **as_called(model.forward, cache))
            assert [type(x) for x in cache.layers] == kinds


@pytest.mark.parametrize("name", SOME)
def test_bfloat16_is_no_less_exact(name):
    model = linear_model(name)
    with torch.no_grad():
        exact = whole(model)
        model.bfloat16()
        theirs = whole(model)
        with tarnn.patch_transformers():
            ours = whole(model)
    assert ours.dtype == theirs.dtype
    assert (ours - exact).square().mean() <= 2 * (theirs - exact).square().mean()


@pytest.mark.parametrize("name", SOME)
def test_autocast(name):
    model = linear_model(name)
    exact = gradients(model)
    with torch.autocast("cpu", torch.bfloat16):
        theirs = gradients(model)
        with tarnn.patch_transformers():
            ours = gradients(model)
    for path, expected in exact.items():
        error = (theirs[path] - expected).square().sum()
        assert (ours[path] - expected).square().sum() <= 4 * error + 1e-4 * expected.square().sum() + 1e-12, path


@pytest.mark.parametrize("name", [x for x in SOME if x != "MiniMax"])  # whose experts transformers itself computes anew
def test_gradient_checkpointing(name):
    model = linear_model(name).train()
    theirs = gradients(model)
    model.activation_checkpointing_enable()
    with tarnn.patch_transformers():
        assert_same(gradients(model), theirs)


@pytest.mark.parametrize("name", ["Qwen3-Next", "Mamba-2", "Mamba", "MiniMax"])
def test_tokens_one_by_one_with_gradients_enabled(name):
    """No state is written to in place where a graph may be kept."""
    model = linear_model(name)
    theirs = in_turns(model, (9, 1, 1))
    with tarnn.patch_transformers():
        torch.testing.assert_close(in_turns(model, (9, 1, 1)), theirs, atol=1e-5, rtol=1e-5)


def collated(**options):
    """Rows of 30 and 70 tokens as transformers packs them."""
    rows = [{"input_ids": TOKENS[0, :30]}, {"input_ids": TOKENS[1]}]
    return DataCollatorWithFlattening(return_tensors="pt", **options)(rows)


@pytest.mark.parametrize("name", ["Qwen3-Next", "Mamba-2", "Jamba", "Mamba"])
@pytest.mark.parametrize("how", ["positions", "bounds", "numbers"])
def test_packed_rows_as_the_collator_makes_them(name, how):
    model = linear_model(name)
    batch = collated(return_flash_attn_kwargs=how == "bounds", return_seq_idx=how == "numbers")
    batch.pop("labels")
    if how != "positions" and "Mamba" in name:
        batch.pop("position_ids")
    with tarnn.patch_transformers(), torch.no_grad():
        packed = model(**batch)[0]
        alone = torch.cat([whole(model, TOKENS[:1, :30]), whole(model, TOKENS[1:])], dim=1)
    torch.testing.assert_close(packed, alone, atol=1e-5, rtol=1e-5)


def test_packed_rows_that_a_model_would_compute_again_without_bounds_are_refused():
    model = linear_model("Mamba").train()
    model.activation_checkpointing_enable()
    with tarnn.patch_transformers(), pytest.raises(ValueError, match="Turn gradient checkpointing off"):
        model(**collated())


@pytest.mark.parametrize("alone", [False, True])
def test_lora(alone):
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=2, target_modules=["in_proj_qkvz", "out_proj"], init_lora_weights=False)
    model = peft.get_peft_model(linear_model("Qwen3-Next"), config)
    theirs = gradients(model)
    assert theirs
    assert all("lora" in path for path in theirs)
    with tarnn.patch_transformers(model if alone else None):
        assert_same(gradients(model), theirs)


@torch.no_grad()
@pytest.mark.parametrize("alone", [False, True])
def test_a_model_that_contains_one(alone):
    text = FAMILIES["Qwen3.5"]().to_dict()
    vision = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 32}
    torch.manual_seed(0)
    model = Qwen3_5ForConditionalGeneration(Qwen3_5Config(text_config=text, vision_config=vision)).eval()
    theirs = whole(model)
    with tarnn.patch_transformers(model if alone else None):
        ours = whole(model)
    assert not torch.equal(ours, theirs)
    torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=1e-5)


@pytest.mark.compile
@pytest.mark.thorough
def test_compiled_models_call_our_ops():
    model, called = linear_model("Qwen3-Next"), set()

    def backend(graph, inputs):
        called.update(str(node.target) for node in graph.graph.nodes if "tarnn" in str(node.target))
        return graph.forward

    with tarnn.patch_transformers(), torch.no_grad():
        expected = whole(model)
        torch.testing.assert_close(whole(torch.compile(model, backend=backend)), expected, atol=1e-5, rtol=1e-5)
    assert any("delta" in name for name in called)
    assert any("convolution" in name for name in called)


@pytest.mark.slow
def test_with_a_library_for_gpus_and_no_gpu(tmp_path):
    """transformers takes an installed fla for granted, whose kernels find no driver on a CPU."""
    (tmp_path / "fla").mkdir()
    (tmp_path / "fla" / "__init__.py").write_text(
        textwrap.dedent("""
            def chunk_gated_delta_rule(q, k, v, g, beta, **kwargs):
                raise RuntimeError("0 active drivers ([]). There should only be one.")

            fused_recurrent_gated_delta_rule = chunk_gated_delta_rule
        """)
    )
    code = """
        import pytest, torch, tarnn, transformers as hf
        size = {"vocab_size": 9, "hidden_size": 8, "num_hidden_layers": 1, "intermediate_size": 8, "num_attention_heads": 2}
        heads = {"linear_num_key_heads": 2, "linear_num_value_heads": 2, "linear_key_head_dim": 4, "linear_value_head_dim": 4}
        model = hf.Qwen3_5ForCausalLM(hf.Qwen3_5TextConfig(**size, **heads, layer_types=["linear_attention"]))
        ids = torch.tensor([[1, 2, 3]])
        with pytest.raises(RuntimeError, match="drivers"):
            model(ids, use_cache=False)
        with tarnn.patch_transformers():
            assert model(ids, use_cache=False).logits.isfinite().all()
    """
    path = {"PYTHONPATH": os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])}
    subprocess.run([sys.executable, "-c", textwrap.dedent(code)], check=True, env={**os.environ, **path})
