"""Requests of one conversation are known as such, and processes get their share of them."""

import json
from collections import Counter

import pytest
from hypothesis import given, strategies as st

from tarnn.serving.workers.choice import IMBALANCE, SLACK, choose, owners
from tarnn.serving.workers.conversation import conversation

SYSTEM, USER = {"role": "system", "content": "Be brief."}, {"role": "user", "content": "Who is Ahab?"}
ANSWER, MORE = {"role": "assistant", "content": "A captain."}, {"role": "user", "content": "And his whale?"}


def of(path="/v1/completions", **body):
    return conversation(path, json.dumps(body).encode())


@pytest.mark.parametrize(
    ("first", "later"),
    [
        (of(messages=[SYSTEM, USER]), of(messages=[SYSTEM, USER, ANSWER, MORE], temperature=1)),
        (of(prompt="x" * 70), of(prompt="x" * 70 + "and more")),
        (of(prompt=list(range(20))), of(prompt=list(range(30)))),
        (of(prompt=["y" * 70, "other"]), of(prompt="y" * 70)),
        (of(input="Who?", instructions="Be brief."), of(input="Who?", instructions="Be brief.", stream=True)),
        (of(previous_response_id="resp_1", input="a"), conversation("/v1/responses/resp_1", b"")),
        (of(state="book", prompt="a"), conversation("/v1/states/book/fork", b"{}")),
        (of("/v1/states", name="book", text="Call me"), of(state="book", prompt="b")),
    ],
)
def test_what_continues_a_conversation_belongs_to_it(first, later):
    assert first == later is not None


def test_other_conversations_are_others():
    keys = [of(user="a"), of(user="b"), of(prompt="a" * 64), of(messages=[SYSTEM, USER]), of(messages=[SYSTEM, MORE])]
    assert len(set(keys)) == len(keys)


@given(
    body=st.binary()
    | st.recursive(st.none() | st.text() | st.integers(), st.lists).map(lambda x: json.dumps(x).encode())
)
def test_any_body_has_a_key_or_none(body):
    key = conversation("/v1/completions", body)
    assert key is None or isinstance(key, bytes)


@given(
    field=st.sampled_from(["prompt", "messages", "input", "user", "state"]),
    value=st.recursive(
        st.none() | st.booleans() | st.text() | st.integers(), lambda x: st.lists(x) | st.dictionaries(st.text(), x)
    ),
)
def test_a_field_of_any_kind_has_a_key_or_none(field, value):
    key = of(**{field: value})
    assert key is None or isinstance(key, bytes)


def test_one_more_process_moves_a_share_of_the_conversations_and_no_other():
    keys = [f"conversation {i}".encode() for i in range(2000)]
    before, after = ([owners(key, count)[0] for key in keys] for count in (3, 4))
    assert max(Counter(before).values()) < 1.1 * 2000 / 3
    moved = [new for old, new in zip(before, after) if old != new]
    assert set(moved) == {3}
    assert 0.8 * 500 < len(moved) < 1.2 * 500


@given(loads=st.lists(st.integers(0, 50), min_size=1, max_size=8), key=st.binary())
def test_nobody_gets_far_more_than_a_share(loads, key):
    index = choose(key, loads)
    assert loads[index] < IMBALANCE * (sum(loads) + 1) / len(loads) + SLACK + 1
    if len(set(loads)) == 1:
        assert index == owners(key, len(loads))[0]
