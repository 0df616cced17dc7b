"""A cache in a file: it goes on as the one in memory does, and is refused wherever that would mean nothing."""

import pytest
import torch
from support.families import FAMILIES, model_of
from support.state_files import contents, rewrite

from tarnn.conversion import constant_cache, load_cache, save_cache, set_options
from tarnn.errors import UserError
from tarnn.huggingface.versions import CACHE

pytestmark = pytest.mark.filterwarnings("ignore")  # what transformers has to say of random configs
OPTIONS = {"max_new_tokens": 6, "do_sample": False}


def made(name="Llama", seed=0):
    model = model_of(FAMILIES[name])
    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(4 if parameter.ndim > 1 else 1).add_(0.01 * torch.randn_like(parameter))
    model.set_attn_implementation("tarnn_hybrid")
    set_options(model, window=5, sinks=1, slots=2)
    model.generation_config.eos_token_id, model.generation_config.pad_token_id = None, 0
    return model


@pytest.fixture
def prompt():
    torch.manual_seed(0)
    ids = torch.randint(3, 99, (2, 25))
    mask = torch.ones_like(ids)
    mask[1, :9] = 0
    return {"input_ids": ids, "attention_mask": mask}


def read(model, prompt):
    cache = constant_cache(model)
    with torch.no_grad():
        model(**{name: x[:, :-1] for name, x in prompt.items()}, **{CACHE: cache})
    return cache


@pytest.mark.parametrize("name", ["Llama", "Gemma 3"])  # which has sliding layers of its own
def test_it_goes_on_where_it_was(name, prompt, tmp_path):
    model = made(name)
    set_options(model, layers=1, mode=["exact", "features"])
    cache = read(model, prompt)
    size = save_cache(tmp_path / "c", model, cache)
    assert size == (tmp_path / "c").stat().st_size
    expected = model.generate(**prompt, **{CACHE: cache}, **OPTIONS)
    again = load_cache(tmp_path / "c", model)
    assert torch.equal(model.generate(**prompt, **{CACHE: again}, **OPTIONS), expected)


def test_a_cache_of_an_older_format_says_to_make_it_again(prompt, tmp_path):
    model = made()
    save_cache(tmp_path / "c", model, read(model, prompt))
    tensors, metadata = contents(tmp_path / "c")
    rewrite(tmp_path / "c", tensors, metadata | {"format": "tarnn.cache", "format_version": "2"})
    with pytest.raises(UserError, match=r"format tarnn\.cache; .* Make the cache again: .*save_cache writes one"):
        load_cache(tmp_path / "c", model)


def test_another_model_is_refused(prompt, tmp_path):
    model = made()
    save_cache(tmp_path / "c", model, read(model, prompt))
    with pytest.raises(UserError, match="another model"):
        load_cache(tmp_path / "c", made(seed=1))
    set_options(model, window=6)
    with pytest.raises(UserError, match="another model"):
        load_cache(tmp_path / "c", model)


def test_a_damaged_file_is_refused(prompt, tmp_path):
    model = made()
    save_cache(tmp_path / "c", model, read(model, prompt))
    data = bytearray((tmp_path / "c").read_bytes())
    data[-9] ^= 1
    (tmp_path / "c").write_bytes(data)
    with pytest.raises(UserError, match="damaged"):
        load_cache(tmp_path / "c", model)
    (tmp_path / "c").write_bytes(data[:99])
    with pytest.raises(UserError, match="cut short"):
        load_cache(tmp_path / "c", model)
    with pytest.raises(UserError, match="no cache file"):
        load_cache(tmp_path / "none", model)


def test_a_cache_in_memory_that_another_model_began_is_refused(prompt):
    cache = read(made(), prompt)
    with pytest.raises(ValueError, match="another model"):
        made(seed=1).generate(**prompt, **{CACHE: cache}, **OPTIONS)
