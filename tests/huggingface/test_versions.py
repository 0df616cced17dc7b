"""What differs between versions of transformers: one seam, and any name of a cache."""

import pickle
import subprocess
import sys

import pytest
import torch
import transformers
from support.house import FILES
from transformers import DynamicCache, EncoderDecoderCache

from tarnn.huggingface.seq2seq import TarnnForConditionalGeneration
from tarnn.huggingface.seq2seq_config import TarnnSeq2SeqConfig
from tarnn.huggingface.versions import CACHE, NAMES, by_role, versions_known
from tarnn.models import TarnnConfig, TarnnForCausalLM

SIZE = {"vocab_size": 11, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
IDS = torch.tensor([[3, 4, 5, 6]])


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    return TarnnForCausalLM(TarnnConfig(**SIZE, attention="softmax")).eval()


@pytest.mark.parametrize("name", NAMES)
def test_our_models_take_a_cache_by_any_name(model, name):
    expected = model(IDS).logits[:, 2:]
    cache = model(IDS[:, :2]).cache
    torch.testing.assert_close(model(IDS[:, 2:], **{name: cache}).logits, expected)
    for backbone in (model.model,):
        cache = backbone(IDS[:, :2]).cache
        assert backbone(IDS[:, 2:], **{name: cache}).cache is cache
        assert cache.get_seq_length() == 4


@pytest.mark.parametrize("name", NAMES[:2])
def test_generate_goes_on_with_a_cache_by_any_name(model, name):
    expected = model.generate(IDS, max_new_tokens=4, do_sample=False)
    cache = model(IDS[:, :3]).cache
    found = model.generate(IDS, max_new_tokens=4, do_sample=False, **{name: cache})
    assert torch.equal(found, expected)
    assert cache.get_seq_length() == 7  # it was this cache, and no other


def test_outputs_have_both_names(model):
    out = model(IDS)
    assert out.cache is out.past_key_values
    assert isinstance(out.cache, DynamicCache)
    assert model(IDS, use_cache=False).cache is None
    assert pickle.loads(pickle.dumps(out)).logits.equal(out.logits)
    out.cache = None
    assert out.past_key_values is None
    assert model(IDS, return_dict=False)[1].get_seq_length() == 4


@pytest.mark.parametrize("name", NAMES[:2])
def test_encoder_and_decoder_alike(name):
    torch.manual_seed(0)
    config = TarnnSeq2SeqConfig(**SIZE, pad_token_id=0, decoder_start_token_id=1)
    model = TarnnForConditionalGeneration(config).eval()
    out = model(input_ids=IDS, decoder_input_ids=IDS[:, :2])
    assert out.cache is out.past_key_values
    assert isinstance(out.cache, EncoderDecoderCache)
    more = model(input_ids=IDS, decoder_input_ids=IDS[:, 2:], **{name: out.cache}).logits
    torch.testing.assert_close(more, model(input_ids=IDS, decoder_input_ids=IDS).logits[:, 2:])


def test_two_caches_are_refused(model):
    caches = {name: DynamicCache(config=model.config) for name in NAMES[:2]}
    with pytest.raises(TypeError, match="got cache and past_key_values"):
        model(IDS, **caches)
    assert by_role({"cache": None, "past_key_values": 3, "x": 1}) == {"x": 1, "cache": 3}


def test_one_file_knows_the_old_names():
    """But for inputs of ONNX graphs, which onnxruntime-genai calls alike."""
    there = {module for module, file in FILES.items() if any(name in file.read_text() for name in NAMES[1:])}
    there = {module for module in there if not module.startswith("tarnn.export.onnx_graphs.")}
    assert there == {"tarnn.huggingface.versions", "tarnn.other_names"}


def test_the_range_is_told():
    low, high = versions_known().split(",")
    assert low.startswith(">=5.23")
    assert high.startswith("<")
    here = tuple(map(int, transformers.__version__.split(".")[:2]))
    assert CACHE == ("cache" if here >= (5, 24) else "past_key_values")


@pytest.mark.parametrize(
    ("version", "outcome"),
    [
        ("5.22.1", "MissingPackageError: tarnn's models need transformers>=5.23"),
        ("7.1.0.dev0", "UserWarning: transformers 7.1.0.dev0 is newer than tarnn was tested with (>=5.23"),
        (transformers.__version__, ""),
    ],
)
def test_another_version_is_one_sentence_at_the_first_use(version, outcome):
    code = f"import transformers; transformers.__version__ = {version!r}; import tarnn; tarnn.linear_attention; print('so far')"
    run = subprocess.run([sys.executable, "-c", f"{code}; import tarnn.huggingface"], capture_output=True, text=True)
    assert run.stdout == "so far\n"
    assert outcome in run.stderr
    assert bool(outcome) == bool(run.stderr)
    assert (run.returncode == 0) == (">=5.23" not in outcome or "newer" in outcome)
