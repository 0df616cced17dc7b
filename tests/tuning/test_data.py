"""Data to tune on: what is learned of a row, how rows are packed, what is refused, and that nothing leaks."""

import json

import numpy as np
import pytest
import torch
from support.open_folders import byte_level
from support.tuning_examples import example

from tarnn.decoding.tokenizer import open_tokenizer
from tarnn.errors import UserError
from tarnn.log import silent
from tarnn.tuning.examples import read_examples
from tarnn.tuning.packing import Counts, PackedRows, bounds_of, fitted, packs


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    byte_level(begins=True).save_pretrained(folder)
    return open_tokenizer(folder)


@pytest.fixture
def read(tmp_path, tokenizer):
    """read(*rows) → the examples of a table with these rows."""

    def examples(*rows):
        path = tmp_path / "rows.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return list(read_examples([str(path)], tokenizer, 264, silent))

    return examples


def learned(example, tokenizer):
    return tokenizer.decode(example.ids[example.learned])


def said(role, content):
    return {"role": role, "content": content}


def test_answers_are_learned(read, tokenizer):
    turns = [said("system", "be kind"), said("user", "a?"), said("assistant", "A."), said("user", "b?")]
    (example,) = read({"messages": [*turns, said("assistant", "B.")]})
    assert learned(example, tokenizer) == "A.<|end|>\nB.<|end|>\n"
    text = tokenizer.apply_chat_template([*turns, said("assistant", "B.")])
    assert tokenizer.decode(example.ids) == text
    (unanswered,) = read({"messages": turns[:2]})
    assert not unanswered.learned.any()


def test_a_template_that_leaves_out_earlier_thoughts(read, tokenizer, monkeypatch):
    """As Qwen3's: an earlier answer is written in another way once another one follows."""
    template = (
        "{% for m in messages %}[{{ m.role }}]{% if m.role == 'assistant' and loop.last %}<think>{% endif %}{{ m.content }}"
        "{% endfor %}{% if add_generation_prompt %}[assistant]<think>{% endif %}"
    )
    monkeypatch.setitem(tokenizer.chat_templates, "default", template)
    turns = [said("user", "a"), said("assistant", "A"), said("user", "b"), said("assistant", "B")]
    first, second = read({"messages": turns})
    assert [learned(x, tokenizer) for x in (first, second)] == ["A", "B"]
    assert [tokenizer.decode(x.ids) for x in (first, second)] == [
        "[user]a[assistant]<think>A",
        "[user]a[assistant]A[user]b[assistant]<think>B",
    ]


def test_completions_and_texts(read, tokenizer):
    pair, text, both = read(
        {"prompt": "one", "completion": " two"},
        {"text": "three"},
        {"prompt": [said("user", "x")], "completion": [said("assistant", "y")]},
    )
    assert pair.ids[0] == 256  # as `tarnn generate` begins a prompt
    assert learned(pair, tokenizer) == " two<|end|>"
    assert text.learned.all()
    assert tokenizer.decode(text.ids) == "<|bos|>three<|end|>"
    assert learned(both, tokenizer) == "y<|end|>\n"


@pytest.mark.parametrize(("row", "words"), [
    ({"question": "a", "answer": "b"}, "line 1 has the columns 'question', 'answer'; expected messages, or prompt and comp"),
    ({"prompt": "a"}, "has the columns 'prompt'"),
    ({"messages": "hello"}, "messages must be a list"),
    ({"messages": [{"content": "no role"}]}, "messages must be a list"),
    ({"prompt": "a", "completion": 3}, "has a int where the text was expected"),
])  # fmt: skip
def test_rows_that_are_refused(read, row, words):
    with pytest.raises(UserError) as error:
        read(row)
    assert words in str(error.value)


def test_no_template(read, tokenizer, monkeypatch):
    monkeypatch.delitem(tokenizer.chat_templates, "default")
    with pytest.raises(UserError, match="has no chat template"):
        read({"messages": [said("user", "a"), said("assistant", "b")]})


def test_what_is_longer_is_cut_and_counted():
    counts = Counts()
    kept = fitted([example(5), example(12, 4), example(12, 10), example(25, whole=False), example(1)], 10, counts)
    assert [len(x.ids) for x in kept] == [5, 10, 10, 10, 5]
    assert (counts.examples, counts.cut, counts.divided, counts.left_out) == (5, 2, 1, 2)
    assert counts.lines(10) == [
        "2 of 5 examples are longer than 10 tokens and were cut",
        "1 of 5 examples are longer than 10 tokens and were divided",
        "2 of 5 examples have no token to learn and were left out",
    ]


def test_packs_are_full_and_whole():
    lengths = np.random.default_rng(0).integers(1, 100, 1000).tolist()
    rows = packs(lengths, 100)
    assert sorted(i for row in rows for i in row) == list(range(1000))
    assert all(sum(lengths[i] for i in row) <= 100 for row in rows)
    assert len(rows) <= 1.05 * sum(lengths) / 100
    assert rows == packs(lengths, 100)


def test_a_packed_row():
    rows = PackedRows([example(3, 1), example(4)], 10)
    (row,) = rows
    assert row["input_ids"].tolist() == [[0, 1, 2, 3, 0, 1, 2]]
    assert row["labels"].tolist() == [[-100, 1, 2, 3, -100, 1, 2]]  # of no example the first token
    assert row["position_ids"].tolist() == [[0, 1, 2, 3, 0, 1, 2]]
    assert bounds_of(row["position_ids"]).tolist() == [0, 4, 7]
    assert bounds_of(row["position_ids"]).dtype == torch.int32
    assert len(PackedRows([example(3, 1), example(4)], 10, pack=False)) == 2
