"""The encoder–decoder: one function whichever way it runs, and a source that is read once."""

from functools import partial

import pytest
import torch
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint
from transformers import AutoModel, AutoModelForSeq2SeqLM, Seq2SeqTrainer, Seq2SeqTrainingArguments

from tarnn.models import TarnnForConditionalGeneration, TarnnSeq2SeqConfig, TarnnSeq2SeqModel

SIZES = {
    "vocab_size": 37,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "eos_token_id": 2,
    "initializer_range": 0.3,
}
KINDS = {
    "linear": {"encoder_layers": 1},
    "softmax": {"attention": "softmax", "position": "rotary"},
    "linear, softmax across": {"cross_attention": "softmax"},
    "mixed": {"attention": ["linear", "softmax"], "cross_attention": ["softmax", "linear"], "decay": "none"},
    "favor": {"feature_map": "favor", "decay": "none", "tie_word_embeddings": False},
}
CLOSE = {"rtol": 1e-5, "atol": 1e-6}


@pytest.fixture(params=KINDS)
def model(request):
    return build(request.param)


def build(kind, **options):
    torch.manual_seed(0)
    return TarnnForConditionalGeneration(TarnnSeq2SeqConfig(**SIZES | KINDS[kind] | options)).double().eval()


@pytest.fixture
def source(ids):
    """(tokens, mask): the second row is shorter."""
    return ids(2, 9), (torch.arange(9) < torch.tensor([[9], [5]])).long()


@torch.no_grad()
def test_steps_are_forward(model, source, ids):
    """Tokens one after the other, from a state that is small where attention is linear and never grows."""
    target = ids(2, 6)
    out = model(*source, labels=target)
    before = model.prepare_decoder_input_ids_from_labels(target)
    assert before[:, 0].tolist() == model.start(2).tolist()
    assert torch.equal(before[:, 1:], target[:, :-1])
    state, sizes = model.read(*source, capacity=6), []
    for i in range(6):
        logits, state = model.step(before[:, i], state)
        sizes.append(state.nbytes)
        torch.testing.assert_close(logits, out.logits[:, i].float(), **CLOSE)
    assert len(set(sizes)) == 1
    expected = cross_entropy(out.logits.float().flatten(0, 1), target.flatten())
    torch.testing.assert_close(out.loss.float(), expected)


@torch.no_grad()
def test_a_padded_source_is_a_cut_one(model, source, ids):
    (x, mask), target = source, ids(2, 4)
    both = model(x, mask, labels=target).logits[1]
    alone = model(x[1:, :5], labels=target[1:]).logits[0]
    torch.testing.assert_close(both, alone, rtol=1e-9, atol=1e-9)


@torch.no_grad()
@pytest.mark.parametrize("options", [{}, {"num_beams": 3}, {"num_beams": 2, "num_return_sequences": 2}], ids=str)
def test_generate_with_a_cache_is_without(model, source, options):
    x, mask = source
    wanted = {"attention_mask": mask, "max_new_tokens": 7, "do_sample": False, **options}
    assert torch.equal(model.generate(x, **wanted), model.generate(x, use_cache=False, **wanted))


@torch.no_grad()
def test_saved_loaded_and_counted(model, source, ids, tmp_path):
    model.save_pretrained(tmp_path)
    loaded = AutoModelForSeq2SeqLM.from_pretrained(tmp_path)
    assert type(loaded) is TarnnForConditionalGeneration
    target = ids(2, 3)
    out, again = (m(*source, labels=target).logits for m in (model, loaded))
    torch.testing.assert_close(out, again, rtol=1e-9, atol=1e-9)
    buffers = sum(x.numel() for x in model.buffers())
    assert model.config.num_parameters_estimate() == model.num_parameters() + buffers
    tied = model.config.tie_word_embeddings
    assert (loaded.encoder.embed_tokens.weight is loaded.lm_head.weight) == tied


def test_gradients_reach_everything(model, source, ids):
    """The same ones, without checkpoints of activations and with both kinds."""
    model.train()
    gradients, target = [], ids(2, 5)
    for options in (None, {"use_reentrant": False}, {"use_reentrant": True}):
        model.zero_grad()
        if options is not None:
            model._set_gradient_checkpointing(True, partial(checkpoint, **options))
        model(*source, labels=target).loss.backward()
        assert all(p.grad is not None and p.grad.any() for p in model.parameters())
        gradients.append([p.grad.clone() for p in model.parameters()])
    for other in gradients[1:]:
        torch.testing.assert_close(other, gradients[0], rtol=1e-9, atol=1e-9)


