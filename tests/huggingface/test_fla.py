"""flash-linear-attention's models on a CPU, by tarnn: the same in other pieces; patching and its end."""

import importlib
import sys

import pytest
import torch
from support.fla import close, drawn, installed, of

from tarnn.huggingface.patching import fla as patching
from tarnn.huggingface.patching.fla import patch_fla, unpatch_fla
from tarnn.huggingface.versions import as_called, cache_of

fla = installed()
pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture
def patched():
    with patch_fla():
        yield


MODELS = {
    "GLA": {"num_heads": 2},
    "GatedDeltaNet": {"num_heads": 2, "head_dim": 16},
    "KDA": {"num_heads": 2, "head_dim": 16},
    "DeltaNet": {"num_heads": 2},
    "RetNet": {"num_heads": 2},
    "RWKV7": {"head_dim": 16},
    "RWKV6": {"num_heads": 2},
    "HGRN2": {"num_heads": 2, "expand_ratio": 32},
    "HGRN": {},
    "LinearAttention": {"num_heads": 2},
}


def model_of(name: str, **options):
    models = importlib.import_module("fla.models")
    torch.manual_seed(0)
    config = getattr(models, f"{name}Config")(
        hidden_size=64, num_hidden_layers=2, vocab_size=50, intermediate_size=96, **MODELS[name], **options
    )
    model = getattr(models, f"{name}ForCausalLM")(config)
    with torch.no_grad():
        for x in model.parameters():
            if not x.any():  # what starts as zero would hide what comes before it
                x.normal_(std=0.3)
    return model.eval()


every_model = pytest.mark.parametrize("name", MODELS)


@every_model
@pytest.mark.usefixtures("patched")
def test_a_model_continued_is_the_whole(name):
    model, ids = model_of(name), torch.randint(50, (2, 75))
    with torch.no_grad():
        whole = model(ids).logits
        out = model(ids[:, :70], use_cache=True)
        close([out.logits], [whole[:, :70]], 1e-4)
        for i in range(70, 75):
            out = model(ids[:, i : i + 1], **as_called(model.forward, cache_of(out)), use_cache=True)
            close([out.logits[:, 0]], [whole[:, i]], 1e-4)


@every_model
@pytest.mark.usefixtures("patched")
def test_a_row_padded_on_the_left_is_the_row_alone(name):
    model, ids, mask = model_of(name), torch.randint(50, (2, 20)), torch.ones(2, 20, dtype=torch.int64)
    mask[1, :6] = 0
    with torch.no_grad():
        padded = model(ids, attention_mask=mask).logits
        close([padded[0], padded[1, 6:]], [model(ids[:1]).logits[0], model(ids[1:, 6:]).logits[0]], 1e-4)


@pytest.mark.parametrize("name", [x for x in MODELS if x not in ("LinearAttention", "HGRN")])  # fla does not pack these
@pytest.mark.usefixtures("patched")
def test_packed_rows_have_the_gradients_of_rows_alone(name):
    model, ids, cuts = model_of(name).train(), torch.randint(50, (1, 30)), [0, 11, 12, 30]
    packed = model(ids, cu_seqlens=torch.tensor(cuts)).logits
    alone = torch.cat([model(ids[:, i:j]).logits for i, j in zip(cuts, cuts[1:])], 1)
    close([packed], [alone], 1e-4)
    weights = list(model.parameters())
    gradients = [torch.autograd.grad(x.square().sum(), weights) for x in (packed, alone)]
    for x, y in zip(*gradients):
        torch.testing.assert_close(x, y, rtol=1e-3, atol=1e-3 * float(y.abs().max()) + 1e-6)


@pytest.mark.usefixtures("patched")
@pytest.mark.parametrize("name", ["GLA", "KDA", "RWKV7"])
def test_generate_writes_what_the_whole_says(name):
    model, ids = model_of(name), torch.randint(1, 50, (1, 7))
    written = model.generate(ids, max_new_tokens=5, do_sample=False, eos_token_id=None, pad_token_id=0)
    with torch.no_grad():
        assert torch.equal(model(written[:, :-1]).logits[:, 6:].argmax(-1), written[:, 7:])


@pytest.mark.parametrize("name", ["GLA", "RWKV7"])
def test_a_model_made_before_runs_too(name):
    model, ids = model_of(name), torch.randint(50, (1, 9))
    with patch_fla(), torch.no_grad():
        close([model(ids).logits], [model_of(name)(ids).logits])


@pytest.mark.usefixtures("patched")
def test_the_loss_is_torchs_without_its_fused_one():
    ids = torch.randint(50, (2, 9))
    out = model_of("GLA", fuse_cross_entropy=False)(ids, labels=ids)
    close([out.loss], [torch.nn.functional.cross_entropy(out.logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())])


def test_functions_are_fla_s_own_again():
    path = "ops.gla.chunk.chunk_gla"
    original, layer = of(path), importlib.import_module("fla.layers.gla")
    with patch_fla():
        ours = of(path)
        assert layer.chunk_gla is ours is not original
        with patch_fla():
            assert of(path) is ours
        assert of(path) is ours
    assert layer.chunk_gla is of(path) is original
    patch_fla()
    patch_fla()
    unpatch_fla()
    assert of(path) is original
    x = drawn()
    with pytest.raises(RuntimeError, match="driver"):  # there is no GPU
        of("ops.kda.chunk.chunk_kda")(x["q"], x["k"], x["v"], x["per_channel"], x["beta"])


def test_another_version_is_refused_by_name(monkeypatch):
    monkeypatch.setattr(fla, "__version__", "0.7.1")
    with pytest.raises(ValueError, match=r"0\.6\.0.*0\.7\.1"):
        patch_fla()
    assert not patching._replaced


def test_what_tarnn_does_not_compute_is_refused():
    x = drawn()
    with patch_fla():
        with pytest.raises(ValueError, match="without gv="):
            of("ops.gla.fused_recurrent.fused_recurrent_gla")(x["q"], x["k"], x["v"], gv=x["v"])
        with pytest.raises(ValueError, match="one β per token"):
            of("ops.delta_rule.fused_recurrent.fused_recurrent_delta_rule")(x["q"], x["k"], x["v"], x["v"])


def test_without_fla_a_sentence_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "fla", None)
    with pytest.raises(ImportError, match="pip install flash-linear-attention"):
        patch_fla()
