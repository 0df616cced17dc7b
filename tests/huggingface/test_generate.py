"""transformers' generate() and pipelines on our models."""

import types
import warnings

import pytest
import torch
from support.model_kinds import KINDS, UNFUSED, build
from support.models import fixtures_of
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import (
    DynamicCache,
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    PreTrainedTokenizerFast,
    pipeline,
)

from tarnn.data.tokenizers import byte_tokenizer
from tarnn.huggingface.versions import cache_of

kind, model, make_model = fixtures_of(KINDS | UNFUSED, build)
GREEDY = {"do_sample": False, "max_new_tokens": 6, "eos_token_id": None}


def generate(model, x, **options):
    return model.generate(x, **GREEDY | options)


def test_greedy_is_the_argmax_of_forward(model, ids):
    x = ids(2, 5)
    y = generate(model, x)
    assert y.shape == (2, 11)
    for t in range(5, 11):
        assert torch.equal(y[:, t], model(y[:, :t]).logits[:, -1].argmax(-1))


@pytest.mark.parametrize(
    "options",
    [
        {"num_beams": 3},
        {"num_beams": 3, "num_return_sequences": 2, "length_penalty": 0.5, "eos_token_id": 7},
        {"do_sample": True, "top_k": 0, "temperature": 1.5},
        {"do_sample": True, "num_beams": 2, "num_return_sequences": 2},
        {"repetition_penalty": 1.3, "no_repeat_ngram_size": 2},
    ],
    ids=["beams", "beams returned", "sampling", "sampled beams", "penalties"],
)
def test_with_and_without_a_cache(model, ids, options):
    x, outputs = ids(2, 5), []
    for use_cache in (True, False):
        torch.manual_seed(0)
        outputs.append(generate(model, x, use_cache=use_cache, pad_token_id=0, **options))
    assert torch.equal(*outputs)


@pytest.mark.parametrize("beams", [1, 3])
def test_left_padding_changes_nothing(model, ids, beams):
    x, lengths = ids(2, 6), (3, 6)
    mask = torch.ones_like(x)
    for row, n in enumerate(lengths):
        x[row, : 6 - n] = 0
        mask[row, : 6 - n] = 0
    y = generate(model, x, attention_mask=mask, num_beams=beams, pad_token_id=0)
    for row, n in enumerate(lengths):
        alone = generate(model, x[row : row + 1, 6 - n :], num_beams=beams, pad_token_id=0)
        assert torch.equal(y[row, 6 - n :], alone[0])


def test_continuation_from_a_cache(model, ids):
    """Generate, keep the cache, go on from it: as if in one go; also with a new piece of prompt."""
    x = ids(1, 5)
    whole = generate(model, x, max_new_tokens=8)
    first = generate(model, x, max_new_tokens=3, return_dict_in_generate=True)
    again = generate(model, first.sequences, cache=cache_of(first), max_new_tokens=5)
    assert torch.equal(again, whole)
    first = generate(model, x, max_new_tokens=3, return_dict_in_generate=True)
    longer = torch.cat([first.sequences, ids(1, 4)], dim=1)
    expected = generate(model, longer)
    assert torch.equal(generate(model, longer, cache=cache_of(first)), expected)


@pytest.mark.parametrize("beams", [1, 2])
@pytest.mark.parametrize("given", ["input_ids", "inputs_embeds", "first"])
def test_right_padding_changes_nothing(model, ids, beams, given):
    """Each row goes on as if it had been alone, and the prompts come back as they were."""
    x, mask = ids(2, 6), torch.ones(2, 6, dtype=torch.int64)
    mask[1, 4:] = 0
    x = torch.where(mask.bool(), x, 0)
    options = {"num_beams": beams, "pad_token_id": 0, "attention_mask": mask} | GREEDY
    if given == "first":
        y = model.generate(x, **options)
    else:
        y = model.generate(**{given: x if given == "input_ids" else model.get_input_embeddings()(x)}, **options)
    new = y[:, -6:]
    assert given == "inputs_embeds" or torch.equal(y[:, :6], x)
    for row, n in ((0, 6), (1, 4)):
        alone = generate(model, x[row : row + 1, :n], num_beams=beams, pad_token_id=0)
        assert torch.equal(new[row], alone[0, n:])
    found = model.generate(x, return_dict_in_generate=True, **options)
    assert torch.equal(found.sequences[:, :6], x)


def test_right_padding_that_nobody_names(model, ids):
    """The mask is that of transformers; an empty cache is none; a streamer is given the prompt as it was."""
    x = ids(2, 6).clamp(min=3)
    x[1, 4:] = 0
    options = GREEDY | {"pad_token_id": 0}
    alone = [model.generate(x[:1], **options)[0, 6:], model.generate(x[1:, :4], **options)[0, 4:]]
    for more in ({}, {"cache": DynamicCache(config=model.config)}):
        found = model.generate(x, **options, **more)
        assert torch.equal(found[:, :6], x)
        assert torch.equal(found[:, 6:], torch.stack(alone))
    seen = []
    streamer = types.SimpleNamespace(put=seen.append, end=lambda: None)
    model.generate(x[1:], attention_mask=(x[1:] != 0).long(), streamer=streamer, **options)
    assert torch.equal(seen[0], x[1:])


