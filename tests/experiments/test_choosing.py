"""Choosing an attention: what is to be recalled, which runs are made, and who leads."""

import pytest
import torch
from measures.choosing_page import DEFAULT, best_rate, leaders
from measures.choosing_tasks import IGNORED, SYMBOLS, pairs


@pytest.fixture
def options(books, tmp_path):
    words = ["--quick", "--minutes", 0.0003, "--recall-minutes", 0.0003, "--widths", 16, "--looks", 1]
    words += ["--kinds", "gated delta", DEFAULT]
    return [*words, "--books", books, "--runs", tmp_path / "runs"]


def test_what_is_asked_for_is_what_stood_behind_the_key():
    ids, labels = pairs(torch.Generator().manual_seed(0), 5, 7)
    assert ids.shape == labels.shape == (5, 28)
    for row, wanted in zip(ids, labels):
        pairs_of_row = dict(row[:14].view(-1, 2).tolist())
        assert len(pairs_of_row) == 7
        assert dict(row[14:].view(-1, 2).tolist()) == pairs_of_row
        assert (wanted[:14] == IGNORED).all()
        assert (wanted[14::2] == IGNORED).all()
        assert torch.equal(wanted[15::2], row[15::2])
        assert (row[0::2] < SYMBOLS).all()
        assert (row[1::2] >= SYMBOLS).all()


def test_the_first_seed_tries_the_rates_and_nothing_is_trained_twice(
    script, data_of, folder, pictures, options, tmp_path
):
    code, _, err = script("choosing", *options)
    assert code == 0, err
    results = data_of("choosing")["results"]
    assert list(results) == ["books, 16 wide", "recall", "copying"]
    for name, kinds in results.items():
        assert list(kinds) == ["gated delta", DEFAULT]
        for found in kinds.values():
            chosen = f"{best_rate(found, not name.startswith('books')):g}"
            assert {rate: list(runs) for rate, runs in found["runs"].items()} == {
                rate: ["0", "1"] if rate == chosen else ["0"] for rate in ("0.001", "0.003")
            }
    page = (folder / "choosing.md").read_text()
    assert "| attention | 2 pairs | 4 pairs | copying 16 |" in page
    assert len(pictures["choosing.png"].axes) == 2
    before = {path: path.read_bytes() for path in (tmp_path / "runs").rglob("*.pt")}
    assert len(before) == 3 * 2 * 3
    assert script("choosing", *options).code == 0
    assert before == {path: path.read_bytes() for path in (tmp_path / "runs").rglob("*.pt")}
    assert data_of("choosing")["results"] == results
    code, _, err = script("choosing", *options, "--context", 16)
    assert (code, "runs with another context" in err) == (1, True), err


def kind_of(*scores, rate="0.001"):
    return {"runs": {rate: {str(seed): {"curve": [{"score": x}]} for seed, x in enumerate(scores)}}}


def test_the_best_rate_is_that_of_the_first_seed():
    kind = {"runs": kind_of(2.0, 1.0)["runs"] | kind_of(1.9, 9.0, rate="0.003")["runs"]}
    assert best_rate(kind, more_is_better=False) == 0.003
    assert best_rate(kind, more_is_better=True) == 0.001


def test_who_leads_leads_in_every_seed_and_at_every_width():
    default, ahead, once_behind = kind_of(2.0, 2.1), kind_of(1.9, 2.0), kind_of(1.5, 2.2)
    wide, wider = "books, 128 wide", "books, 256 wide"
    kinds = {DEFAULT: default, "Mamba-2": ahead, "gated delta": once_behind}
    assert leaders({wide: kinds, wider: kinds}) == ["Mamba-2"]
    assert leaders({wide: kinds, wider: kinds | {"Mamba-2": default}}) == []
    assert leaders({wide: kinds, wider: {DEFAULT: default}}) == []
    assert leaders({"recall": kinds}) == []


def test_a_folder_without_the_unseen_book_is_refused(script, tmp_path):
    code, _, err = script("choosing", "--quick", "--books", tmp_path, "--runs", tmp_path / "runs")
    assert (code, "pride_and_prejudice among them; it has none" in err) == (1, True), err
