"""The error of attention with random features: what the script writes, and that it measures what it says."""

import json
import struct

import pytest
import torch
from softmax_error import attend, softmax_error
from transformers import BertConfig, BertModel, BertTokenizerFast

from tarnn.feature_maps import Elu, PositiveRandomFeatures, Taylor, TrigonometricRandomFeatures
from tarnn.ops import linear_attention, reference

TINY = ("--length", 40, "--head-dim", 4, "--draws", 3, "--features", 4, 64, "--sigma", 0.5)


def normal(*shape, seed=1):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def test_the_error_is_what_it_says():
    q, k, v = normal(2, 4, 9, 6), normal(2, 2, 9, 6, seed=2), normal(2, 2, 9, 3, seed=3)
    mask = torch.arange(9) < torch.tensor([[9], [5]])
    for phi, scale in ((PositiveRandomFeatures(6, 64, seed=0), 6**-0.5), (Taylor(0.3), 0.3)):
        found = softmax_error(q, k, v, phi, causal=False, key_mask=mask)
        exact = reference.softmax(q, k, v, causal=False, scale=scale, key_mask=mask)
        o = linear_attention(q, k, v, phi, causal=False, key_mask=mask)
        assert found.shape == (2, 4)
        assert torch.allclose(found[1, 2], (o - exact)[1, 2].norm() / exact[1, 2].norm(), rtol=1e-4)
    with pytest.raises(ValueError, match="Elu does not stand for softmax's kernel"):
        softmax_error(q, k, v, Elu(), causal=True)


def test_signed_maps_are_divided_too_at_any_norm():
    q, k, v = (normal(1, 1, 9, 6, seed=s).double() for s in (1, 2, 3))
    phi = TrigonometricRandomFeatures(6, 64, seed=0)
    weights = torch.tril(phi(q) @ phi(k).mT)
    assert torch.allclose(attend(q, k, v, phi, causal=True), weights @ v / weights.sum(-1, keepdim=True))
    assert attend(40 * q.float(), 40 * k.float(), v.float(), phi, causal=True).isfinite().all()


def test_random_data(script, data_of, pictures, tmp_path):
    code, out, _ = script("approximation_error", *TINY)
    assert code == 0
    data = data_of("approximation_error")
    found = data["results"]["normal, σ = 0.5"]
    median = {name: sorted(errors["64"])[1] for name, errors in found.items()}
    assert all(len(errors["4"]) == 3 for errors in found.values())
    assert median["positive, orthogonal (FAVOR+)"] < sorted(found["positive, orthogonal (FAVOR+)"]["4"])[1]
    assert median["FAVOR++ (OPRF)"] < 0.5
    table = (tmp_path / "results" / "approximation_error.md").read_text()
    assert "## normal, σ = 0.5" in table
    assert all(name in table for name in found)
    [axes] = pictures["approximation_error.png"].axes
    assert axes.get_title() == "normal, σ = 0.5"
    bars = {bar.get_label(): bar.lines[0].get_ydata() for bar in axes.containers}
    assert {name: y[1] for name, y in bars.items()} == pytest.approx(median)  # at 64 features
    assert str(tmp_path) not in json.dumps(data)  # no paths of this machine in what is kept
    assert "approximation_error.png" in out


def test_a_trained_language_model(script, data_of, data):
    path = data("stories260k") / "stories260K.bin"
    code, *_ = script("approximation_error", "--quick", *TINY, "--draws", 2, "--features", 64, "--stories", path)
    assert code == 0
    found = data_of("approximation_error")["results"]["stories260K"]
    median = {name: sorted(errors["64"])[len(errors["64"]) // 2] for name, errors in found.items()}
    assert median["FAVOR+, centred"] < 0.7 * median["positive, orthogonal (FAVOR+)"]
    assert median["FAVOR++, centred, balanced"] < 0.9 * median["FAVOR+, centred"]


def test_the_trained_model_tells_its_story(data):
    """Greedily, word for word what llama2.c's documentation has."""
    from trained import Stories

    folder = data("stories260k")
    model, raw, at, words = Stories(folder / "stories260K.bin"), (folder / "tok512.bin").read_bytes(), 4, []
    for _ in range(512):
        _, size = struct.unpack("<fi", raw[at : at + 8])
        words.append(raw[at + 8 : at + 8 + size])
        at += 8 + size
    ids = torch.ones(1, 1, dtype=torch.long)
    for _ in range(25):
        ids = torch.cat([ids, model(ids)[0][:, -1:].argmax(-1)], dim=1)
    text = b"".join(words[i] for i in ids[0, 1:].tolist()).decode()
    assert text.strip().startswith("Once upon a time, there was a little girl named Lily.")
    assert torch.equal(model.write(2, 9, seed=0), model.write(2, 9, seed=0))


@pytest.fixture
def encoder(tmp_path):
    folder = tmp_path / "encoder"
    torch.manual_seed(0)
    config = BertConfig(vocab_size=12, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32)
    BertModel(config).save_pretrained(folder)
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *"abcdefg"]
    (folder / "vocab.txt").write_text("\n".join(words))
    BertTokenizerFast(str(folder / "vocab.txt")).save_pretrained(folder)
    return folder


def test_an_encoder(script, data_of, tmp_path, encoder):
    (tmp_path / "texts").write_text("a b c d e f\nb c\ng f e d c b a\na a b")
    code, *_ = script("approximation_error", *TINY, "--encoder", encoder, "--texts", tmp_path / "texts")
    assert code == 0
    found = data_of("approximation_error")["results"]["encoder"]
    assert all(0 < x < 1 for x in found["SADERF"]["64"])


def test_an_encoders_layers_are_those_of_its_attention(encoder):
    from trained import encoder_layers

    texts = ["a b c d e f", "b c"]
    layers, mask = encoder_layers(encoder, texts)
    assert mask.sum(-1).tolist() == [8, 4]  # with [CLS] and [SEP]
    assert layers[0].q.shape == (2, 2, 8, 8)
    model, tokenizer = BertModel.from_pretrained(encoder).eval(), BertTokenizerFast.from_pretrained(encoder)
    with torch.no_grad():
        hidden = model.embeddings(tokenizer(texts[1], return_tensors="pt")["input_ids"])
        expected = model.encoder.layer[0].attention.self.query(hidden).unflatten(-1, (2, 8)).transpose(1, 2)
    assert torch.allclose(layers[0].q[1:, :, :4], expected, atol=1e-5)
    assert (layers[0].q[1, :, 4:] == 0).all()


def test_an_encoder_needs_texts(script, encoder):
    code, _, err = script("approximation_error", *TINY, "--encoder", encoder)
    assert (code, err.splitlines()[-1]) == (1, "nothing is measured: --encoder and --texts go together.")


def test_the_size_of_the_estimate(script, data_of):
    code, out, _ = script("estimate_size", "--draws", 1, "--length", 20)
    assert code == 0
    found = data_of("estimate_size")["results"]
    assert found["0.25"]["favor, 256"] < 0.1 < 0.3 < found["1"]["favor, 256"]
    assert "| 0.25 |" in out
