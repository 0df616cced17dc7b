"""Models of ours in the layouts of others: their readers compute our logits and write our texts; the rest is refused by name."""

import json
import warnings

import pytest
import torch
import transformers as hf
from safetensors.torch import load_file
from support import fla
from support.exported import make_model, save_run
from torch.nn.functional import group_norm, layer_norm, linear, normalize

from tarnn.decoding.lm import load
from tarnn.errors import UserError
from tarnn.export import hf as format_hf
from tarnn.export.layouts import qwen3_5
from tarnn.log import silent

DELTA = {"attention": "gated_delta"}
MAMBA = {"attention": "mamba2", "mlp": "none"}
RWKV = {"attention": "rwkv7", "mlp": "squared_relu", "norm": "layer"}
HYBRID = {"attention": ["gated_delta", "gated_delta", "softmax"], "num_key_value_heads": 2}
CASES = {
    "delta": (DELTA, "Qwen3_5ForCausalLM"),
    "delta, a decay a head, unfiltered, grouped": (
        DELTA
        | {"decay": "head", "num_key_value_heads": 2, "tie_word_embeddings": False, "norm_eps": 1e-4}
        | {"attention_options": {"gated_delta": {"filter_width": 1}}},
        "Qwen3_5ForCausalLM",
    ),
    "delta without decay, odd heads": (
        DELTA | {"decay": "none", "head_dim": 7, "norm_eps": 1e-5},
        "Qwen3_5ForCausalLM",
    ),
    "delta and softmax": (HYBRID, "Qwen3_5ForCausalLM"),
    "delta and softmax, rotated": (HYBRID | {"position": "rotary", "rotary_base": 5e4}, "Qwen3_5ForCausalLM"),
    "mamba2": (
        MAMBA | {"bias": True, "head_dim": 16, "attention_options": {"mamba2": {"state_size": 17}}},
        "Mamba2ForCausalLM",
    ),
    "mamba2, unfiltered": (
        MAMBA | {"tie_word_embeddings": False, "attention_options": {"mamba2": {"filter_width": 1}}},
        "Mamba2ForCausalLM",
    ),
    "mamba2 with a feed-forward": ({"attention": "mamba2", "bias": True}, "BambaForCausalLM"),
}
RWKV_CASES = {"tied": RWKV, "untied": RWKV | {"tie_word_embeddings": False, "norm_eps": 1e-5}}


def exported(tmp_path, choices):
    """(our model, the folder that was written)"""
    model, out = save_run(tmp_path / "run", **choices), tmp_path / "out"
    out.mkdir()
    format_hf.export(tmp_path / "run", out, report=silent)
    return model, out


