"""Generation with a cache of constant size gives the tokens that generation without a cache gives."""

import pytest
import torch
from support.families import FAMILIES, model_of
from support.linear_families import TOKENS, linear_model
from transformers import StaticCache

from tarnn.conversion import constant_cache, save_cache, set_options
from tarnn.huggingface.versions import CACHE

DECODERS = ["Llama", "GPT-2", "Qwen3", "Gemma 3"]
pytestmark = pytest.mark.filterwarnings("ignore")  # what transformers has to say of random configs


@pytest.fixture(params=DECODERS)
def model(request):
    made = model_of(FAMILIES[request.param])
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.mul_(4 if parameter.ndim > 1 else 1)  # so that tokens differ
    made.set_attn_implementation("tarnn_hybrid")
    set_options(made, window=6, sinks=2, slots=3, feature_map="favor", far_bias=0.1)
    made.generation_config.eos_token_id, made.generation_config.pad_token_id = None, 0
    return made


@pytest.fixture
def prompt():
    torch.manual_seed(0)
    ids = torch.randint(3, 99, (2, 30))
    mask = torch.ones_like(ids)
    mask[1, :9] = 0  # padded on the left
    return ids, mask


@pytest.mark.parametrize("options", [{}, {"num_beams": 3}, {"num_return_sequences": 2, "num_beams": 2}])
def test_tokens_are_those_of_the_uncached_run(model, prompt, options):
    ids, mask = prompt
    options = {"max_new_tokens": 12, "attention_mask": mask, "do_sample": False, **options}
    expected = model.generate(ids, use_cache=False, **options)
    assert torch.equal(model.generate(ids, **{CACHE: constant_cache(model)}, **options), expected)
    assert torch.equal(model.generate(ids, **options), expected), "with a growing cache"


def test_a_static_cache_is_refused(model, prompt):
    ids, mask = prompt
    with pytest.raises(ValueError, match="a StaticCache, which has empty places"):
        model.generate(ids, attention_mask=mask, cache_implementation="static", max_new_tokens=2)
    with torch.no_grad(), pytest.raises(ValueError, match="a StaticCache, which has empty places"):
        model(input_ids=ids, **{CACHE: StaticCache(config=model.config, max_cache_len=50)})


def test_its_size_does_not_grow(model, prompt):
    if "sliding_attention" in (getattr(model.config, "layer_types", None) or []):
        pytest.skip("its sliding layers grow to their window")
    cache, sizes = constant_cache(model), []
    for _ in range(3):
        model(input_ids=prompt[0][:, :20], **{CACHE: cache})
        sizes.append(sum(layer.state.nbytes for layer in cache.layers))
    assert sizes[0] == sizes[1] == sizes[2]


@torch.no_grad()
@pytest.mark.parametrize("rows", [1, 3])
def test_another_batch_is_refused(model, prompt, rows):
    cache, ids = constant_cache(model), prompt[0]
    model(input_ids=ids, **{CACHE: cache})
    other = ids[:1, :1].expand(rows, -1)
    with pytest.raises(ValueError, match=f"holds 2 sequences, and the batch has {rows}; begin a new one"):
        model(input_ids=other, **{CACHE: cache})
    if rows == 1:  # and taken as said
        cache.batch_select_indices(torch.tensor([1]))
        expected = model(input_ids=torch.cat([ids[1:], other], 1), use_cache=False).logits[:, -1:]
        torch.testing.assert_close(model(input_ids=other, **{CACHE: cache}).logits, expected, rtol=1e-4, atol=1e-4)


def test_a_model_with_another_attention_is_refused():
    with pytest.raises(ValueError, match="tarnn_hybrid"):
        constant_cache(model_of(FAMILIES["Llama"]))


