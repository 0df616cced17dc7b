"""A plan of the fused step is checked by the kernel that reads it: none that is wrong gets as far as a weight."""

import pytest
import torch

from tarnn.decoding.hybrid import Hybrid
from tarnn.kernels.cpu import model_step
from tarnn.kernels.cpu.model_step import ATTENTIONS, DECAYS, MLPS, VERSION
from tarnn.kernels.cpu.products import Block
from tarnn.program.feature_functions import FUNCTIONS

pytestmark = pytest.mark.usefixtures("compiled")
HIDDEN, HEADS, KEY_HEADS, D, INNER, TOKENS = 24, 4, 2, 8, 40, 11
FEATURES, VALUES, WIDE, WINDOW = 20, 4, 6, 5


def matrix(block, outputs, inputs, weights="float32"):
    block.matrix(torch.randn(outputs, inputs) / 8, torch.randn(outputs), weights)


def norms(block, count):
    for _ in range(2 * count):  # gain and bias
        block.vector(torch.ones(HIDDEN))


def layer(block, kind):
    """A layer's kind, norms and feed-forward."""
    block.numbers(ATTENTIONS.index(kind), False)
    norms(block, 1)
    block.numbers(MLPS.index("gelu"), INNER)
    norms(block, 1)
    matrix(block, INNER, HIDDEN, "bfloat16")
    matrix(block, HIDDEN, INNER)


def attention(block, kind, decay="none", rotation=-1, qkv=(HEADS + 2 * KEY_HEADS) * D):
    layer(block, kind)
    block.numbers(DECAYS.index(decay), rotation, 0)
    if kind == "softmax":
        block.numbers(True, True)
        qkv += HEADS * D
    if kind == "hybrid":
        Hybrid(WINDOW, 1, ("features", "exact")).write(block)
    for _ in range({"linear": 1, "hybrid": 2}.get(kind, 0)):  # of queries and keys
        block.numbers(FUNCTIONS.index("exp"), True, True, FEATURES, 1, FEATURES)
        block.heads(torch.randn(1, FEATURES, D), None)
        block.place(torch.tensor([0.5, 0.0, 1.0, 0.0, -1e30], dtype=torch.float64))
        block.place(None)
        block.numbers(1)
        for width in (D, D, D, 1):
            block.vector(torch.ones(width))
        block.numbers(0)
        for _ in range(4):
            block.vector(None)
    if kind == "hybrid":
        block.vector(torch.randn(HEADS))
    rank = 3 if decay == "channel" else 0
    matrix(block, qkv + rank, HIDDEN, "int8")
    matrix(block, HIDDEN, HEADS * D, "int4")
    if decay == "channel":
        block.heads(torch.randn(KEY_HEADS, FEATURES, rank), torch.randn(KEY_HEADS, FEATURES))
    for heads in (HEADS, KEY_HEADS, 1) if kind == "softmax" else (1, 1, 1):
        block.vector(torch.ones(heads * D))
    block.vector(None)


def delta(block):
    """A layer of two key heads and four values, with a decay a channel."""
    layer(block, "delta")
    block.numbers(2, 2, VALUES, D, WIDE, 4, 4)
    block.place(torch.randn(4, 64))
    block.numbers(DECAYS.index("channel"))
    block.place(torch.tensor([1.0, 1e-6], dtype=torch.float64))
    block.vector(torch.ones(WIDE))
    block.vector(torch.ones(VALUES))
    matrix(block, 4 * D + 2 * VALUES * WIDE + VALUES + 3, HIDDEN)
    matrix(block, HIDDEN, VALUES * WIDE)
    block.heads(torch.randn(VALUES, D, 3), torch.randn(VALUES, D))


