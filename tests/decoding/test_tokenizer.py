"""A tokenizer read from its files alone makes the ids, texts and prompts of transformers' AutoTokenizer."""

import json
import subprocess
import sys

import pytest
from decoding.test_chat_template import CHATML, TOOLS
from hypothesis import given, settings, strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from tarnn.data.tokenizers import byte_tokenizer, encode
from tarnn.decoding.streaming import TextStream, decoder
from tarnn.decoding.tokenizer import open_tokenizer
from tarnn.errors import UserError

WORDS = [
    "the quick brown fox jumps over the lazy dog",
    "Once upon a time, there was a little girl named Lily.",
    "é ü 42 ß",
] * 9
TRAINED = {"vocab_size": 400, "show_progress": False}
SPECIAL = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}


def byte_level():
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    backend.train_from_iterator(WORDS, trainers.BpeTrainer(initial_alphabet=alphabet, **TRAINED))
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        **SPECIAL,
        additional_special_tokens=["<|im_start|>", "<|im_end|>"],
        chat_template=CHATML,
    )


def begins_and_ends():
    tokenizer = byte_level()
    ids = [(x, tokenizer.convert_tokens_to_ids(x)) for x in ("<s>", "</s>")]
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", pair="<s> $A </s> $B </s>", special_tokens=ids
    )
    tokenizer.add_tokens([AddedToken("<think>", normalized=False), AddedToken(" odd", lstrip=True)])
    return tokenizer


def word_piece():
    unknown = {"unk_token": "[UNK]"}
    backend = Tokenizer(models.WordPiece(**unknown))
    backend.normalizer = normalizers.BertNormalizer(lowercase=True)
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece()
    backend.train_from_iterator(WORDS, trainers.WordPieceTrainer(special_tokens=["[UNK]", "[CLS]"], **TRAINED))
    return PreTrainedTokenizerFast(tokenizer_object=backend, **unknown, cls_token="[CLS]", chat_template=CHATML)


def unigram():
    backend = Tokenizer(models.Unigram())
    backend.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Replace(" ", "▁")])
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace(), decoders.Fuse()])
    trainer = trainers.UnigramTrainer(special_tokens=["<unk>", "<s>", "</s>"], unk_token="<unk>", **TRAINED)
    backend.train_from_iterator(WORDS, trainer)
    backend.enable_truncation(5)
    backend.enable_padding(length=9)
    return PreTrainedTokenizerFast(tokenizer_object=backend, **SPECIAL, unk_token="<unk>", chat_template=CHATML)


def of_bytes():
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = CHATML
    return tokenizer


MAKERS = {f.__name__: f for f in (byte_level, begins_and_ends, word_piece, unigram, of_bytes)}


