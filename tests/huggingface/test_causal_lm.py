"""The language model: one function, whichever way it is run."""

import pytest
import torch
from torch.nn.functional import cross_entropy
from transformers import DynamicCache

from tarnn.models import TarnnConfig, TarnnForCausalLM

CLOSE = {"rtol": 1e-5, "atol": 1e-6}  # the fast interface returns float32 logits
CLOSE64 = {"rtol": 1e-9, "atol": 1e-9}


@torch.no_grad()
@pytest.mark.parametrize("pieces", [(1, 6), (4, 4), (7,)])
def test_prefill_in_pieces_then_steps_is_forward(model, ids, pieces):
    x = ids(2, 11)
    whole = model(x).logits
    state, place = model.new_state(2, capacity=11), 0
    for n in pieces:
        logits, state = model.prefill(x[:, place : place + n], state)
        place += n
        torch.testing.assert_close(logits, whole[:, place - 1].float(), **CLOSE)
    for i in range(place, 11):
        logits, state = model.step(x[:, i], state)
        assert logits.dtype == torch.float32
        torch.testing.assert_close(logits, whole[:, i].float(), **CLOSE)
    assert state.position.tolist() == [11, 11]


@torch.no_grad()
def test_forward_in_pieces_with_a_cache_is_forward(model, ids):
    x = ids(2, 9)
    whole = model(x).logits
    cache, pieces = None, []
    for piece in x.split([4, 1, 1, 3], dim=1):
        out = model(piece, cache=cache, use_cache=True)
        cache = out.cache
        pieces.append(out.logits)
    assert cache.get_seq_length() == 9
    torch.testing.assert_close(torch.cat(pieces, dim=1), whole, **CLOSE64)


@torch.no_grad()
@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_is_cutting(model, ids, side):
    """In forward, and in prefill with the steps that follow it."""
    x, lengths = ids(2, 7), torch.tensor([[4], [7]])
    index = torch.arange(7)[None]
    mask = (index >= 7 - lengths if side == "left" else index < lengths).long()
    logits = model(x, attention_mask=mask).logits
    last, state = model.prefill(x, model.new_state(2, capacity=9), attention_mask=mask)
    after, state = model.step(x[:, 0], state)
    assert state.position.tolist() == [5, 8]
    for row in range(2):
        real = mask[row].bool()
        alone = model(torch.cat([x[row, real], x[row, :1]])[None]).logits[0]
        torch.testing.assert_close(logits[row, real], alone[:-1], **CLOSE64)
        torch.testing.assert_close(last[row], alone[-2].float(), **CLOSE)
        torch.testing.assert_close(after[row], alone[-1].float(), **CLOSE)


@torch.no_grad()
def test_padding_within_a_prompt_in_pieces(model, ids):
    """A mask for each piece; a row may have no token in one of them."""
    x = ids(2, 6)
    mask = torch.tensor([[0, 0, 0, 0, 1, 1], [0, 1, 1, 1, 1, 0]])
    state = model.new_state(2, capacity=6)
    _, state = model.prefill(x[:, :3], state, attention_mask=mask[:, :3])
    logits, state = model.prefill(x[:, 3:], state, attention_mask=mask[:, 3:])
    assert state.position.tolist() == [2, 4]
    for row in range(2):
        alone = model(x[row : row + 1, mask[row].bool()]).logits[0, -1]
        torch.testing.assert_close(logits[row], alone.float(), **CLOSE)


@torch.no_grad()
def test_the_future_does_not_reach_the_past(model, ids):
    x = ids(2, 8)
    changed = x.clone()
    changed[:, 5:] = 3 + (changed[:, 5:] + 1) % 30
    assert torch.equal(model(x).logits[:, :5], model(changed).logits[:, :5])
    assert not torch.equal(model(x).logits[:, 5:], model(changed).logits[:, 5:])


def test_position_ids_and_embeddings_may_be_given(model, ids):
    x = ids(2, 5)
    given = model(inputs_embeds=model.get_input_embeddings()(x), position_ids=torch.arange(5)[None])
    torch.testing.assert_close(given.logits, model(x).logits, rtol=0, atol=0)


