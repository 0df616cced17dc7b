"""A state depends on its tokens alone: not on which of them were read or written, in what pieces, or beside whom.

So a server may keep a state at any place of a text and go on from it: the answer is to the last bit that of a cold run.
"""

import random
from dataclasses import replace

import pytest
import torch
from support.step_models import text_model
from torch.utils import _pytree as pytree

from tarnn.decoding.fused import FusedStep
from tarnn.kernels.cpu import library
from tarnn.kernels.cpu.model_step import FORMATS
from tarnn.models.state import ModelState
from tarnn.ops import KVCache
from tarnn.ops.softmax.rows import RowCaches

pytestmark = pytest.mark.skipif(not library.available(), reason="the compiled kernels are not there")

KINDS = {
    "linear": {"decay": "none", "position": "none"},
    "decayed": {"decay": "head"},
    "decayed by channel": {"decay": "channel"},
    "rotary": {"decay": "none", "position": "rotary"},
    "hybrid": {"attention": ["linear", "softmax", "linear"], "position": "rotary", "num_key_value_heads": 2},
}
SHAPE = {"hidden_size": 72, "head_dim": 18, "intermediate_size": 200}  # wider than a panel of the products
TOKENS, ROWS = 90, 9


def together(states):
    """One state with all of these rows, of which each has a cache of its own."""
    layers = (
        RowCaches(layers) if isinstance(layers[0], KVCache) else pytree.tree_map(lambda *x: torch.cat(x), *layers)
        for layers in zip(*(x.layers for x in states))
    )
    return ModelState(tuple(layers), torch.cat([x.position for x in states]))


def apart(state, row):
    """A row of such a state."""
    state = state.select(torch.tensor([row]))
    return replace(state, layers=tuple(x.rows[0] if isinstance(x, RowCaches) else x for x in state.layers))


class Sequences:
    """Texts that a server works on: where each of them stands, and the logits there."""

    def __init__(self, step, texts):
        self.step, self.texts = step, texts
        self.states = [step.model.new_state(1, capacity=TOKENS) for _ in texts]
        self.logits = [None] * len(texts)

    def place(self, row):
        return int(self.states[row].position)

    def read(self, row, count):
        """A piece of one text, alone."""
        piece = self.texts[row][self.place(row) :][:count]
        if len(piece):
            self.logits[row], self.states[row] = self.step.prefill(piece[None], self.states[row])

    def write(self, rows):
        """One step of these texts, in one call. Their tokens are given, as if they had been drawn."""
        rows = [row for row in rows if self.place(row) < TOKENS]
        if rows:
            tokens = torch.stack([self.texts[row][self.place(row)] for row in rows])
            logits, state = self.step(tokens, together([self.states[row] for row in rows]))
            for i, row in enumerate(rows):
                self.logits[row], self.states[row] = logits[i : i + 1], apart(state, i)


@pytest.mark.parametrize("weights", FORMATS)
@pytest.mark.parametrize("kind", KINDS)
def test_reading_and_writing_in_any_company_give_one_state(kind, weights):
    draw, step = random.Random(f"{kind} {weights}"), FusedStep(text_model(**SHAPE, **KINDS[kind]), weights)
    texts = torch.randint(0, 97, (ROWS, TOKENS), generator=torch.Generator().manual_seed(1))
    served = Sequences(step, texts)
    while any(served.place(row) < TOKENS for row in range(ROWS)):
        for row in range(ROWS):
            served.read(row, draw.randint(0, 20))
        for _ in range(draw.randint(1, 6)):
            served.write(draw.sample(range(ROWS), draw.randint(1, ROWS)))
    for row, text in enumerate(texts):
        logits, state = step.prefill(text[None], step.model.new_state(1, capacity=TOKENS))
        assert torch.equal(served.logits[row], logits)
        expected = state.tensors()
        assert all(torch.equal(x, expected[name]) for name, x in served.states[row].tensors().items())


def test_a_token_more_is_another_state():
    """Or the law above could not fail."""
    step = FusedStep(text_model(**SHAPE, **KINDS["linear"]))
    ids = torch.randint(0, 97, (1, 9), generator=torch.Generator().manual_seed(1))
    _, eight = step.prefill(ids[:, :8], step.model.new_state(1))
    _, nine = step.prefill(ids, step.model.new_state(1))
    assert not torch.equal(eight.layers[0].S, nine.layers[0].S)
