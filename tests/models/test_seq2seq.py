"""The encoder–decoder: one function whichever way it runs, and a source that is read once."""

import pytest
import torch
from torch.nn.functional import cross_entropy
from transformers import AutoModelForSeq2SeqLM

from tarnn.models import TarnnForConditionalGeneration, TarnnSeq2SeqConfig

SIZES = {
    "vocab_size": 37, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "eos_token_id": 2,
    "initializer_range": 0.3,
}  # fmt: skip
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
@pytest.mark.parametrize(
    "options", [{}, {"num_beams": 3}, {"num_beams": 2, "num_return_sequences": 2}], ids=str
)
def test_generate_with_a_cache_is_without(model, source, options):
    x, mask = source
    wanted = {"attention_mask": mask, "max_new_tokens": 7, "do_sample": False, **options}
    assert torch.equal(model.generate(x, **wanted), model.generate(x, use_cache=False, **wanted))


@torch.no_grad()
def test_a_source_is_read_once(source):
    """generate runs the encoder once, and projects its keys once per layer."""
    model = build("linear")
    seen = []
    model.encoder.layers[0].register_forward_hook(lambda *_: seen.append("encoder"))
    for block in model.decoder.layers:
        block.cross_attention.k_proj.register_forward_hook(lambda _, args, __: seen.append(args[0].shape[1]))
    model.generate(source[0], max_new_tokens=5, do_sample=False)
    assert [x for x in seen if x] == ["encoder", 9, 9]


@torch.no_grad()
def test_the_state_does_not_know_how_long_the_source_was(ids):
    sizes = {n: build("linear").read(ids(1, n)).nbytes for n in (3, 30)}
    assert sizes[3] == sizes[30]
    sizes = {n: build("softmax").read(ids(1, n), capacity=4).nbytes for n in (3, 30)}
    assert sizes[3] < sizes[30]


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
    model.train()
    model.activation_checkpointing_enable()
    model(*source, labels=ids(2, 5)).loss.backward()
    assert all(p.grad is not None and p.grad.any() for p in model.parameters())


def test_refusals(ids):
    with pytest.raises(ValueError, match="has is_encoder_decoder=True, a causal decoder"):
        TarnnSeq2SeqConfig(**SIZES, causal=False)
    with pytest.raises(ValueError, match=r"must be one of .*softmax.*; got 'hard'"):
        TarnnSeq2SeqConfig(**SIZES, cross_attention="hard")
    with pytest.raises(ValueError, match="decoder_start_token_id must be a token's number"):
        TarnnSeq2SeqConfig(**SIZES, decoder_start_token_id=37)
    with pytest.raises(ValueError, match="needs decoder_input_ids, or labels"):
        build("linear")(ids(1, 3))