def test_loss_is_the_mean_of_the_next_tokens(model, ids):
    x = ids(2, 6)
    labels = x.clone()
    labels[0, :3] = -100
    out = model(x, labels=labels)
    # as transformers does, cross entropy in float32
    expected = cross_entropy(out.logits[:, :-1].flatten(0, 1).float(), labels[:, 1:].flatten())
    torch.testing.assert_close(out.loss, expected)
    torch.testing.assert_close(model(x, labels=labels, num_items_in_batch=16).loss, expected * 8 / 16)


@torch.no_grad()
def test_logits_to_keep(make_model, ids):
    model, x = make_model(), ids(2, 6)
    whole = model(x).logits
    torch.testing.assert_close(model(x, logits_to_keep=2).logits, whole[:, -2:])
    torch.testing.assert_close(model(x, logits_to_keep=torch.tensor([0, 3])).logits, whole[:, [0, 3]])


@torch.no_grad()
def test_some_hidden_states(make_model, ids):
    model, x = make_model("hybrid"), ids(2, 6)
    whole = model(x, output_hidden_states=True).hidden_states
    some = model(x, output_hidden_states=[1, -1]).hidden_states
    assert [h is not None for h in some] == [False, True, False, False, True]
    torch.testing.assert_close(some[1], whole[1])


@pytest.mark.parametrize("way", ["whole", "padded", "packed", "cached"])
def test_attentions_of_softmax_layers(make_model, ids, way):
    """Weights add to one over what a token may see; they are those that make the output, gradients included."""
    model, x, arguments = make_model("hybrid"), ids(2, 6), {}
    see = torch.ones(6, 6).tril().bool().expand(2, 1, 6, 6)
    if way == "padded":
        arguments["attention_mask"] = torch.tensor([[0, 0, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1]])
        see = see & arguments["attention_mask"][:, None, None].bool()
    if way == "packed":
        arguments["position_ids"] = torch.tensor([[0, 1, 2, 3, 4, 5], [0, 1, 0, 1, 2, 3]])
        see = torch.block_diag(*(torch.ones(n, n).tril() for n in (6, 2, 4))).bool()[None, None]
    if way == "cached":
        cache = model(x[:, :4]).cache
        x, see, arguments["cache"] = x[:, 4:], see[:, :, 4:], cache
    out = model(x, output_attentions=True, **arguments)
    first, second = out.attentions  # two of four layers
    assert first.shape == second.shape == (see.shape[0], 4, *see.shape[2:])
    assert not first[~see.expand_as(first)].any()
    torch.testing.assert_close(first.sum(-1), see.any(-1).expand(first.shape[:3]).double())
    if way != "cached":
        torch.testing.assert_close(out.logits, model(x, **arguments).logits, **CLOSE64)
        second.retain_grad()
        out.logits.sum().backward()
        assert second.grad.abs().sum() > 0


def test_caches_are_handed_on_where_that_makes_sense(make_model, ids):
    model, x = make_model(), ids(1, 4)
    assert model(x).cache is not None
    assert model(x, use_cache=False).cache is None
    assert model(x, cu_seqlens=torch.tensor([0, 4])).cache is None
    assert model.train()(x).cache is None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (lambda m, x: {"input_ids": x[:, :0]}, "the input is empty"),
        (lambda m, x: {}, "give input_ids or inputs_embeds"),
        (lambda m, x: {"input_ids": x, "inputs_embeds": m.model.embed_tokens(x)}, "one of the two"),
        (lambda m, x: {"input_ids": x[0]}, r"input_ids \(b, t\).*got \(5,\)"),
        (lambda m, x: {"input_ids": x.repeat(1, 13)}, "up to 64 tokens .*; got 65"),
        (lambda m, x: {"input_ids": x, "attention_mask": torch.ones(2, 4)}, r"\(2, 5\).*got \(2, 4\)"),
        (lambda m, x: {"input_ids": x, "attention_mask": torch.ones(2, 1, 5, 5)}, "attention_mask must be"),
        (lambda m, x: {"input_ids": x, "output_attentions": True}, "never forms its attention matrices"),
        (lambda m, x: {"input_ids": x, "cache": DynamicCache()}, "was not made for this model"),
        (
            lambda m, x: {"input_ids": x[:1], "cu_seqlens": torch.tensor([0, 5]), "use_cache": True},
            "goes without a cache",
        ),
        (
            lambda m, x: {"input_ids": x[:1], "cu_seqlens": torch.tensor([0, 5]), "attention_mask": torch.ones(1, 5)},
            "without attention_mask",
        ),
    ],
)
def test_bad_input(make_model, ids, arguments, message):
    model = make_model("gated")  # takes 64 tokens
    with pytest.raises(ValueError, match=message):
        model(**arguments(model, ids(2, 5)))


