"""The head of Qwen3.5 that drafts: its layer is held against transformers' own, and its drafts change no text."""

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.open_folders import make_folder
from torch.nn.functional import linear, pad
from transformers import AutoModelForCausalLM
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5DecoderLayer, Qwen3_5RMSNorm

import tarnn
from tarnn.decoding.mtp import TrainedHead
from tarnn.errors import UserError
from tarnn.families import qwen3_5_mtp
from tarnn.kernels.cpu import library
from tarnn.program.state import tensors_of

pytestmark = pytest.mark.skipif(not library.available(), reason="the compiled kernels can't be used")
PROMPT = "Call me Ishmael. Some years ago"


def with_head(folder, **changed):
    """Add a head with random weights, no norm of which is neutral; return transformers' model and the head's parts."""
    make_folder(folder, "Qwen3.5")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    config, generator = model.config, torch.Generator().manual_seed(1)
    index = config.layer_types.index("full_attention")
    n = config.hidden_size
    layer = Qwen3_5DecoderLayer(config, index).eval()
    norms = {
        name: Qwen3_5RMSNorm(n, config.rms_norm_eps) for name in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm")
    }
    tensors = {"mtp.fc.weight": torch.randn(n, 2 * n, generator=generator) / n**0.5}
    for prefix, module in (("mtp.layers.0.", layer), *((f"mtp.{name}.", x) for name, x in norms.items())):
        for name, x in module.state_dict().items():
            x.copy_(torch.randn(x.shape, generator=generator) * (0.3 if x.ndim == 1 else x.shape[-1] ** -0.5))
            tensors[prefix + name] = x.clone()
    save_file(load_file(folder / "model.safetensors") | tensors | changed, folder / "model.safetensors")
    return model, layer, norms, tensors["mtp.fc.weight"]


@torch.no_grad()
def test_it_computes_what_transformers_layer_does(tmp_path):
    model, layer, norms, fc = with_head(tmp_path / "tiny")
    lm = tarnn.load(tmp_path / "tiny")
    ids = lm.ids(PROMPT)
    hidden = model.model(ids[None]).last_hidden_state[:, :-1]
    embedded = norms["pre_fc_norm_embedding"](model.get_input_embeddings()(ids[None, 1:]))
    x = linear(torch.cat([embedded, norms["pre_fc_norm_hidden"](hidden)], -1), fc)
    t = x.shape[1]
    mask = torch.full((t, t), -torch.inf).triu(1)[None, None]
    places = torch.arange(t)[None]
    turns = model.model.rotary_emb(x, places)
    x = layer(x, position_embeddings=turns, attention_mask=mask, position_ids=places)
    expected = norms["norm"](x)
    runtime = lm.opened.draft_head
    state = runtime.new_state(1, t)
    logits, found, _ = runtime.with_hidden(ids[1:], state, pad(hidden[0], (hidden.shape[-1], 0)))
    torch.testing.assert_close(found, expected[0], atol=2e-4, rtol=1e-4)
    torch.testing.assert_close(logits, model.lm_head(expected[0, -1:]), atol=5e-4, rtol=1e-4)


@pytest.mark.parametrize("frequent", [2**15, 100])
@pytest.mark.parametrize("draft", [1, 4])
def test_the_text_is_the_same(tmp_path, draft, frequent, monkeypatch):
    monkeypatch.setattr(qwen3_5_mtp, "FREQUENT", frequent)
    with_head(tmp_path / "tiny")
    lm = tarnn.load(tmp_path / "tiny")
    for options in ({"temperature": 0.0}, {"seed": 5, "temperature": 0.5}):
        plain = lm.generate(PROMPT, max_new_tokens=40, **options)
        drafted = lm.generate(PROMPT, max_new_tokens=40, draft=draft, **options)
        assert "".join(plain) == "".join(drafted)
        loop = drafted.loop
        assert isinstance(loop.drafter, TrainedHead)
        assert loop.drafted > 0
        assert lm.opened.draft_head.num_outputs == min(frequent, lm.opened.config.vocab_size)
    # with no row to begin at
    on = lm.generate("!", state=lm.read(PROMPT), temperature=0, max_new_tokens=9, draft=draft)
    assert "".join(on) == "".join(lm.generate("!", state=lm.read(PROMPT), temperature=0, max_new_tokens=9))


@torch.no_grad()
def test_drafts_are_those_of_the_whole_text_read_at_once(tmp_path):
    """After some passes the head has read each token beside the row before it, once: what it drafted itself is gone."""
    model, *_ = with_head(tmp_path / "tiny")
    lm = tarnn.load(tmp_path / "tiny")
    writing = lm.generate(PROMPT, max_new_tokens=30, temperature=0, draft=3)
    list(writing)
    head, runtime = writing.loop.drafter, lm.opened.draft_head
    ids = torch.tensor([*lm.ids(PROMPT).tolist(), *writing.ids])
    n = int(head.state.position)
    hidden = model.model(ids[None]).last_hidden_state[0, :n]
    whole = runtime.new_state(1, n)
    runtime.with_hidden(ids[1 : n + 1], whole, pad(hidden, (head.width, 0)))
    for x, y in zip(tensors_of(whole, runtime.program), tensors_of(head.state, runtime.program), strict=True):
        torch.testing.assert_close(y[:, :, :n], x, atol=2e-4, rtol=1e-4)
    assert n > len(lm.ids(PROMPT))


def test_a_head_that_does_not_fit_is_refused(tmp_path):
    with_head(tmp_path / "tiny", **{"mtp.fc.weight": torch.zeros(3, 5)})
    lm = tarnn.load(tmp_path / "tiny")
    assert "".join(lm.generate(PROMPT, max_new_tokens=3, temperature=0))
    with pytest.raises(UserError, match=r"has mtp\.fc\.weight of shape \(3, 5\) where the config calls for"):
        lm.generate(PROMPT, draft=2)


def test_all_weights_that_a_head_lacks_are_named(tmp_path):
    with_head(tmp_path / "tiny")
    file = tmp_path / "tiny" / "model.safetensors"
    lacking = ["mtp.pre_fc_norm_hidden.weight", "mtp.layers.0.mlp.up_proj.weight", "mtp.norm.weight"]
    save_file({name: x for name, x in load_file(file).items() if name not in lacking}, file)
    with pytest.raises(UserError, match=f"lacks the weights {', '.join(lacking)}\\."):
        tarnn.load(tmp_path / "tiny").generate(PROMPT, draft=2)