@torch.no_grad()
def test_embeddings_are_read_in_the_place_of_tokens(model, source, ids):
    (x, mask), target = source, ids(2, 4)
    expected = model(x, mask, decoder_input_ids=target).logits
    embed = model.get_input_embeddings()
    other = model.encoder.embed_tokens
    both = {"inputs_embeds": other(x), "decoder_inputs_embeds": embed(target)}
    for options in (both, {"encoder_outputs": model.encoder(x, mask, return_dict=False)}):
        options = {"decoder_input_ids": None if "inputs_embeds" in options else target, **options}
        out = model(attention_mask=mask, **options).logits
        torch.testing.assert_close(out, expected, rtol=1e-9, atol=1e-9)


@torch.no_grad()
@pytest.mark.parametrize("kind", KINDS)
def test_hidden_states_and_weights_of_both_halves(kind, source, ids):
    model, (x, mask) = build(kind), source
    attentions = {
        "linear": (0, 0, 0),
        "softmax": (2, 2, 2),
        "linear, softmax across": (0, 0, 2),
        "mixed": (1, 1, 1),
        "favor": (0, 0, 0),
    }[kind]
    options = {"decoder_input_ids": ids(2, 4), "output_hidden_states": True}
    expected = model(x, mask, decoder_input_ids=options["decoder_input_ids"]).logits
    if not any(attentions):
        with pytest.raises(ValueError, match="no softmax layer"):
            model(x, mask, **options, output_attentions=True)
    for cached in (False, True):
        out = model(x, mask, **options, use_cache=cached, output_attentions=any(attentions))
        torch.testing.assert_close(out.logits, expected, rtol=1e-9, atol=1e-9)
        assert torch.equal(out.encoder_hidden_states[-1], out.encoder_last_hidden_state)
        assert len(out.encoder_hidden_states) == model.config.encoder_layers + 1
        assert [x.shape for x in out.decoder_hidden_states] == [(2, 4, 32)] * 3
        parts = (out.encoder_attentions, out.decoder_attentions, out.cross_attentions)
        assert tuple(len(x or ()) for x in parts) == attentions
        for weights, shape in zip(parts, ((9, 9), (4, 4), (4, 9)), strict=True):
            for one in weights or ():
                assert one.shape == (2, 4, *shape)
                torch.testing.assert_close(one.sum(-1), torch.ones_like(one.sum(-1)))
        for one in out.cross_attentions or ():
            assert one[1, :, :, 5:].eq(0).all()  # padding of the source
    if any(attentions):
        config = {"output_attentions": True, "output_hidden_states": True, "return_dict_in_generate": True}
        if attentions[0]:
            made = model.generate(x, attention_mask=mask, max_new_tokens=3, **config)
            assert len(made.cross_attentions) == len(made.decoder_hidden_states) == 3


@torch.no_grad()
def test_the_body_alone(model, source, ids, tmp_path):
    """AutoModel opens the checkpoint without its last layer."""
    model.save_pretrained(tmp_path)
    body = AutoModel.from_pretrained(tmp_path)
    assert type(body) is TarnnSeq2SeqModel
    target = ids(2, 3)
    out = body(*source, decoder_input_ids=target)
    torch.testing.assert_close(
        model.lm_head(out.last_hidden_state), model(*source, decoder_input_ids=target).logits, rtol=1e-9, atol=1e-9
    )
    body.save_pretrained(tmp_path / "body")
    again = TarnnForConditionalGeneration.from_pretrained(tmp_path / "body")
    tied = model.config.tie_word_embeddings
    assert torch.equal(again.lm_head.weight, model.lm_head.weight) == tied


@pytest.mark.filterwarnings("ignore")
def test_the_trainer_predicts_with_generate(source, ids, tmp_path):
    model, (x, mask) = build("mixed").float(), source
    target = ids(2, 4)
    rows = [{"input_ids": x[i], "attention_mask": mask[i], "labels": target[i]} for i in range(2)]
    options = Seq2SeqTrainingArguments(
        str(tmp_path), predict_with_generate=True, generation_max_length=6, report_to=[], use_cpu=True
    )
    predicted = Seq2SeqTrainer(model, options, eval_dataset=rows).predict(rows)
    expected = model.generate(x, attention_mask=mask, max_length=6)
    assert predicted.predictions[:, : expected.shape[1]].tolist() == expected.tolist()


def test_refusals(ids):
    with pytest.raises(ValueError, match="has is_encoder_decoder=True; leave it out"):
        TarnnSeq2SeqConfig(**SIZES, is_encoder_decoder=False)
    with pytest.raises(ValueError, match="has a causal decoder and no input_size; leave both out"):
        TarnnSeq2SeqConfig(**SIZES, causal=False)
    with pytest.raises(ValueError, match=r"must be one of .*softmax.*; got 'hard'"):
        TarnnSeq2SeqConfig(**SIZES, cross_attention="hard")
    with pytest.raises(ValueError, match="decoder_start_token_id must be a token's number"):
        TarnnSeq2SeqConfig(**SIZES, decoder_start_token_id=37)
    with pytest.raises(ValueError, match="needs decoder_input_ids, or labels"):
        build("linear")(ids(1, 3))
