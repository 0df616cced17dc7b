"""Residues that a model can't tell apart are alike; a matrix is read as it stands, or refused with its line."""

import numpy as np
import pytest
import torch
from residues import agreement, attention_to_residues, closest, read_matrix, similarity

from tarnn.analysis.attention_maps import attention_maps
from tarnn.data.proteins import AMINO_ACIDS
from tarnn.errors import UserError
from tarnn.models import TarnnConfig, TarnnForMaskedLM

ROWS = [torch.randint(20, (n,), generator=torch.Generator().manual_seed(n)) for n in (60, 90)]


@pytest.fixture
def model():
    torch.manual_seed(0)
    config = TarnnConfig(
        vocab_size=28, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, causal=False, initializer_range=0.5
    )
    return TarnnForMaskedLM(config).eval()


def test_shares_are_sums_over_attention_matrices(model):
    shares = attention_to_residues(model, ROWS)
    assert shares.shape == (8, 20)
    np.testing.assert_allclose(shares.sum(1), 1)
    expected = np.zeros((8, 20))
    for ids in ROWS:
        weights = np.concatenate([m.weights()[0].numpy() for m in attention_maps(model, input_ids=ids[None])])
        for kind in range(20):
            expected[:, kind] += weights[:, :, ids.numpy() == kind].sum((1, 2))
    np.testing.assert_allclose(shares, expected / expected.sum(1, keepdims=True), rtol=1e-4)


def test_residues_with_one_embedding_are_the_closest(model):
    with torch.no_grad():
        model.model.embed_tokens.weight[AMINO_ACIDS.index("E")] = model.model.embed_tokens.weight[2]  # D
    assert closest(similarity(attention_to_residues(model, [torch.cat(ROWS * 9)])), 1) == ["DE"]


def test_blosum62(data):
    matrix = read_matrix(data("proteins/BLOSUM62.txt"))
    at = AMINO_ACIDS.index
    assert (matrix[at("W"), at("W")], matrix[at("A"), at("R")]) == (11, -1)
    assert np.array_equal(matrix, matrix.T)
    assert closest(matrix, 3) == ["FY", "IV", "DE"]
    assert agreement(matrix, 2 * matrix + 1) == pytest.approx(1)


def test_a_damaged_matrix(tmp_path):
    path = tmp_path / "m.txt"
    letters = " ".join(AMINO_ACIDS)
    rows = "".join(f"{x} {' '.join('1' * 20)}\n" for x in AMINO_ACIDS)
    path.write_text(f"# x\n {letters}\n{rows}")
    assert read_matrix(path).sum() == 400
    path.write_text(f"# x\n {letters}\n{rows.replace('C 1', 'C')}")
    with pytest.raises(UserError, match=r"m\.txt, line 4: expected a letter and 20 numbers; got C and 19"):
        read_matrix(path)
    path.write_text(f" {letters}\n{rows[41:]}")
    with pytest.raises(UserError, match=r"has no row or column of A;"):
        read_matrix(path)
