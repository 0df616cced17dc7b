"""Patched models of transformers forget tokens: caches are cropped, and assisted generation gives the same text."""

import pytest
import torch
from support.linear_families import FAMILIES, forward, linear_model, whole
from transformers import Cache, DynamicCache

import tarnn

pytestmark = pytest.mark.filterwarnings("ignore")  # what transformers has to say of random configs and of its fallbacks
WITHOUT = {"MiniMax": "a cache of its own", "RecurrentGemma": "states on its layers", "xLSTM": "a cache of its own"}
CROPPED_BY_TRANSFORMERS = ["LFM2", "LFM2-MoE", "LFM3", "Inkling", "Inkling 2"]  # convolutions alone
NAMES = [x for x in FAMILIES if x not in WITHOUT]
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
@pytest.mark.parametrize("name", NAMES)
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
GENERATING = [x for x in NAMES if x not in ("GLM-5-next", "Mamba", "Falcon-Mamba", "Mamba-2")]


def assert_same_text(name, count):
    model, assistant = linear_model(name), relative(name)
    with tarnn.patch_transformers():
        for ids in prompts(count):
            alone = model.generate(ids, **GREEDY)
            assert torch.equal(model.generate(ids, prompt_lookup_num_tokens=5, **GREEDY), alone)
            assert torch.equal(model.generate(ids, assistant_model=assistant, **GREEDY), alone)


@pytest.mark.parametrize("name", ["Qwen3-Next", "Kimi Linear", "Jamba", "Falcon-H1", "LFM2"])
def test_assisted_generation_gives_the_same_text(name, rejected):
    assert_same_text(name, 2)
    assert min(rejected) == 0
    assert max(rejected) > 2


@pytest.mark.slow
@pytest.mark.parametrize("name", GENERATING)
def test_assisted_generation_gives_the_same_text_for_200_prompts(name):
    assert_same_text(name, 200)
