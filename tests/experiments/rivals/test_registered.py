"""Importing the folder gives the rivals names that a config takes; without it tarnn does not know them."""

import pytest
import torch
from support.rivals import ROWS

import experiments.rivals
from tarnn.attention import names
from tarnn.attention.registry import ATTENTIONS
from tarnn.cli.main import main as command
from tarnn.models import TarnnConfig, TarnnForCausalLM, TarnnForSequenceClassification

SMALL = {"vocab_size": 31, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}


def test_every_rival_has_a_row_in_the_laws():
    assert {row.name for row in ROWS.values()} == set(experiments.rivals.NAMES)
    assert not set(names()) & set(experiments.rivals.NAMES)  # found, but not listed among tarnn's own


@pytest.mark.parametrize("row", {row.name: row for row in ROWS.values()}.values(), ids=lambda row: row.name)
def test_a_model_of_it_trains(row):
    """An encoder if it can be one; its loss falls on one batch."""
    torch.manual_seed(0)
    config = TarnnConfig(attention=row.name, causal=not row.both, position="sinusoidal", num_labels=3, **SMALL)
    model = TarnnForSequenceClassification(config)
    ids, mask = torch.randint(31, (4, 40)), torch.arange(40) < torch.tensor([[40], [33], [40], [21]])
    batch = {"input_ids": ids, "attention_mask": mask.long(), "labels": torch.tensor([0, 1, 2, 0])}
    optimizer, losses = torch.optim.Adam(model.parameters(), lr=0.02), []
    for _ in range(10):
        loss = model(**batch).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.7 * losses[0]


def test_its_options_are_those_of_the_config():
    options = {"rivals.lsh": {"rounds": 1, "chunk": 8}}
    config = TarnnConfig(attention=["rivals.lsh", "linear"], attention_options=options, position="rotary", **SMALL)
    layers = TarnnForCausalLM(config).model.layers
    assert (layers[0].attention.rounds, layers[0].attention.chunk) == (1, 8)
    assert layers[0].attention.rotary is not None
    with pytest.raises(
        ValueError, match=r"attention 'rivals.lsh' has no option 'round'; it takes chunk, dropout, rounds"
    ):
        TarnnConfig(attention="rivals.lsh", attention_options={"rivals.lsh": {"round": 1}}, **SMALL)


def test_the_command_refuses_its_checkpoint_with_a_sentence(tmp_path, monkeypatch, capsys):
    TarnnForCausalLM(TarnnConfig(attention="rivals.lsh", **SMALL)).save_pretrained(tmp_path)
    monkeypatch.delitem(ATTENTIONS, "rivals.lsh")  # as in the command's own process, which imports no experiment
    for words in (["generate", str(tmp_path), "--prompt", "a"], ["info", str(tmp_path)]):
        assert command(words) != 0
        said = " ".join(capsys.readouterr().err.split())
        assert "got 'rivals.lsh'. A package outside tarnn declares the names rivals.*" in said
        assert "Traceback" not in said
