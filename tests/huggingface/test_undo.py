"""Patched models of transformers forget tokens: caches are cropped, and assisted generation gives the same text."""

import copy
import itertools
import pickle

import pytest
import torch
from support.linear_families import FAMILIES, forward, linear_model, nightly_but, whole
from transformers import Cache, DynamicCache

import tarnn

pytestmark = pytest.mark.filterwarnings("ignore")  # what transformers has to say of random configs and of its fallbacks
WITHOUT = {  # and how transformers refuses them
    "MiniMax": "ssisted decoding requires a cache",
    "RecurrentGemma": "not supported with stateful models",
    "xLSTM": "not supported with stateful models",
}
# convolutions alone
CROPPED_BY_TRANSFORMERS = [x for x in ("LFM2", "LFM2-MoE", "LFM3", "Inkling", "Inkling 2") if x in FAMILIES]
NAMES = [x for x in FAMILIES if x not in WITHOUT]
SOME = ["Qwen3-Next", "Kimi Linear", "Jamba", "Falcon-H1", "LFM2", "Mamba-2"]
IDS = torch.randint(3, 99, (2, 150), generator=torch.Generator().manual_seed(2))


def follow(model, steps):
    """The last output after these steps with one cache, and how many tokens it holds: n reads n tokens, −n forgets n."""
    cache, held = DynamicCache(config=model.config.get_text_config(decoder=True)), 0
    cache.activate_past_recording()
    for step in steps:
        if step <= 0:
            cache.crop(step)
        else:
            places = torch.arange(held, held + step).expand(len(IDS), -1)
            out, cache = forward(model, IDS[:, held : held + step], cache, places)
        held += step
    return out[:, -1], held


@torch.no_grad()
@pytest.mark.parametrize("prompt", [2, 140])
@pytest.mark.parametrize("name", nightly_but(SOME, NAMES))
def test_cropping_is_never_having_read(name, prompt):
    model = linear_model(name)
    for steps in (
        (4, 0, 1, -1, 1),
        (4, 1, 1, -6, 3, -2, 1),
        (-1, 2, 1, -1, -2, 4),  # transformers' own layers forget what lies further back with each crop
    )[: 2 if name in CROPPED_BY_TRANSFORMERS else 3]:
        with tarnn.patch_transformers():
            last, held = follow(model, (prompt, *steps))
            expected = whole(model, IDS[:, :held])[:, -1]
        torch.testing.assert_close(last, expected, atol=1e-4, rtol=1e-4, msg=lambda m, x=steps: f"{x}: {m}")


def prompts(count):
    """Short texts in which something repeats, so that some candidates are right."""
    generator = torch.Generator().manual_seed(3)
    for _ in range(count):
        ids = torch.randint(3, 99, (1, int(torch.randint(2, 9, (), generator=generator))), generator=generator)
        yield torch.cat([ids, ids, ids[:, :2]], dim=1)


def relative(name):
    """A model that often agrees with the family's: its weights, and a little noise."""
    model, generator = linear_model(name), torch.Generator().manual_seed(4)
    with torch.no_grad():
        for x in model.parameters():
            x.add_(0.05 * x.std(correction=0) * torch.randn(x.shape, generator=generator))
    return model


@pytest.fixture
def rejected(monkeypatch):
    """How many candidates were forgotten in each round."""
    counts, crop = [], Cache.crop
    monkeypatch.setattr(Cache, "crop", lambda cache, n: counts.append(-n) or crop(cache, n))
    return counts


GREEDY = {"do_sample": False, "max_new_tokens": 12, "min_new_tokens": 12, "pad_token_id": 0}
GENERATING = [x for x in NAMES if x != "GLM-5-next"]  # whose head is that of its images


def assert_same_text(name, count):
    """By candidates that were looked up in the text, and by those of an assistant, in turn."""
    model = linear_model(name)
    choices = ({"prompt_lookup_num_tokens": 5}, {"assistant_model": relative(name)})
    with tarnn.patch_transformers():
        for ids, choice in zip(prompts(count), itertools.cycle(choices), strict=False):
            assert torch.equal(model.generate(ids, **choice, **GREEDY), model.generate(ids, **GREEDY))


@pytest.mark.parametrize("name", SOME)
def test_assisted_generation_gives_the_same_text(name, rejected):
    assert_same_text(name, 4)
    assert min(rejected) == 0
    assert max(rejected) > 2


@pytest.mark.slow
@pytest.mark.parametrize("name", GENERATING)
def test_assisted_generation_gives_the_same_text_for_many_prompts(name):
    assert_same_text(name, 200 if name in ("Qwen3-Next", "Mamba-2") else 20)


@pytest.mark.parametrize("alone", [False, True])
def test_elsewhere_than_on_a_cpu_transformers_refuses_as_before(alone):
    model = linear_model("Qwen3-Next")
    with tarnn.patch_transformers(model if alone else None):
        assert not model._is_stateful
        assert model.to("meta")._is_stateful
    assert model._is_stateful is True


@pytest.mark.parametrize("name", WITHOUT)
def test_families_that_keep_their_states_elsewhere_are_refused(name):
    with tarnn.patch_transformers(), pytest.raises((ValueError, RuntimeError), match=WITHOUT[name]):
        linear_model(name).generate(IDS[:1, :9], prompt_lookup_num_tokens=5, **GREEDY)


@torch.no_grad()
@pytest.mark.parametrize("name", ["Qwen3-Next", "Mamba-2"])
def test_a_crop_of_more_than_is_remembered_leaves_the_cache_as_it_was(name):
    model = linear_model(name)
    cache = DynamicCache(config=model.config)
    with tarnn.patch_transformers():
        expected = whole(model, IDS[:, :80])[:, -1]
        forward(model, IDS[:, :5], cache, torch.arange(5)[None])
        cache.activate_past_recording()
        with pytest.raises(ValueError, match=r"takes n up to 0 here; got crop\(-1\)"):
            cache.layers[0].crop(-1)
        for start, end in ((5, 70), (70, 74), (74, 79)):
            forward(model, IDS[:, start:end], cache, torch.arange(start, end)[None])
        with pytest.raises(ValueError, match=r"takes n up to 64 here; got crop\(-65\)"):
            cache.crop(-65)
        last, _ = forward(model, IDS[:, 79:80], cache, torch.tensor([[79]]))
        torch.testing.assert_close(last[:, -1], expected, atol=1e-4, rtol=1e-4)
        cache.reorder_cache(torch.tensor([1, 0]))
        with pytest.raises(ValueError, match="takes n up to 0 here"):
            cache.crop(-1)


@torch.no_grad()
@pytest.mark.parametrize("records", [False, True])
@pytest.mark.parametrize("name", ["Qwen3-Next", "Mamba-2"])
def test_caches_and_patched_models_are_stored(name, records):
    """What a file holds goes on; only what was recorded is gone."""
    model, cache = linear_model(name), DynamicCache(config=linear_model(name).config)
    with tarnn.patch_transformers(model):
        if records:
            cache.activate_past_recording()
        forward(model, IDS[:, :20], cache, torch.arange(20)[None])
        loaded = pickle.loads(pickle.dumps(cache))
        places = torch.tensor([[20]])
        expected, _ = forward(model, IDS[:, 20:21], copy.deepcopy(cache), places)
        if records:
            with pytest.raises(ValueError, match="takes n up to 0 here"):
                loaded.crop(-1)
        found, _ = forward(model, IDS[:, 20:21], loaded, places)
        assert torch.equal(found, expected)
        assert isinstance(pickle.loads(pickle.dumps(model)), type(model))