@torch.no_grad()
@pytest.mark.parametrize("prompt_length", [5, 140])
def test_cropping_is_never_having_read(model, prompt_length):
    """Reads and crops (−n) in turn; the window (6) has long been full, and slots are taken."""
    if prompt_length > model.config.max_position_embeddings:
        pytest.skip("it has no more positions")
    torch.manual_seed(0)
    ids = torch.randint(3, 99, (2, 150))
    for steps in ((4, 0, 1, -1, 1), (4, 1, 1, -6, 3, -2, 1), (-1, 2, 1, -2, 4)):
        cache, held = constant_cache(model), 0
        cache.activate_past_recording()
        for step in (prompt_length, *steps):
            if step <= 0:
                cache.crop(step)
            else:
                last = model(input_ids=ids[:, held : held + step], **{CACHE: cache}).logits[:, -1]
            held += step
            assert cache.get_seq_length() == held
        expected = model(input_ids=ids[:, :held], use_cache=False).logits[:, -1]
        torch.testing.assert_close(last, expected, rtol=1e-4, atol=1e-4, msg=lambda m, x=steps: f"{x}: {m}")


@torch.no_grad()
def test_a_crop_of_what_was_not_recorded_leaves_the_cache_as_it_was(model, prompt):
    cache, token = constant_cache(model), prompt[0][:, :1]
    model(input_ids=prompt[0], **{CACHE: cache})
    cache.activate_past_recording()
    model(input_ids=token, **{CACHE: cache})
    with pytest.raises(ValueError, match=r"takes n up to 1 here; got crop\(-2\)"):
        cache.crop(-2)
    last = model(input_ids=token, **{CACHE: cache}).logits[:, -1]
    expected = model(input_ids=torch.cat([prompt[0], token, token], 1), use_cache=False).logits[:, -1]
    torch.testing.assert_close(last, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("how", ["prompt lookup", "assistant"])
def test_assisted_generation_gives_the_same_text(model, prompt, how):
    ids = torch.cat([prompt[0][:1], prompt[0][:1, :10]], 1)
    options = {"do_sample": False, "max_new_tokens": 15}
    choice = {"prompt_lookup_num_tokens": 4} if how == "prompt lookup" else {"assistant_model": model}
    expected = model.generate(ids, use_cache=False, **options)
    assert torch.equal(model.generate(ids, **{CACHE: constant_cache(model)}, **choice, **options), expected)
    assert torch.equal(model.generate(ids, **choice, **options), expected), "with a growing cache"


def converted(name):
    """A linear family whose attention layers, of transformers, were given options."""
    made = linear_model(name)
    made.set_attn_implementation("tarnn_hybrid")
    set_options(made, window=6, sinks=2, feature_map="favor", far_bias=0.1)
    made.generation_config.eos_token_id = None
    return made


@pytest.mark.parametrize("name", ["Qwen3.5", "OLMo-hybrid", "Jamba", "Bamba", "Granite 4", "Nemotron-H", "LFM2"])
@pytest.mark.parametrize("options", [{}, {"num_beams": 2}])
def test_linear_layers_keep_what_transformers_keeps(name, options):
    model, cache = converted(name), None
    options = {"max_new_tokens": 8, "do_sample": False, **options}
    expected = model.generate(TOKENS[:, :30], use_cache=False, **options)
    cache = constant_cache(model)
    assert torch.equal(model.generate(TOKENS[:, :30], **{CACHE: cache}, **options), expected)
    sizes = [cache.layers[1].state.nbytes]
    model.generate(expected, **{CACHE: cache}, **options)
    assert [cache.layers[1].state.nbytes] == sizes


@pytest.mark.parametrize(
    ("name", "why"), [("MiniMax", "a cache of its own"), ("Falcon-H1", "layer 0 of"), ("Zamba", "layer 1 of")]
)
def test_a_cache_that_would_grow_all_the_same_is_refused(name, why):
    with pytest.raises(ValueError, match=rf"{why}.* would not make its cache constant"):
        constant_cache(converted(name))


def test_a_cache_with_states_of_transformers_is_not_saved(tmp_path):
    model = converted("Qwen3.5")
    with pytest.raises(ValueError, match="layer 0 of this cache is a LinearAttentionLayer"):
        save_cache(tmp_path / "cache", model, constant_cache(model))