def test_arguments_mean_what_they_mean_to_transformers(model, ids):
    class Seven(LogitsProcessor):
        def __call__(self, input_ids, scores):
            return torch.full_like(scores, -1e9).index_fill(1, torch.tensor([7]), 0.0)

    x, config = ids(2, 5), GenerationConfig(**GREEDY)
    assert model.generate(x, config, LogitsProcessorList([Seven()]))[:, 5:].eq(7).all()
    assert torch.equal(model.generate(None, config, input_ids=x), model.generate(x, config))
    with pytest.raises(TypeError):
        model.generate(x, config, inputs=x)
    with pytest.raises(ValueError, match="inputs"):
        model.generate(x, config, input_ids=x)
    with pytest.raises(ValueError, match="cuts a model in two"):
        model.generate(x, config, assistant_early_exit=1)


@pytest.mark.parametrize("padded", [False, True])
def test_chunked_prefill(model, ids, padded):
    x = ids(2, 10)
    mask = torch.ones_like(x)
    if padded:
        mask[0, :6] = 0
    expected = generate(model, x, attention_mask=mask, pad_token_id=0)
    chunked = generate(model, x, attention_mask=mask, pad_token_id=0, prefill_chunk_size=4)
    assert torch.equal(chunked, expected)


def test_pipeline(make_model):
    words = ["<pad>", "<s>", "</s>", *(f"w{i}" for i in range(34))]
    tokenizer = Tokenizer(WordLevel({w: i for i, w in enumerate(words)}, unk_token="<pad>"))
    tokenizer.pre_tokenizer = Whitespace()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<s>", eos_token="</s>", padding_side="left"
    )
    model = make_model("hybrid")
    pipe = pipeline("text-generation", model=model, tokenizer=fast)
    options = {"max_new_tokens": 4, "do_sample": False, "eos_token_id": None}
    texts = pipe(["w5 w6 w7", "w9"], batch_size=2, **options)
    for prompt, (out,) in zip(["w5 w6 w7", "w9"], texts, strict=True):
        x = fast(prompt, return_tensors="pt").input_ids
        new = generate(model, x, max_new_tokens=4)[0, x.shape[1] :]
        assert out["generated_text"] == prompt + fast.decode(new, skip_special_tokens=True)


def test_stop_strings(make_model):
    model, tokenizer = make_model("hybrid", vocab_size=257), byte_tokenizer()
    x = tokenizer("w5 w6", return_tensors="pt").input_ids
    y = generate(model, x, max_new_tokens=12)[0, 5:]
    stop = tokenizer.decode(y[3:4])
    first = next(i for i in range(12) if stop in tokenizer.decode(y[: i + 1]))
    stopped = generate(model, x, max_new_tokens=12, stop_strings=[stop], tokenizer=tokenizer)
    assert stopped.shape[1] == 5 + first + 1


def test_a_misspelt_argument_is_refused_up_front(make_model, ids):
    model, x, calls = make_model("hybrid"), ids(1, 5), []
    model.register_forward_pre_hook(lambda *_: calls.append(1))
    with pytest.raises(ValueError, match="atention_mask"):
        generate(model, x, atention_mask=torch.ones(1, 5))
    assert not calls


@torch.no_grad()
def test_all_that_generate_hands_out(make_model, ids):
    """For each new token: scores, logits, hidden states of all layers, the softmax layers' attentions."""
    model, x = make_model("hybrid"), ids(2, 5)
    asked = ("output_scores", "output_logits", "output_hidden_states", "output_attentions")
    out = generate(model, x, return_dict_in_generate=True, **dict.fromkeys(asked, True))
    assert torch.equal(out.sequences, generate(model, x))
    assert [len(h) for h in out.hidden_states] == [5] * 6
    assert [[a.shape for a in token] for token in out.attentions] == [[(2, 4, 5, 5)] * 2] + [
        [(2, 4, 1, n)] * 2 for n in range(6, 11)
    ]
    torch.testing.assert_close(out.logits[2], model(out.sequences[:, :7]).logits[:, -1].float())


@pytest.mark.parametrize("how", ["prompt lookup", "another model", "itself"])
def test_assisted_decoding_makes_the_same_tokens(make_model, ids, how):
    """Candidates of which none, some or all are right: the rest is forgotten by every kind of layer."""
    x = ids(1, 12)
    x = torch.cat([x, x[:, :8]], dim=1)  # something to look up
    greedy = {"do_sample": False, "max_new_tokens": 20, "eos_token_id": None}
    for kind in ("linear", "hybrid", "random and placed"):
        model = make_model(kind)
        assistant = {"another model": make_model("linear", num_hidden_layers=1), "itself": make_model(kind)}
        choice = {"assistant_model": assistant[how]} if how in assistant else {"prompt_lookup_num_tokens": 4}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # transformers' own, about its own arguments
            got = model.generate(x, **greedy, **choice)
        assert torch.equal(got, model.generate(x, **greedy))
