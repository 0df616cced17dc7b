"""The experiment on proteins: what is held out, what is guessed, and a run that goes on."""

import math

import numpy as np
import proteins
import pytest
import torch

RANDOM = np.random.default_rng(0)


def sequence(n):
    return "".join(RANDOM.choice(list(proteins.AMINO_ACIDS), n))


@pytest.fixture
def sequences(tmp_path):
    """A family of one, a sequence that holds a part of it, one that is named after it, and others."""
    folder, member = tmp_path / "data", sequence(60)
    folder.mkdir()
    (folder / "globins45.fasta").write_text(f">member\n{member}\n")
    (folder / "Pkinase_PF00069_seed.sto").write_text(f"# STOCKHOLM 1.0\nkinase {sequence(50)}\n//\n")
    rest = [(f"P{i}", sequence(80)) for i in range(12)]
    named = [("alike", sequence(9) + member[20:40]), ("Hemoglobin", sequence(30)), ("again", rest[0][1])]
    (folder / "uniprot_20k.fasta.gz").write_text("".join(f">{name}\n{s}\n" for name, s in named + rest))
    return folder


def test_families_are_held_out(sequences, monkeypatch):
    monkeypatch.setattr("sys.argv", ["proteins.py"])
    options = proteins.parse(proteins.__file__, "", proteins.FULL)
    options.data, options.test_sequences = sequences, 3
    data = proteins.split(options)
    assert data.facts == {
        "training": 9,
        "training residues": 720,
        "test": 3,
        "of held-out families": 3,
        "left out, like those": 1,
    }
    assert sorted(map(len, data.ood)) == [30, 50, 60]
    assert len(data.train) == 9 * 81
    found = proteins.empirical(data)["test"]
    assert 15 < found["perplexity"] < 25


def test_what_is_guessed():
    rows = torch.randint(20, (4, 201), generator=torch.Generator().manual_seed(0))
    inputs, targets = proteins.task("unidirectional", rows, None)
    assert torch.equal(inputs[:, 1:], targets[:, :-1])
    inputs, targets = proteins.task("bidirectional", rows, torch.Generator().manual_seed(0))
    hidden = targets != proteins.IGNORED
    assert torch.equal(targets[hidden], rows[:, 1:][hidden])
    assert torch.equal(inputs[~hidden], rows[:, 1:][~hidden])
    masked = inputs == proteins.TOKENS.mask_token_id
    assert not (masked & ~hidden).any()
    assert 0.1 < hidden.double().mean() < 0.2
    assert 0.7 < masked.sum() / hidden.sum() < 0.9


@pytest.mark.parametrize("direction", ["unidirectional", "bidirectional"])
def test_each_sequence_counts_as_if_it_were_alone(direction, monkeypatch):
    """Padding, and the order of the sequences, change nothing."""
    monkeypatch.setattr("sys.argv", ["proteins.py", "--quick"])
    model = proteins.build(direction, "elu + 1", proteins.parse(proteins.__file__, "", proteins.FULL, proteins.QUICK))
    rows = [np.arange(n) % 20 for n in (17, 5, 9)]
    together = proteins.evaluate(direction, model.eval(), rows, 16)
    if direction == "unidirectional":
        alone = [proteins.evaluate(direction, model, [row], 16) for row in rows]
        nats = sum(n * math.log(x["perplexity"]) for n, x in zip((16, 5, 9), alone)) / 30
        assert together["perplexity"] == pytest.approx(math.exp(nats))
    assert 10 < together["perplexity"] < 60


def test_runs_and_goes_on(script, data_of, pictures, sequences, tmp_path):
    options = ("--quick", "--data", sequences, "--runs", tmp_path / "runs", "--only", "softmax", "Performer-ReLU")
    code, out, _ = script("proteins", *options)
    assert code == 0
    found = data_of("proteins")["results"]
    for direction in proteins.PAPER:
        assert list(found["models"][direction]) == ["empirical", "softmax", "Performer-ReLU"]
        one = found["models"][direction]["softmax"]
        assert [x["step"] for x in one["curve"]] == [2, 4]
        assert one["test"]["perplexity"] < 40
    assert len(found["long"]) == 4
    assert "| Performer-ReLU |" in out
    again = script("proteins", *options, "--steps", 6, "--long", 0).out
    assert "unidirectional_softmax: {'step': 6" in again
    assert "'step': 2," not in again
    after = data_of("proteins")["results"]["models"]["bidirectional"]["softmax"]["curve"]
    assert after[:2] == found["models"]["bidirectional"]["softmax"]["curve"]


def test_sequences_that_are_not_there(script):
    code, _, err = script("proteins", "--quick")
    assert (code, "--data FOLDER" in err) == (1, True)


def test_amino_acids_by_attention(script, data_of, pictures, sequences, data, tmp_path):
    for name in ("BLOSUM62.txt", "BPT1_BOVIN.fasta"):
        (sequences / name).write_bytes(data(f"proteins/{name}").read_bytes())
    given = ("--quick", "--data", sequences, "--runs", tmp_path / "runs", "--only", "softmax", "Performer-ReLU")
    code, _, err = script("amino_acids", *given)
    assert (code, "experiments/proteins.py makes it" in err) == (1, True)
    script("proteins", *given, "--long", 0)
    assert script("amino_acids", *given).code == 0
    found = data_of("amino_acids")["results"]
    assert found["BLOSUM62"]["closest"][:3] == ["FY", "IV", "DE"]
    assert -1 < found["bidirectional, softmax"]["after"]["agreement"] < 1
    assert len(pictures["amino_acids.png"].axes) == 4