def test_arguments_that_would_be_ignored_are_refused(make_model, ids):
    with pytest.raises(ValueError, match="its config's to say, here causal = True; got is_causal=False"):
        make_model()(ids(1, 3), is_causal=False)


def test_arguments_of_transformers_are_taken(make_model, ids):
    """What its tokenizers, its Trainer and `generate` pass to any model, as Llama takes it."""
    model, x = make_model(), ids(2, 6)
    plain = model(x, labels=x)
    of_trainer = {"token_type_ids": torch.zeros_like(x), "return_dict": True, "ignore_index": -100}
    same = model(x, labels=x, **of_trainer, max_length_q=6, max_length_k=6, output_router_logits=False)
    torch.testing.assert_close(same.loss, plain.loss, rtol=0, atol=0)
    shifted = torch.cat([x[:, 1:], torch.full((2, 1), -100)], dim=1)
    loss = model(x, labels=torch.full_like(x, 5), shift_labels=shifted).loss
    torch.testing.assert_close(loss, plain.loss, rtol=0, atol=0)


@torch.no_grad()
def test_the_limit_is_for_positions_not_for_the_width_of_a_row(make_model, ids):
    """Packed rows, and padding on either side, may be wider."""
    model, x = make_model("gated", max_position_embeddings=6), ids(1, 12)
    cuts = torch.tensor([0, 6, 12], dtype=torch.int32)
    expected = torch.cat([model(half).logits for half in x.split(6, dim=1)], dim=1)
    torch.testing.assert_close(model(x, cu_seqlens=cuts).logits, expected, **CLOSE64)
    for real in (slice(3, 9), slice(6, 12)):
        mask = torch.zeros_like(x)
        mask[:, real] = 1
        alone = model(x[:, real]).logits
        torch.testing.assert_close(model(x, attention_mask=mask).logits[:, real], alone, **CLOSE64)
        last, state = model.prefill(x, model.new_state(1), attention_mask=mask)
        torch.testing.assert_close(last, alone[:, -1].float(), **CLOSE)
        assert state.position.item() == 6
    with pytest.raises(ValueError, match=r"up to 6 tokens .*; got 7"):
        model(x, cu_seqlens=torch.tensor([0, 7, 12], dtype=torch.int32))
    with pytest.raises(ValueError, match=r"up to 6 tokens .*; got 9"):
        model(x[:, :1], position_ids=torch.tensor([[8]]))


@pytest.mark.compile
def test_a_model_is_exported_without_a_cache():
    """Which is no output that torch.export knows."""
    model = TarnnForCausalLM(
        TarnnConfig(vocab_size=7, hidden_size=8, num_hidden_layers=1, num_attention_heads=2)
    ).eval()
    ids = torch.tensor([[1, 2, 3, 4]])
    t = torch.export.Dim("t", min=2)
    program = torch.export.export(model, (ids,), dynamic_shapes={"input_ids": {1: t}}, strict=False).module()
    for x in (ids, torch.arange(6)[None]):
        torch.testing.assert_close(program(x).logits, model(x).logits)
