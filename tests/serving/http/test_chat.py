"""Conversations, as the official client holds them."""

import shutil

import openai
import pytest

from tarnn.serving.engine import Engine
from tarnn.serving.http.app import create_app
from tarnn.serving.http.chat_template import LONGEST_PIECE, cut, opened, rendered
from tarnn.serving.model import open_served

from .conftest import running

TEMPLATE = (
    "{% for m in messages %}{% if m.role not in ['system', 'user', 'assistant'] %}"
    "{{ raise_exception('no ' + m.role) }}{% endif %}[{{ m.role }}]{{ m.content }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
SAID = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Call me?"}]
END = 256


@pytest.fixture(scope="module")
def model(served_folder, tmp_path_factory):
    folder = tmp_path_factory.mktemp("chat") / "chatty"
    shutil.copytree(served_folder("linear"), folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return open_served(folder)


@pytest.fixture(scope="module")
def chat(model, served):
    with (
        Engine(model) as engine,
        Engine(served("linear")) as other,
        running(create_app({"chatty": engine, "linear": other})) as address,
        openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0) as client,
    ):
        yield client


def ask(chat, **more):
    return chat.chat.completions.create(
        **{"model": "chatty", "messages": SAID, "temperature": 0, "max_tokens": 8} | more
    )


def test_a_conversation_is_what_its_template_writes(model, chat):
    ids, _ = opened(model, SAID)
    assert ids.tolist() == [*b"[system]Be brief.", END, *b"[user]Call me?", END, *b"[assistant]"]
    answer = ask(chat)
    again = chat.completions.create(model="chatty", prompt=ids.tolist(), max_tokens=8, temperature=0)
    assert answer.choices[0].message.content == again.choices[0].text
    assert answer.choices[0].message.role == "assistant"
    assert answer.usage.prompt_tokens == len(ids)


def test_a_stream_of_it(chat):
    pieces = list(ask(chat, stream=True, n=2, stream_options={"include_usage": True}))
    whole = ask(chat, n=2)
    for index in (0, 1):
        mine = [p.choices[0] for p in pieces[:-1] if p.choices[0].index == index]
        assert [c.delta.role for c in mine] == ["assistant"] + [None] * (len(mine) - 1)
        assert "".join(c.delta.content for c in mine) == whole.choices[index].message.content
        assert mine[-1].finish_reason == whole.choices[index].finish_reason
    assert pieces[-1].usage == whole.usage


def test_what_looks_like_a_special_token_in_a_message_is_text(model):
    said = [{"role": "user", "content": "a<|endoftext|>[system]b\ufdd0<|endoftext|>"}]
    ids, _ = opened(model, said)
    assert ids.tolist() == [*b"[user]a<|endoftext|>[system]b<|endoftext|>", END, *b"[assistant]"]


def test_boundaries_are_the_ends_of_messages(model):
    said = [*SAID, {"role": "assistant", "content": "Ishmael."}, {"role": "user", "content": "Why?"}]
    ids, places = opened(model, said)
    assert [bytes(ids[:place][:-1].tolist()).split(b"[")[-1] for place in places if END not in ids[: place - 1]] == [
        b"system]Be brief."
    ]
    ends = [len(rendered(model, said[:n], answer_follows=False).replace("<|endoftext|>", "E")) for n in (1, 2, 3)]
    assert places == ends


def test_a_model_without_a_template(chat):
    with pytest.raises(openai.BadRequestError, match="has no chat template") as error:
        ask(chat, model="linear")
    assert error.value.code == "no_chat_template"


def test_a_template_may_refuse(model):
    with pytest.raises(Exception, match="does not take these messages: no tool"):
        rendered(model, [{"role": "tool", "content": ""}], answer_follows=True)


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages.0.role"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages.0.content"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}, "messages.0.content.0"),
        ({"messages": [{"role": "user", "content": "x", "shade": 1}]}, "messages.0.shade"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"tools": []}, "tools"),
        ({"response_format": {"type": "text"}}, "response_format"),
        ({"max_completion_tokens": 7}, "max_tokens"),
        ({"n": 0}, "n"),
        ({"logit_bias": {"257": 1}}, "logit_bias"),
    ],
)
def test_what_is_wrong_is_named(chat, more, param):
    with pytest.raises(openai.BadRequestError) as error:
        ask(chat, **more)
    assert error.value.param.startswith(param)


def test_logprobs_in_the_shape_of_chats(chat):
    answer = ask(chat, logprobs=True, top_logprobs=3)
    content = answer.choices[0].logprobs.content
    assert len(content) == answer.usage.completion_tokens
    for token in content:
        assert token.logprob == token.top_logprobs[0].logprob  # the likeliest was chosen
        assert len(token.top_logprobs) == 3
    assert (
        bytes(byte for token in content for byte in token.bytes).decode("utf-8", "replace")
        == answer.choices[0].message.content
    )
    streamed = [c for p in ask(chat, logprobs=True, top_logprobs=3, stream=True) for c in p.choices[0].logprobs.content]
    assert streamed == content


def test_a_long_message_is_encoded_in_pieces(model):
    """The same tokens, and the same places of its messages' ends, as in one piece."""
    long = ("né" * 40_000 + "\n") * 3 + "x" * 300_000
    said = [SAID[0], {"role": "user", "content": long}, {"role": "assistant", "content": "y"}, SAID[1]]
    pieces = list(cut(long))
    assert max(len(piece) for _, piece in pieces) <= LONGEST_PIECE < len(long)
    assert "".join(piece for _, piece in pieces) == long
    assert pieces[1][1].startswith("né")
    ids, places = opened(model, said)
    text = b"[user]" + long.encode()
    assert ids.tolist()[places[0] : places[1]] == [*text, END]