def check_same(model, other):
    """Their logits are ours to float32's rounding, for texts in a batch, and so are greedy texts, with their cache."""
    ids = torch.randint(256, (2, 40), generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        ours, theirs = model(ids).logits, other(ids).logits
        exact = model.double()(ids).logits
        noise = (model.float()(ids).logits - exact).abs().max()
    assert (theirs - exact).abs().max() <= 4 * noise + 2e-6 * exact.abs().max()
    assert (ours - theirs).abs().max() < 1e-4
    texts = [x.generate(ids[:1], max_new_tokens=30, do_sample=False) for x in (model, other)]
    assert torch.equal(*texts)


@pytest.mark.parametrize("case", CASES)
def test_transformers_computes_our_logits_and_writes_our_texts(tmp_path, case):
    choices, architecture = CASES[case]
    model, out = exported(tmp_path, choices)
    other = hf.AutoModelForCausalLM.from_pretrained(out).eval()
    assert type(other).__name__ == architecture
    check_same(model, other)
    tokenizer = hf.AutoTokenizer.from_pretrained(out)
    assert tokenizer.decode(tokenizer("Call me, Ishmaël").input_ids) == "Call me, Ishmaël"
    assert tokenizer.eos_token_id == other.config.eos_token_id == 256


@pytest.mark.parametrize("case", RWKV_CASES)
def test_fla_computes_our_logits_of_rwkv7(tmp_path, case):
    fla.installed()
    from fla.models import RWKV7ForCausalLM

    from tarnn import patch_fla

    model, out = exported(tmp_path, RWKV_CASES[case])
    with warnings.catch_warnings(), patch_fla():
        warnings.simplefilter("ignore")
        check_same(model, RWKV7ForCausalLM.from_pretrained(out).eval())


@pytest.mark.parametrize("case", RWKV_CASES)
def test_the_layout_of_rwkv7_read_by_the_paper(tmp_path, case):
    model, out = exported(tmp_path, RWKV_CASES[case])
    ids = torch.randint(256, (20,), generator=torch.Generator().manual_seed(2))
    w = {name: x.double() for name, x in load_file(out / "model.safetensors").items()}
    logits = rwkv7(w, json.loads((out / "config.json").read_text()), ids)
    with torch.no_grad():
        expected = model.double()(ids[None]).logits[0]
    torch.testing.assert_close(logits, expected, rtol=2e-6, atol=2e-6)


def rwkv7(w, config, ids):
    """Compute the logits of a folder of fla, token by token (Peng et al. 2025, arXiv 2503.14456)."""
    h, hidden, eps = config["num_heads"], config["hidden_size"], config["norm_eps"]
    assert not config["norm_first"]
    norm = lambda x, name: layer_norm(x, (hidden,), w[f"{name}.weight"], w[f"{name}.bias"], eps)  # noqa: E731
    shifted = lambda x: torch.cat([torch.zeros_like(x[:1]), x[:-1]])  # noqa: E731
    x, first = w["model.embeddings.weight"][ids], None
    for i in range(config["num_hidden_layers"]):
        at = f"model.layers.{i}.attn."
        y = norm(x, f"model.layers.{i}.attn_norm")
        mixed = {name: y + (shifted(y) - y) * w[f"{at}x_{name}"][0, 0] for name in "rwkvag"}
        r, k, v = (linear(mixed[name], w[f"{at}{name}_proj.weight"]) for name in "rkv")
        low = lambda name, y, f, at=at: linear(  # noqa: E731
            f(linear(y, w[f"{at}{name}_lora.lora.0.weight"])),
            w[f"{at}{name}_lora.lora.2.weight"],
            w.get(f"{at}{name}_lora.lora.2.bias"),
        )
        same = lambda x: x  # noqa: E731
        decay = torch.exp(-(torch.tensor(-0.5).double().exp()) * low("w", mixed["w"], torch.tanh).sigmoid())
        a, g = low("a", mixed["a"], same).sigmoid(), low("g", mixed["g"], torch.sigmoid)
        v = v if first is None else v + (first - v) * low("v", mixed["v"], same).sigmoid()
        first = v if first is None else first
        kk = normalize((k * w[f"{at}k_k"]).unflatten(1, (h, -1)), dim=-1)
        k = k * (1 + (a - 1) * w[f"{at}k_a"])
        r, k, v, a, decay = (x.unflatten(1, (h, -1)) for x in (r, k, v, a, decay))
        S, read = torch.zeros(h, hidden // h, hidden // h).double(), []
        for t in range(len(ids)):
            erased = torch.einsum("hd,hde->he", -kk[t], S)
            S = decay[t][..., None] * S + (kk[t] * a[t])[..., None] * erased[:, None] + k[t][..., None] * v[t][:, None]
            read.append(torch.einsum("hd,hde->he", r[t], S))
        o = torch.stack(read).flatten(1)
        o = group_norm(o, h, w[f"{at}g_norm.weight"], w[f"{at}g_norm.bias"], hidden // h * eps)
        o = o + ((r * k * w[f"{at}r_k"]).sum(-1, keepdim=True) * v).flatten(1)
        x = x + linear(o * g, w[f"{at}o_proj.weight"])
        ffn = f"model.layers.{i}.ffn."
        y = norm(x, f"model.layers.{i}.ffn_norm")
        y = linear(y + (shifted(y) - y) * w[f"{ffn}x_k"], w[f"{ffn}key.weight"])
        x = x + linear(y.relu().square(), w[f"{ffn}value.weight"])
    return linear(norm(x, "model.norm"), w["lm_head.weight"])


def test_tarnn_opens_what_it_wrote(tmp_path):
    _, out = exported(tmp_path, HYBRID)
    (tmp_path / "again").mkdir()
    ours, theirs = (load(x).generate("Call me", max_new_tokens=20, temperature=0) for x in (tmp_path / "run", out))
    assert "".join(ours) == "".join(theirs)
    with pytest.raises(UserError, match=r"type 'qwen3_5_text'; expected a language model that `tarnn train` made"):
        format_hf.export(out, tmp_path / "again", report=silent)


REFUSED = {
    "linear attention": ({}, r"layers of linear, which no other program has"),
    "softmax alone": ({"attention": "softmax"}, r"layers of softmax, which no other program has"),
    "two recurrences": (
        {"attention": ["gated_delta", "mamba2", "rwkv7"]},
        r"Qwen3.5 lacks attention = 'mamba2' \(it has gated_delta, softmax\); attention = 'rwkv7'",
    ),
    "linear attention in a hybrid": ({"attention": ["gated_delta", "gated_delta", "linear"]}, "attention = 'linear'"),
    "many at once": (
        DELTA | {"norm": "layer", "mlp": "gelu", "bias": True, "decay": "channel", "position": "sinusoidal"},
        r"lacks norm = 'layer' .*mlp = 'gelu' .*bias = True .*position = 'sinusoidal' .*decay = 'channel' \(it has 'none' or",
    ),
    "sums that are normed": (DELTA | {"norm_position": "post"}, r"norm_position = 'post' \(it has 'pre'\)"),
    "two streams": (DELTA | {"reversible": True}, r"reversible = True \(it has False\)"),
    "convolutions": (DELTA | {"conv_kernel": 3}, r"conv_kernel = 3 \(it has None\)"),
    "softmax whose queries are not normed": (HYBRID | {"qk_norm": False}, r"qk_norm = False \(it has True\)"),
    "mamba2 with gelu": (
        {"attention": "mamba2", "mlp": "gelu"},
        r"Bamba lacks mlp = 'gelu' \(it has 'none' or 'swiglu'\)",
    ),
    "mamba2 and softmax": ({"attention": ["mamba2", "mamba2", "softmax"]}, r"Bamba lacks attention = 'softmax'"),
    "mamba2 of another width": (MAMBA | {"head_dim": 12}, r"a multiple of hidden_size \(32\) wide; .* head_dim = 12"),
    "rwkv7 as it is by default": ({"attention": "rwkv7"}, r"RWKV-7 lacks norm = 'rms' .*mlp = 'swiglu'"),
    "rwkv7 of another width": (RWKV | {"head_dim": 16}, r"as wide as hidden_size \(32\); .* head_dim = 16"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_a_layout_lacks_is_refused_by_name(tmp_path, case):
    choices, why = REFUSED[case]
    make_model(**choices).save_pretrained(tmp_path / "run")
    with pytest.raises(UserError, match=why):
        format_hf.export(tmp_path / "run", tmp_path, report=silent)
    assert [x.name for x in tmp_path.iterdir()] == ["run"]


def test_nothing_is_written_that_computes_other_logits(tmp_path, monkeypatch):
    save_run(tmp_path / "run", **DELTA)
    right = qwen3_5.tensors
    monkeypatch.setattr(qwen3_5, "tensors", lambda model: right(model) | {"model.norm.weight": torch.ones(32)})
    with pytest.raises(UserError, match=r"can't be exported: read back as qwen3_5_text, its logits differ by"):
        format_hf.export(tmp_path / "run", tmp_path, report=silent)
    monkeypatch.setattr(qwen3_5, "tensors", lambda model: right(model) | {"model.extra.weight": torch.ones(32)})
    with pytest.raises(UserError, match=r"does not call for: model\.extra\.weight"):
        format_hf.export(tmp_path / "run", tmp_path, report=silent)


def test_16_bits_and_a_short_table_of_positions(tmp_path):
    model = make_model(**DELTA, max_position_embeddings=9).bfloat16()
    model.save_pretrained(tmp_path / "run")
    format_hf.export(tmp_path / "run", tmp_path, report=silent)
    other, ids = hf.AutoModelForCausalLM.from_pretrained(tmp_path).eval(), torch.arange(9)[None]
    assert other.dtype == torch.float32
    with torch.no_grad():
        torch.testing.assert_close(other(ids).logits, model.float()(ids).logits, rtol=1e-4, atol=1e-4)