@pytest.fixture(scope="module", params=MAKERS)
def both(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    MAKERS[request.param]().save_pretrained(folder)
    return open_tokenizer(folder), AutoTokenizer.from_pretrained(folder)


texts = st.text(st.characters(codec="utf-8"), max_size=40) | st.lists(
    st.sampled_from(
        ["the", " quick", "Lily ", " odd", "<s>", "</s>", "<think>", "<|im_end|>", "é", "\n", "[CLS]", "  ", "🦊"]
    )
).map("".join)


@given(text=texts)
@settings(max_examples=60, deadline=None)
def test_ids_and_texts_are_those_of_transformers(both, text):
    ours, theirs = both
    for special in (True, False):
        ids = ours.encode(text, add_special_tokens=special)
        assert ids == theirs(text, add_special_tokens=special)["input_ids"]
        assert ours.convert_ids_to_tokens(ids) == theirs.convert_ids_to_tokens(ids)
        for skip in (True, False):
            expected = theirs.decode(ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False)
            assert ours.decode(ids, skip_special_tokens=skip) == expected
    assert encode(ours, text.encode()).tolist() == encode(theirs, text.encode()).tolist()


def test_what_it_knows_of_itself_is_what_transformers_says(both):
    ours, theirs = both
    assert (ours.bos_token_id, ours.eos_token_id, len(ours)) == (theirs.bos_token_id, theirs.eos_token_id, len(theirs))
    assert ours.special == theirs.special_tokens_map
    assert set(ours.all_special_ids) == set(theirs.all_special_ids)
    assert ours.chat_template == theirs.chat_template


@pytest.mark.parametrize("tools", [None, TOOLS])
@pytest.mark.parametrize("ready", [True, False])
def test_prompts_of_a_chat_are_those_of_transformers(both, tools, ready):
    ours, theirs = both
    talk = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Höw <b>?"}]
    talk += [{"role": "assistant", "content": "so", "reasoning_content": "hm"}, {"role": "user", "content": " and? "}]
    options = {"tools": tools, "add_generation_prompt": ready, "enable_thinking": False}
    expected = theirs.apply_chat_template(talk, tokenize=False, **options)
    text = ours.apply_chat_template(talk, **options)
    assert text == expected
    assert ours.encode(text, add_special_tokens=False) == theirs(text, add_special_tokens=False)["input_ids"]


def test_a_stream_is_written_as_the_whole(both):
    ours, _ = both
    ids = ours.encode("Once upon a time, 🦊 é the fox", add_special_tokens=False)
    stream = TextStream(decoder(ours))
    for token in ids:
        stream.push(token)
    stream.finish("end")
    assert stream.take() == ours.decode(ids, skip_special_tokens=True)


def rewritten(folder, file="tokenizer_config.json", **changes):
    path = folder / file
    fields = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps({key: x for key, x in (fields | changes).items() if x is not ...}))


SPELLED = {
    "as transformers 5 writes it": lambda folder: None,
    "bos at the beginning": lambda folder: rewritten(folder, add_bos_token=True),
    "bos and eos": lambda folder: rewritten(folder, add_bos_token=True, add_eos_token=True),
    "neither": lambda folder: rewritten(folder, add_bos_token=False),
    "tokens as objects": lambda folder: rewritten(
        folder, eos_token={"__type": "AddedToken", "content": "</s>", "lstrip": False, "normalized": False, "special": True}
    ),
    "another end": lambda folder: rewritten(folder, eos_token="<|im_end|>"),
    "a map of special tokens": lambda folder: (
        rewritten(folder, eos_token=..., added_tokens_decoder=...),
        rewritten(folder, "special_tokens_map.json", eos_token={"content": "<|im_end|>"}, bos_token="<s>"),
    ),
    "a map beside a table": lambda folder: (
        rewritten(folder, added_tokens_decoder={"333": {"content": "<more>", "special": False, "normalized": False}}),
        rewritten(folder, "special_tokens_map.json", eos_token="<|im_end|>"),
    ),
    "a word that ends": lambda folder: rewritten(folder, eos_token="Once"),
    "a word that is special": lambda folder: rewritten(folder, extra_special_tokens=["<|im_start|>", "<|im_end|>", "Once"]),
    "a list of tokens": lambda folder: (
        rewritten(folder, added_tokens_decoder=...),
        rewritten(folder, "added_tokens.json", **{"<more>": 333}),
    ),
    "a token beside the file": lambda folder: rewritten(
        folder, added_tokens_decoder={"333": {"content": "<more>", "special": False, "normalized": False}}
    ),
    "no settings": lambda folder: (folder / "tokenizer_config.json").write_text("{}"),
    "code of its own": lambda folder: rewritten(folder, tokenizer_class="PreTrainedTokenizerFast"),
}  # fmt: skip