def written() -> Block:
    """A model of five layers with all that a plan can say of them."""
    torch.manual_seed(0)
    block = Block(VERSION)
    block.numbers(HIDDEN, HEADS, KEY_HEADS, D, 5, 1)
    block.numbers(True, True, True)  # pre-norm, centred, normalised
    block.numbers(D, True)
    block.place(torch.rand(D // 2, dtype=torch.float64))
    attention(block, "linear", "channel", rotation=0)
    attention(block, "softmax", rotation=0)
    attention(block, "none", qkv=KEY_HEADS * D)
    delta(block)
    attention(block, "hybrid", rotation=0)
    norms(block, 1)
    matrix(block, TOKENS, HIDDEN, "bfloat16")
    return block


def run(plan, weights, states=None, tokens=None, ids=None, starts=None, slots=None):
    states = states or [
        torch.zeros(1, KEY_HEADS, FEATURES, D), torch.zeros(1, KEY_HEADS, FEATURES), torch.zeros(1, KEY_HEADS),
        torch.zeros(1, KEY_HEADS, 4, D), torch.zeros(1, KEY_HEADS, 4, D),
        torch.zeros(1, VALUES, D, WIDE), torch.zeros(1, 4, 4 * D + VALUES * WIDE),
        torch.zeros(1, 1, WINDOW + 1, D), torch.zeros(1, 1, WINDOW + 1, D), torch.zeros(1, 1, FEATURES, D),
        torch.zeros(1, 1, FEATURES), torch.zeros(1, 1), torch.zeros(1, dtype=torch.int64),
        torch.zeros(1, 1, 4, D), torch.zeros(1, 1, 4, D),
    ]  # fmt: skip
    ids = torch.zeros(1, dtype=torch.int64) if ids is None else ids
    tokens = torch.randn(TOKENS, HIDDEN) if tokens is None else tokens
    lengths = torch.tensor([0, 0, 0, 0])
    position = torch.zeros(1, dtype=torch.int64)
    outputs, tables = torch.empty(1, TOKENS), (torch.as_tensor(plan), weights, tokens, None, None)
    model_step.run(ids, position, *tables, states, lengths, outputs, 9, 1e-5, 1e-30, 1.0, starts, slots)
    assert position.item() == len(ids)
    return outputs


@pytest.fixture(scope="module")
def block():
    return written()


@pytest.fixture(scope="module")
def weights(block):
    return block.bytes()


def test_a_whole_plan_runs(block, weights):
    assert run(block.plan, weights).isfinite().all()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda plan: [plan[0] + 1, *plan[1:]], f"has version {VERSION + 1}, and these compiled kernels read version {VERSION}"),
        (lambda plan: plan[:2], "cut short: it has no header"),
        (lambda plan: plan[:-1], "cut short or too long"),
        (lambda plan: [*plan, 0], "cut short or too long"),
        (lambda plan: [plan[0], len(plan) - 1, *plan[2:-1]], "cut short: it ends before the head"),
        (lambda plan: [plan[0], len(plan) + 1, *plan[2:], 0], "too long: 1 numbers are left over"),
        (lambda plan: [*plan[:2], plan[2] + 64, *plan[3:]], "is for a block of"),
        (lambda plan: [*plan[:3], 25, *plan[4:]], "must be"),
        (lambda plan: [*plan[:4], 3, *plan[5:]], "the heads do not fit each other"),
        (lambda plan: [*plan[:40], FUNCTIONS.index("waves"), *plan[41:]], "the number of features is not that"),
        (lambda plan: [*plan[:14], plan[14] + 1, *plan[15:]], "do not lie in the block"),
        (lambda plan: [*plan[:14], plan[2] - 8, *plan[15:]], "do not lie in the block"),
        (lambda plan: torch.tensor(plan, dtype=torch.int32), "must be int64"),
    ],
)  # fmt: skip
def test_a_broken_plan_is_refused_by_what_is_wrong_with_it(block, weights, change, message):
    with pytest.raises(RuntimeError, match=message):
        run(change(block.plan), weights)


@pytest.mark.parametrize("wrong", [-2, 2**20 + 1, 2**62])
def test_no_number_of_a_plan_leads_beyond_its_block(block, weights, wrong):
    """Each in turn; only what is read for features of another kind may be anything."""
    for i in range(len(block.plan)):
        with pytest.raises(RuntimeError, match="plan"):
            run([*block.plan[:i], wrong, *block.plan[i + 1 :]], weights)


def test_states_and_tables_of_another_model_are_refused(block, weights):
    with pytest.raises(RuntimeError, match="states are not those"):
        run(block.plan, weights, states=[torch.zeros(1, KEY_HEADS, FEATURES, D)])
    with pytest.raises(RuntimeError, match="tables"):
        run(block.plan, weights, tokens=torch.randn(TOKENS, HIDDEN + 1))


@pytest.mark.parametrize(
    ("starts", "slots", "message"),
    [
        (None, None, "several tokens of a sequence come with starts"),
        ([0, 3, 3], None, "one more than sequences"),
        ([0, 2], None, "from 0 to the number of tokens"),
        ([1, 3], None, "from 0 to the number of tokens"),
        ([0, 3], [0, 1, 2], "one more than sequences and tokens"),
        ([0, 3], [0, 2, 1, 3], "slots of a sequence ascend"),
        ([0, 3], [0, 1, 3, 3], "slots of a sequence ascend"),
        ([0, 3], [0, 1, 2, -1], "no so many slots"),
        ([0, 3], [0, 1, 2, 3], "without a mask has no gaps"),
        ([0, 3], [0, 1, 4, 5], "states are not those"),
        ([0, 3.0], None, "must be int64"),
    ],
)
def test_rows_that_do_not_fit_are_refused(block, weights, starts, slots, message):
    assert run(block.plan, weights, ids=torch.tensor([1, 2, 3]), starts=torch.tensor([0, 3])).isfinite().all()
    starts, slots = (None if x is None else torch.tensor(x) for x in (starts, slots))
    with pytest.raises(RuntimeError, match=message):
        run(block.plan, weights, ids=torch.tensor([1, 2, 3]), starts=starts, slots=slots)


def test_more_keys_than_a_cache_has_room_for_are_refused(block, weights):
    with pytest.raises(RuntimeError, match="states are not those"):
        run(block.plan, weights, ids=torch.arange(5), starts=torch.tensor([0, 5]))
