"""The experiments measure what they say: their tasks, errors and shares, held against definitions."""

import random
import struct

import numpy as np
import proteins
import pytest
import time_memory
import torch
from measures import long_range
from measures.choosing_page import DEFAULT, best_rate, leaders
from measures.choosing_tasks import IGNORED as NOT_ASKED, SYMBOLS, pairs
from measures.families import families
from measures.intervals import Errors
from measures.protein_models import IGNORED, TOKENS, task
from measures.residues import agreement, attention_to_residues, closest, read_matrix
from measures.trained import stories_model

from tarnn.analysis.attention_maps import attention_maps
from tarnn.data.proteins import AMINO_ACIDS
from tarnn.errors import UserError
from tarnn.models import TarnnConfig, TarnnForMaskedLM
from tarnn.ops import softmax_attention


def test_the_trained_model_tells_its_story(data):
    """Greedily, word for word what llama2.c's documentation has."""
    folder = data("stories260k")
    model, raw, at, words = stories_model(folder / "stories260K.bin"), (folder / "tok512.bin").read_bytes(), 4, []
    for _ in range(512):
        _, size = struct.unpack("<fi", raw[at : at + 8])
        words.append(raw[at + 8 : at + 8 + size])
        at += 8 + size
    ids = torch.ones(1, 1, dtype=torch.long)
    for _ in range(25):
        ids = torch.cat([ids, model(ids).logits[:, -1:].argmax(-1)], dim=1)
    text = b"".join(words[i] for i in ids[0, 1:].tolist()).decode()
    assert text.strip().startswith("Once upon a time, there was a little girl named Lily.")


@torch.no_grad()
def test_softmax_with_its_matrix_is_softmax():
    layer, x = time_memory.MatrixAttention(12, 3, causal=True).double(), torch.randn(2, 7, 12, dtype=torch.float64)
    q, k, v = (layer.heads(f(x), 3) for f in (layer.q_proj, layer.k_proj, layer.v_proj))
    torch.testing.assert_close(layer(x), layer.merge(softmax_attention(q, k, v, causal=True), v.dtype))