@pytest.mark.parametrize("spelled", SPELLED)
def test_folders_of_all_versions_open(tmp_path, spelled):
    byte_level().save_pretrained(tmp_path)
    SPELLED[spelled](tmp_path)
    ours, theirs = open_tokenizer(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    assert (ours.bos_token_id, ours.eos_token_id) == (theirs.bos_token_id, theirs.eos_token_id)
    assert len(ours) == len(theirs)
    for text in ("the fox<more>", "<s>a</s> <|im_end|>", "", "<more", "Once upon"):
        ids = ours.encode(text)
        assert ids == theirs(text)["input_ids"]
        assert ours.decode(ids, skip_special_tokens=True) == theirs.decode(ids, skip_special_tokens=True)


def sentencepiece(folder):
    (folder / "tokenizer.json").unlink()
    (folder / "tokenizer.model").write_bytes(b"\n\x0e")


def own_code(folder):
    sentencepiece(folder)
    rewritten(folder, auto_map={"AutoTokenizer": ["tokenization_own.OwnTokenizer", None]})


def rewritten_model(folder, **changes):
    fields = json.loads((folder / "tokenizer.json").read_text())
    fields["model"] |= changes
    (folder / "tokenizer.json").write_text(json.dumps(fields))


DAMAGED = {
    "nothing": (lambda folder: (folder / "tokenizer.json").unlink(), "holds no tokenizer"),
    "sentencepiece alone": (sentencepiece, r"tokenizer as tokenizer\.model; expected tokenizer\.json\. .* transformers writes"),
    "code of its own": (own_code, r"tokenizer\.model, and wants code of its own"),
    "no JSON": (lambda folder: (folder / "tokenizer.json").write_text("{"), "can't be read: EOF"),
    "another JSON": (lambda folder: (folder / "tokenizer.json").write_text("{}"), "can't be read"),
    "settings cut short": (lambda folder: (folder / "tokenizer_config.json").write_text('{"a'), "is not JSON"),
    "an end that is no token": (lambda folder: rewritten(folder, eos_token="<nothing>"), "lacks the special token '<nothing>'"),
    "an end of 3": (lambda folder: rewritten(folder, eos_token=3), "must be a text; got 3"),
    "an end without text": (lambda folder: rewritten(folder, eos_token={"id": 3}), "must be a text; got {'id': 3}"),
    "another token's id": (
        lambda folder: rewritten(folder, added_tokens_decoder={"3": {"content": "<more>"}}),
        "the token '<more>' has the id 333, not 3",
    ),
    "a token without text": (lambda folder: rewritten(folder, added_tokens_decoder={"3": {}}), "can't be read"),
    "no token for what is unknown": (
        lambda folder: (word_piece().save_pretrained(folder), rewritten_model(folder, unk_token="nothing")), "can't be read",
    ),
    "a template of 3": (
        lambda folder: ((folder / "chat_template.jinja").unlink(), rewritten(folder, chat_template=3)), "must be a text; got 3",
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", DAMAGED)
def test_a_damaged_folder_is_refused_in_a_sentence(tmp_path, kind):
    byte_level().save_pretrained(tmp_path)
    damage, message = DAMAGED[kind]
    damage(tmp_path)
    with pytest.raises(UserError, match=message) as error:
        open_tokenizer(tmp_path)
    assert "\n" not in str(error.value)


def test_a_template_for_tools(tmp_path):
    tokenizer = byte_level()
    tokenizer.chat_template = {"default": "plain", "tool_use": "with tools"}
    tokenizer.save_pretrained(tmp_path)
    ours = open_tokenizer(tmp_path)
    assert ours.apply_chat_template([{"role": "user"}]) == "plain"
    assert ours.apply_chat_template([{"role": "user"}], tools=TOOLS) == "with tools"


def test_transformers_is_not_loaded(tmp_path):
    byte_level().save_pretrained(tmp_path)
    code = (
        "import sys; from tarnn.decoding.tokenizer import open_tokenizer; t = open_tokenizer(sys.argv[1]); "
        "t.apply_chat_template([{'role': 'user', 'content': 'a'}]); t.encode('a'); assert 'transformers' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True)
