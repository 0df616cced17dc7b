"""The laws that every baseline keeps: padding, packing, causality, gradients, growth of memory; and their names in a config."""

from itertools import pairwise

import pytest
import torch
from measures.attentions import ROWS as TABLE
from support.baselines import CAUSAL, ROWS, build, inputs, mixed
from support.cost import costs

import experiments.baselines
from experiments.baselines.graph import GraphAttention
from tarnn.attention import names
from tarnn.attention.registry import ATTENTIONS
from tarnn.cli.main import main as command
from tarnn.models import TarnnConfig, TarnnForCausalLM, TarnnForSequenceClassification

CLOSE = {"rtol": 1e-9, "atol": 1e-10}
T = 19
SMALL = {"vocab_size": 31, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
FORMS = [
    (name, causal) for name, row in ROWS.items() for causal in (False, True) if (row.causal if causal else row.both)
]


@pytest.fixture(params=FORMS, ids=lambda x: f"{x[0]}, {'causal' if x[1] else 'both sides'}")
def layer(request):
    name, causal = request.param
    return build(ROWS[name], causal)


def test_padding_is_cutting(layer):
    """On both sides and within; a row may be all padding; what stands at masked places reaches nothing, and yields zeros."""
    x, mask = inputs(4, T, 14), torch.ones(4, T, dtype=torch.bool)
    mask[0, :4] = mask[0, 17:] = mask[1, 11:] = mask[1, 5] = mask[3] = False
    if isinstance(layer, GraphAttention):  # a position is a node: cutting one gives those after it other edges
        mask[0, :4] = mask[1, 5] = True
    x = x.masked_fill(~mask[..., None], torch.nan).requires_grad_()
    y = layer(x, key_mask=mask)
    for row in range(3):
        alone = layer(x[row : row + 1, mask[row]])
        torch.testing.assert_close(y[row : row + 1, mask[row]], alone, **CLOSE)
    assert not y[~mask].any()
    y.square().sum().backward()
    assert x.grad.isfinite().all()
    assert not x.grad[3].any()


def test_packed_is_a_loop_and_rows_do_not_mix(layer):
    cuts, x = [0, 1, 1, 7, T], inputs(3, T, 14)
    y = layer(x[:1], cu_seqlens=torch.tensor(cuts, dtype=torch.int32))
    for a, b in pairwise(cuts):
        if b > a:
            torch.testing.assert_close(y[:, a:b], layer(x[:1, a:b]), **CLOSE)
    changed = x.clone()
    changed[1] += 1
    y, y2 = layer(x), layer(changed)
    assert torch.equal(y[[0, 2]], y2[[0, 2]])
    assert not torch.equal(y[1], y2[1])


@pytest.mark.parametrize("name", [name for name, row in CAUSAL.items() if row.to_the_bit])
def test_the_future_does_not_reach_the_past(name):
    """Causality to the bit."""
    layer, x, other = build(CAUSAL[name], causal=True), inputs(2, T, 14), inputs(2, T, 14, seed=2) * 100
    y = layer(x)
    for t in (1, 5, 12, 18):
        y2 = layer(torch.cat([x[:, :t], other[:, t:]], dim=1))
        assert torch.equal(y[:, :t], y2[:, :t])
        assert not torch.equal(y[:, t:], y2[:, t:])


@pytest.mark.parametrize("name", [name for name, row in CAUSAL.items() if not row.to_the_bit])
def test_no_later_value_reaches_the_past(name):
    """Later keys do, as published: chunks of a sorted row, and clusters of one size, depend on the whole row."""
    layer, x, t = build(CAUSAL[name], causal=True), inputs(2, T, 14), 11
    q, k, v = layer.project(x, x)
    later = torch.cat([v[:, :, :t], 100 * v[:, :, t:]], dim=2)
    o, changed = (mixed(layer, x, q, k, y) for y in (v, later))
    assert torch.equal(o[:, :, :t], changed[:, :, :t])
    assert not torch.equal(o[:, :, t:], changed[:, :, t:])


@pytest.mark.parametrize("name", [name for name, row in CAUSAL.items() if not row.to_the_bit])
def test_later_tokens_move_some_earlier_outputs_by_half_of_their_size(name):
    """So the pages call these not causal."""
    layer, x, t = build(CAUSAL[name], causal=True), inputs(2, 64, 14), 48
    y, y2 = (layer(torch.cat([x[:, :t], later], dim=1))[:, :t] for later in (x[:, t:], inputs(2, 16, 14, seed=2)))
    moved = (y2 - y).norm(dim=-1) / y.norm(dim=-1).clamp(min=1e-9)
    assert moved.amax() > 0.5
    called = {row.attention for row in TABLE.values() if row.leaks}
    assert called == {row.name for row in CAUSAL.values() if not row.to_the_bit}


def test_gradients_are_right_and_every_parameter_has_one(layer):
    """With some keys masked: of the input and of all parameters."""
    x, mask = inputs(2, 9, 14).requires_grad_(), torch.ones(2, 9, dtype=torch.bool)
    mask[0, 6:] = False
    parameters = [p for _, p in layer.named_parameters()]

    def f(x, *_):
        return layer(x, key_mask=mask)

    assert torch.autograd.gradcheck(f, (x, *parameters), fast_mode=True)
    (layer.train()(inputs(2, T, 14)) * torch.linspace(-1, 1, 14, dtype=torch.float64)).sum().backward()
    assert [name for name, p in layer.named_parameters() if p.grad is None or not p.grad.any()] == []


def test_short_rows_and_low_precision(layer):
    for t in (1, 2):
        assert layer(inputs(2, t, 14)).shape == (2, t, 14)
    x = inputs(2, T, 14)
    exact = layer(x)
    y = layer.bfloat16()(x.bfloat16())
    assert y.dtype == torch.bfloat16
    assert (y.double() - exact).norm() < 0.5 * exact.norm()  # what is chosen may differ


LINEAR, ROOT = 4, 8  # growth of t and of t√t where tokens are four times as many
GROWTH = {  # of what is kept and of the largest tensor; options as functions of t
    "window": (LINEAR, LINEAR, lambda t: {"window": 32}),
    "lsh": (LINEAR, ROOT, lambda t: {"chunk": 16, "rounds": 2}),  # hashing looks at √(t / chunk) directions
    "sparse, strided": (ROOT, ROOT, lambda t: {"stride": int(t**0.5)}),
    "sparse, fixed": (ROOT, ROOT, lambda t: {"stride": int(t**0.5), "summaries": 1}),
    "longformer": (LINEAR, LINEAR, lambda t: {"reach": 16}),
    "bigbird": (LINEAR, LINEAR, lambda t: {"block": 16}),
    "routing": (ROOT, ROOT, lambda t: {"clusters": int(t**0.5), "reach": 16}),
    "low rank delta": (LINEAR, LINEAR, lambda t: {}),
    "clustered": (LINEAR, LINEAR, lambda t: {"clusters": 8}),
    "improved clustered": (LINEAR, LINEAR, lambda t: {"clusters": 8, "top_keys": 8}),
    "transformer-xl": (LINEAR, LINEAR, lambda t: {"segment": 16, "memory": 16}),
    "compressive": (LINEAR, LINEAR, lambda t: {"segment": 16, "memory": 16, "compressed": 16, "rate": 4}),
    "linformer": (LINEAR, LINEAR, lambda t: {"length": t}),
    "nystrom": (LINEAR, LINEAR, lambda t: {"landmarks": 8}),
    "hydra": (LINEAR, LINEAR, lambda t: {}),
    "graph of distances": (1.2 * LINEAR, 1.2 * LINEAR, lambda t: {}),  # t·log t
    "matrix": (4 * LINEAR, 4 * LINEAR, None),  # the growth that no baseline may have would be seen
}


@pytest.mark.parametrize("name", GROWTH)
def test_memory_grows_as_it_should(name):
    """From 1k to 4k tokens: what is kept for the backward pass, and the largest tensor on the way."""
    kept, largest, options = GROWTH[name]

    def layer(t):
        if options is None:
            return lambda x: (x @ x.mT).softmax(-1) @ x
        return build(ROWS[name], causal=not ROWS[name].both, **options(t))

    less, more = (costs(layer(t), inputs(1, t, 14)) for t in (1024, 4096))
    assert 0.85 * (kept if options is None else LINEAR) * less.kept < more.kept <= 1.1 * kept * less.kept
    assert more.largest <= 1.1 * largest * less.largest


def test_every_baseline_has_a_row_here_and_none_is_tarnns_own():
    assert {row.name for row in ROWS.values()} == set(experiments.baselines.NAMES)
    assert not set(names()) & set(experiments.baselines.NAMES)


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
    options = {"baselines.lsh": {"rounds": 1, "chunk": 8}}
    config = TarnnConfig(attention=["baselines.lsh", "linear"], attention_options=options, position="rotary", **SMALL)
    attention = TarnnForCausalLM(config).model.layers[0].attention
    assert (attention.rounds, attention.chunk, attention.rotary is None) == (1, 8, False)


def test_the_command_refuses_its_checkpoint_with_a_sentence(tmp_path, monkeypatch, capsys):
    TarnnForCausalLM(TarnnConfig(attention="baselines.lsh", **SMALL)).save_pretrained(tmp_path)
    monkeypatch.delitem(ATTENTIONS, "baselines.lsh")  # as in the command's own process, which imports no experiment
    for words in (["generate", str(tmp_path), "--prompt", "a"], ["info", str(tmp_path)]):
        assert command(words) != 0
        said = " ".join(capsys.readouterr().err.split())
        assert "got 'baselines.lsh'. A package outside tarnn declares the names baselines.*" in said
        assert "Traceback" not in said


X = torch.zeros(1, 3, 14, dtype=torch.float64)
REFUSALS = {  # row, options, what is called then, words of the message
    "a state": ("lsh", {}, lambda y: y(X, return_state=True), "no step, no state"),
    "a new state": ("lsh", {}, lambda y: y.new_state(1), "no step, no state"),
    "a step": ("lsh", {}, lambda y: y.step(X[:, :1], None), "use_cache=False"),
    "cross attention": ("lsh", {"context_size": 10}, None, "leave context_size out"),
    "two masks": ("lsh", {}, lambda y: y(X, key_mask=X[..., 0] == 0, cu_seqlens=torch.tensor([0, 3])), "not both"),
    "a decoder": ("bigbird", {"causal": True}, None, "pass causal=False"),
    "an encoder": ("transformer-xl", {"causal": False}, None, "pass causal=True"),
    "odd heads": ("sparse, fixed", {"num_heads": 3}, None, "got 3 heads"),
    "many summaries": ("sparse, fixed", {"summaries": 5}, None, "got 5"),
    "a small memory": ("compressive", {"causal": True, "segment": 4, "memory": 2, "rate": 2}, None, "memory = 2"),
    "a compression": ("compressive", {"causal": True, "compression": "least"}, None, "got 'least'"),
    "sharing": ("linformer", {"shared": "layers"}, None, "got 'layers'"),
    "a long row": ("linformer", {"length": 2}, lambda y: y(X), "length=3 or more"),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_what_is_refused(case):
    row, options, call, words = REFUSALS[case]
    with pytest.raises(ValueError, match=words):
        (call or id)(build(ROWS[row], **options))
