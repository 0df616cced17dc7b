"""A state depends on its tokens alone: not on which of them were read or written, in what pieces, or beside whom.

So a server may keep a state at any place of a text and go on from it: the answer is to the last bit that of a cold run.
"""

import random

import pytest
import torch
from support.step_models import text_model

from tarnn.decoding.fused import FusedStep
from tarnn.decoding.opening import open_step
from tarnn.kernels.cpu import library
from tarnn.kernels.cpu.products import FORMATS
from tarnn.serving.model import ServedModel, StateKey
from tarnn.serving.pool import Pool, copy_of
from tarnn.serving.snapshot import Snapshot

pytestmark = pytest.mark.skipif(not library.available(), reason="the compiled kernels are not there")

KINDS = {
    "linear": {"decay": "none", "position": "none"},
    "decayed": {"decay": "head"},
    "decayed by channel": {"decay": "channel"},
    "rotary": {"decay": "none", "position": "rotary"},
    "delta": {"attention": "gated_delta"},
    "convolved": {"conv_kernel": 5, "attention": ["linear", "softmax", "linear"]},
    "hybrid": {"attention": ["linear", "softmax", "linear"], "position": "rotary", "num_key_value_heads": 2},
}
SHAPE = {"hidden_size": 72, "head_dim": 18, "intermediate_size": 200}  # wider than a panel of the products
TOKENS, ROWS = 90, 9


class Sequences:
    """Texts that a server works on: where each of them stands, and the logits there."""

    def __init__(self, model, texts):
        self.step, self.texts, self.pool = model.step, texts, Pool(model, len(texts))
        empty = model.model.new_state(1, capacity=TOKENS)
        self.snapshots = [Snapshot(empty, torch.zeros(1, model.step.num_outputs), text[:0].numpy()) for text in texts]

    def place(self, row):
        return len(self.snapshots[row].tokens)

    def read(self, row, count):
        """A piece of one text, alone."""
        place = self.place(row)
        piece = self.texts[row][place : place + count]
        if len(piece):
            logits, state = self.step.prefill(piece[None], copy_of(self.snapshots[row].state, TOKENS))
            self.snapshots[row] = Snapshot(state, logits, self.texts[row][: place + len(piece)].numpy())

    def write(self, rows, count):
        """Steps of these texts in one pool. Their tokens are given, as if they had been drawn."""
        rows = [row for row in rows if self.place(row) + count <= TOKENS]
        for row in rows:
            self.pool.add(self.snapshots[row])
        places = [self.place(row) for row in rows]
        for i in range(count if rows else 0):
            self.pool.step(torch.stack([self.texts[row][place + i] for row, place in zip(rows, places)]))
        for i, (row, place) in enumerate(zip(rows, places)):
            self.snapshots[row] = self.pool.snapshot(i, self.texts[row][: place + count].numpy())
        self.pool.clear()


@pytest.mark.parametrize("weights", FORMATS)
@pytest.mark.parametrize("kind", KINDS)
def test_reading_and_writing_in_any_company_give_one_state(kind, weights):
    model = text_model(**SHAPE, **KINDS[kind])
    check(model, FusedStep(model, weights), seed=f"{kind} {weights}")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", ["delta", "convolved"])
def test_models_in_16_bits_too(kind, dtype):
    opened = open_step(text_model(**SHAPE, **KINDS[kind]).to(dtype))
    check(opened, opened.step, seed=kind)


def check(model, step, *, seed):
    draw = random.Random(seed)
    texts = torch.randint(0, 97, (ROWS, TOKENS), generator=torch.Generator().manual_seed(1))
    served = Sequences(ServedModel("m", model, step, StateKey("", step.weights, "")), texts)
    while any(served.place(row) < TOKENS for row in range(ROWS)):
        for row in range(ROWS):
            served.read(row, draw.randint(0, 20))
        for _ in range(2):
            served.write(draw.sample(range(ROWS), draw.randint(1, ROWS)), draw.randint(1, 4))
    for text, snapshot in zip(texts, served.snapshots):
        logits, state = step.prefill(text[None], model.new_state(1, capacity=TOKENS))
        assert torch.equal(snapshot.logits, logits)
        expected = state.tensors()
        assert all(torch.equal(x, expected[name]) for name, x in snapshot.state.tensors().items())


def test_a_token_more_is_another_state():
    """Or the law above could not fail."""
    step = FusedStep(text_model(**SHAPE, **KINDS["linear"]))
    ids = torch.randint(0, 97, (1, 9), generator=torch.Generator().manual_seed(1))
    _, eight = step.prefill(ids[:, :8], step.model.new_state(1))
    _, nine = step.prefill(ids, step.model.new_state(1))
    assert not torch.equal(eight.layers[0].S, nine.layers[0].S)