def value_of(tokens):
    """An expression's value, by another way than the generator's: with Python's own syntax."""
    functions = {"[MAX": "max", "[MIN": "min", "[MED": "median", "[SM": "modulo"}
    text = "".join(f"{functions[x]}([" if x in functions else "])," if x == "]" else f"{x}," for x in tokens)
    middle = lambda x: (sorted(x)[(len(x) - 1) // 2] + sorted(x)[len(x) // 2]) // 2  # noqa: E731
    names = {"max": max, "min": min, "modulo": lambda x: sum(x) % 10, "median": middle}
    return eval(text, {"__builtins__": {}}, names)[0]


def test_values_of_expressions():
    source = random.Random(1)
    for _ in range(100):
        tokens, value = long_range.expression(source, 10_000)
        assert value_of(tokens) == value


def test_families_are_held_out_and_hidden_residues_are_guessed(sequences, monkeypatch):
    monkeypatch.setattr("sys.argv", ["proteins.py"])
    options = proteins.parse(proteins.__file__, "", proteins.FULL)
    options.data, options.test_sequences = sequences, 3
    data = proteins.split(options)
    assert (data.facts["training"], data.facts["of held-out families"], data.facts["left out, like those"]) == (9, 3, 1)
    rows = torch.randint(20, (4, 201), generator=torch.Generator().manual_seed(0))
    inputs, targets = task("bidirectional", rows, torch.Generator().manual_seed(0))
    hidden = targets != IGNORED
    assert torch.equal(targets[hidden], rows[:, 1:][hidden])
    assert torch.equal(inputs[~hidden], rows[:, 1:][~hidden])
    assert not ((inputs == TOKENS.mask_token_id) & ~hidden).any()


def test_shares_of_residues_are_sums_over_attention_matrices():
    torch.manual_seed(0)
    config = TarnnConfig(vocab_size=28, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, causal=False)
    model, rows = TarnnForMaskedLM(config).eval(), [torch.randint(20, (n,)) for n in (60, 90)]
    expected = np.zeros((8, 20))
    for ids in rows:
        weights = np.concatenate([m.weights()[0].numpy() for m in attention_maps(model, input_ids=ids[None])])
        for kind in range(20):
            expected[:, kind] += weights[:, :, ids.numpy() == kind].sum((1, 2))
    shares = attention_to_residues(model, rows)
    np.testing.assert_allclose(shares, expected / expected.sum(1, keepdims=True), rtol=1e-4)


def test_a_matrix_of_residues(data, tmp_path):
    matrix = read_matrix(data("proteins/BLOSUM62.txt"))
    assert closest(matrix, 3) == ["FY", "IV", "DE"]
    assert agreement(matrix, 2 * matrix + 1) == pytest.approx(1)
    letters, path = " ".join(AMINO_ACIDS), tmp_path / "m.txt"
    rows = "".join(f"{x} {' '.join('1' * 20)}\n" for x in AMINO_ACIDS)
    path.write_text(f"# x\n {letters}\n{rows.replace('C 1', 'C')}")
    with pytest.raises(UserError, match=r"m\.txt, line 4: expected a letter and 20 numbers; got C and 19"):
        read_matrix(path)


def test_intervals_of_error_rates():
    draw = np.random.default_rng(0)
    edits, symbols = draw.integers(0, 5, (1, 400)), np.full(400, 10)
    found = Errors(edits, symbols).rate()
    assert found.mean == pytest.approx(10 * edits.mean())
    width = 2 * 1.96 * 10 * edits.std() / 400**0.5  # of a mean of independent numbers
    assert found.high - found.low == pytest.approx(width, rel=0.05)
    assert found.low < found.mean < found.high


def test_methods_are_compared_on_the_same_utterances_and_over_their_seeds():
    draw = np.random.default_rng(0)
    edits, symbols = draw.integers(0, 9, (3, 50)), draw.integers(5, 20, 50)
    better = Errors(edits, symbols)
    worse = Errors(edits[:1].repeat(3, 0) + symbols, symbols)  # one seed's, and each symbol wrong once more
    once = Errors(edits[:1], symbols)
    assert worse.above(once) == pytest.approx((100, 100, 100))
    assert worse.above(once).decided
    assert not Errors(edits[1:2], symbols).above(once).decided
    points = worse.above(better)
    assert points.low < points.mean < points.high  # seeds differ
    assert points.mean == pytest.approx(worse.rate().mean - better.rate().mean)


def test_a_family_is_what_shares_words_also_over_several_links():
    draw = random.Random(0)
    a, b, c, alone = ("".join(draw.choices(AMINO_ACIDS, k=60)) for _ in range(4))
    between = a[:30] + b[:30]
    assert families([a, alone, between, b]) == [[0, 2, 3], [1]]
    assert families([a, b, c]) == [[0], [1], [2]]
    assert families([a, c[:6] + b]) == [[0], [1]]
    assert families([a, a[:10] + b]) == [[0], [1]]  # five words of 55
    assert families([a, a[:11] + b]) == [[0, 1]]  # six
    repeated = ["".join(draw.choices(AMINO_ACIDS, k=30)) + "AAAAAAAAAAAA" for _ in range(60)]
    assert len(families(repeated)) == 60  # what all have says nothing


def test_what_is_asked_for_is_what_stood_after_the_key():
    ids, labels = pairs(torch.Generator().manual_seed(0), 5, 7)
    assert ids.shape == labels.shape == (5, 28)
    for row, wanted in zip(ids, labels):
        pairs_of_row = dict(row[:14].view(-1, 2).tolist())
        assert len(pairs_of_row) == 7
        assert dict(row[14:].view(-1, 2).tolist()) == pairs_of_row
        assert (wanted[:14] == NOT_ASKED).all()
        assert (wanted[14::2] == NOT_ASKED).all()
        assert torch.equal(wanted[15::2], row[15::2])
        assert (row[0::2] < SYMBOLS).all()
        assert (row[1::2] >= SYMBOLS).all()


def kind_of(*scores, rate="0.001"):
    return {"runs": {rate: {str(seed): {"curve": [{"score": x}]} for seed, x in enumerate(scores)}}}


def test_who_leads_leads_in_every_seed_and_at_every_width():
    """With the rate that is best with the first seed."""
    kind = {"runs": kind_of(2.0, 1.0)["runs"] | kind_of(1.9, 9.0, rate="0.003")["runs"]}
    assert (best_rate(kind, more_is_better=False), best_rate(kind, more_is_better=True)) == (0.003, 0.001)
    default, ahead, once_behind = kind_of(2.0, 2.1), kind_of(1.9, 2.0), kind_of(1.5, 2.2)
    wide, wider = "books, 128 wide", "books, 256 wide"
    kinds = {DEFAULT: default, "Mamba-2": ahead, "gated delta": once_behind}
    assert leaders({wide: kinds, wider: kinds}) == ["Mamba-2"]
    assert leaders({wide: kinds, wider: kinds | {"Mamba-2": default}}) == []
    assert leaders({wide: kinds, wider: {DEFAULT: default}}) == []
