"""/v1/responses: a conversation is the state behind its last answer, and goes on from there to the bit."""

import json

import numpy as np
import openai
import pytest
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter
from support.http_server import events_of, http_server

from tarnn.serving.model import open_served
from tarnn.serving.request import Request, Sampling

TEMPLATE = """{%- for message in messages -%}
{%- if message.role == 'system' and not loop.first -%}{{- raise_exception('system comes first') -}}{%- endif -%}
<{{ message.role }}>{{ message.content | trim }}<|endoftext|>
{%- endfor -%}
{%- if add_generation_prompt -%}<assistant>{%- endif -%}"""


@pytest.fixture(scope="module")
def chatting(served_folder, tmp_path_factory):
    """The linear model, with a chat template."""
    from shutil import copytree

    from transformers import AutoTokenizer

    folder = copytree(served_folder("linear"), tmp_path_factory.mktemp("chat") / "model")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    return open_served(folder)


@pytest.fixture(scope="module")
def server(served, chatting):
    with http_server({"base": served("linear"), "chat": chatting}) as server:
        yield server


@pytest.fixture(scope="module")
def client(server):
    with openai.OpenAI(api_key="-", base_url=server.url + "/v1", max_retries=0) as client:
        yield client


OPTIONS = {"temperature": 0.9, "top_p": 0.95, "max_output_tokens": 7, "extra_body": {"seed": 3}}
SAMPLING = Sampling(temperature=0.9, top_p=0.95, seed=3)


def written(server, model, tokens, n=7):
    """(text, tokens) that the engine writes behind these."""
    request = Request(prompt=np.array(tokens, np.int32), max_tokens=n, sampling=SAMPLING, keep=True)
    events = list(server.engines[model].submit(request))
    return "".join(event.text for event in events), [token for event in events for token in event.tokens]


def ids(text):
    """Of the test's tokenizer, in which <|endoftext|> is token 256."""
    return [token for part in text.split("<|endoftext|>") for token in [*part.encode(), 256]][:-1]


def test_a_base_model_continues_the_input(client, server):
    answer = client.responses.create(model="base", input="Once upon", **OPTIONS)
    text, tokens = written(server, "base", ids("Once upon"))
    assert answer.output_text == text
    assert answer.usage.input_tokens == 9
    assert answer.usage.output_tokens == len(tokens)
    assert answer.status == ("completed" if tokens[-1] == 256 else "incomplete")
    Response.model_validate(answer.model_dump(), strict=False)


def test_a_base_model_goes_on_from_its_answer(client, server):
    """Twice from the same one: the second is a fork."""
    first = client.responses.create(model="base", input="Once upon", **OPTIONS)
    sequence = ids("Once upon") + written(server, "base", ids("Once upon"))[1]
    for more in (" a time", "!", ""):
        after = client.responses.create(model="base", input=more, previous_response_id=first.id, **OPTIONS)
        assert after.output_text == written(server, "base", sequence + ids(more))[0]
        assert after.previous_response_id == first.id
        assert after.usage.input_tokens == len(sequence) + len(more)
        assert after.usage.input_tokens_details.cached_tokens >= len(sequence)


def test_a_conversation_is_what_the_template_writes(client, server):
    """Three turns: each reads its new message alone, and the tokens are those of the whole conversation."""
    answer = client.responses.create(model="chat", input="Hello", instructions=" Be brief. ", **OPTIONS)
    sequence = ids("<system>Be brief.<|endoftext|><user>Hello<|endoftext|><assistant>")
    for message in ("And <|endoftext|> now?", [{"role": "user", "content": "Why?"}], "So?"):
        text, tokens = written(server, "chat", sequence)
        assert answer.output_text == text
        assert answer.usage.input_tokens == len(sequence)
        sequence += tokens
        content = list((message if isinstance(message, str) else message[0]["content"]).encode())  # no token is special
        sequence += [256] * (tokens[-1] != 256) + [*b"<user>", *content, 256, *b"<assistant>"]
        answer = client.responses.create(model="chat", input=message, previous_response_id=answer.id, **OPTIONS)
        read = answer.usage.input_tokens - answer.usage.input_tokens_details.cached_tokens
        assert read <= len(content) + 19


def test_an_answer_that_ended_by_itself_is_not_ended_again(client, server):
    always_ends = {"max_output_tokens": 3, "extra_body": {"logit_bias": {"256": 100}}}
    ended = client.responses.create(model="chat", input="Hello", **always_ends)
    assert (ended.status, ended.output_text, ended.usage.output_tokens) == ("completed", "", 1)
    after = client.responses.create(model="chat", input="So?", previous_response_id=ended.id, **OPTIONS)
    sequence = ids("<user>Hello<|endoftext|><assistant><|endoftext|><user>So?<|endoftext|><assistant>")
    assert after.usage.input_tokens == len(sequence)
    assert after.output_text == written(server, "chat", sequence)[0]


def test_the_stream_is_the_answer(client, server):
    """The official client puts it together; each event is one of its types."""
    options = OPTIONS | {"top_logprobs": 2, "include": ["message.output_text.logprobs"]}
    whole = client.responses.create(model="base", input="Once upon", **options)
    with client.responses.stream(model="base", input="Once upon", **options) as stream:
        events = list(stream)
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert "".join(event.delta for event in events if event.type.endswith("text.delta")) == whole.output_text
    last = events[-1].response
    assert last.output_text == whole.output_text
    assert last.output[0].content[0].logprobs == whole.output[0].content[0].logprobs
    assert len(whole.output[0].content[0].logprobs) == whole.usage.output_tokens
    for count in ("input_tokens", "output_tokens", "total_tokens"):  # the second may find more of its prompt cached
        assert getattr(last.usage, count) == getattr(whole.usage, count)
    body = {"model": "base", "input": "Once upon", "stream": True, "seed": 3, "max_output_tokens": 7}
    for data in events_of(server.post("/v1/responses", body)):
        TypeAdapter(ResponseStreamEvent).validate_json(data)


def test_a_stream_that_breaks_off_says_so(served):
    """The engine is closed while it writes: a failed response, with what there was of it."""
    with http_server({"base": served("linear")}) as server:
        body = {
            "model": "base",
            "input": "x",
            "stream": True,
            "max_output_tokens": 200_000,
            "logit_bias": {"256": -100},
        }
        with server.client.stream("POST", "/v1/responses", json=body) as answer:
            lines = answer.iter_lines()
            next(line for line in lines if "output_text.delta" in line)
            server.engines["base"].close()
            last = [line for line in lines if line.startswith("data: {")][-1]
        event = json.loads(last.removeprefix("data: "))
        assert (event["type"], event["response"]["status"]) == ("response.failed", "failed")
        assert event["response"]["output"][0]["content"][0]["text"]
        assert server.get(f"/v1/responses/{event['response']['id']}").status_code == 404


def test_a_conversation_moves_to_another_server(client, server, chatting):
    answer = client.responses.create(model="chat", input="Hello", **OPTIONS)
    data = server.get(f"/v1/states/{answer.id}/file").content
    here = client.responses.create(model="chat", input="So?", previous_response_id=answer.id, **OPTIONS)
    with http_server({"chat": chatting}) as other:
        other.client.put(f"/v1/states/{answer.id}/file", content=data).raise_for_status()
        with openai.OpenAI(api_key="-", base_url=other.url + "/v1") as there:
            moved = there.responses.create(model="chat", input="So?", previous_response_id=answer.id, **OPTIONS)
    assert moved.output_text == here.output_text
    assert moved.usage.input_tokens == here.usage.input_tokens


def test_a_response_is_remembered_until_it_is_deleted(client):
    answer = client.responses.create(model="chat", input="Hello", metadata={"key": "value"}, **OPTIONS)
    assert client.responses.retrieve(answer.id) == answer
    client.responses.delete(answer.id)
    for call in (client.responses.retrieve, client.responses.delete):
        with pytest.raises(openai.NotFoundError, match="no state"):
            call(answer.id)
    with pytest.raises(openai.NotFoundError) as error:
        client.responses.create(model="chat", input="So?", previous_response_id=answer.id)
    assert error.value.param == "previous_response_id"


def test_what_is_not_stored_is_not_there(client, server):
    before = server.get("/v1/states").json()
    answer = client.responses.create(model="base", input="Hello", store=False, **OPTIONS)
    assert (answer.store if hasattr(answer, "store") else None) is False
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(answer.id)
    assert server.get("/v1/states").json() == before


def test_a_response_begins_from_a_state_and_is_one(client, server):
    book = server.post("/v1/states", {"model": "base", "text": "A long book. "}).json()
    answer = client.responses.create(
        model="base", input="Then", **OPTIONS | {"extra_body": {"seed": 3, "state": book["id"]}}
    )
    assert answer.output_text == written(server, "base", ids("A long book. Then"))[0]
    state = server.get(f"/v1/states/{answer.id}").json()
    assert state["parent"] == book["id"]
    assert state["tokens"] == 17 + answer.usage.output_tokens
    assert server.get(f"/v1/responses/{book['id']}").status_code == 404


def test_a_state_is_read_from_messages(client, server):
    messages = [{"role": "system", "content": "Be <|endoftext|> brief."}, {"role": "user", "content": "Hello"}]
    state = server.post("/v1/states", {"model": "chat", "messages": messages}).json()
    read = [*b"<system>Be <|endoftext|> brief.", 256, *b"<user>Hello", 256]
    assert state["tokens"] == len(read)
    answer = client.responses.create(
        model="chat", input="So?", **OPTIONS | {"extra_body": {"seed": 3, "state": state["id"]}}
    )
    assert answer.output_text == written(server, "chat", [*read, *b"<user>So?", 256, *b"<assistant>"])[0]


def test_output_may_be_sent_back_as_input(client, server):
    answer = client.responses.create(model="chat", input="Hello", **OPTIONS)
    items = [{"role": "user", "content": "Hello"}, *(x.model_dump(exclude_none=True) for x in answer.output)]
    items.append({"role": "user", "content": [{"type": "input_text", "text": "So?"}]})
    again = client.responses.create(model="chat", input=items, **OPTIONS)
    text = (
        f"<user>Hello<|endoftext|><assistant>{answer.output_text.strip()}<|endoftext|><user>So?<|endoftext|><assistant>"
    )
    assert again.output_text == written(server, "chat", ids(text))[0]


BAD = {
    "tools": ({"tools": [{"type": "web_search"}]}, "tools", "Tools are not supported"),
    "a format": ({"text": {"format": {"type": "json_object"}}}, "text", "not held to a grammar"),
    "reasoning": ({"reasoning": {"effort": "low"}}, "reasoning", "Reasoning is not supported"),
    "n": ({"n": 2}, "n", "one text"),
    "background": ({"background": True}, "background", "Background"),
    "unknown": ({"temprature": 1}, "temprature", "Unknown parameter"),
    "too hot": ({"temperature": 101}, "temperature", "less than or equal to 100"),
    "an image": ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, None, "Images are not supported"),
    "messages": ({"input": [{"role": "user", "content": "x"}]}, "input", "no chat template"),
    "instructions": ({"instructions": "x"}, "instructions", "no chat template"),
    "two beginnings": ({"previous_response_id": "a", "state": "b"}, "state", "one place"),
    "no beginning": ({"previous_response_id": "resp_0"}, "previous_response_id", "no state"),
}


@pytest.mark.parametrize("why", BAD)
def test_what_is_not_here_is_refused(server, why):
    body, param, sentence = BAD[why]
    refused = server.post("/v1/responses", {"model": "base", "input": "x"} | body)
    assert refused.status_code == (404 if why == "no beginning" else 400)
    error = refused.json()["error"]
    assert sentence in error["message"]
    assert param is None or error["param"] == param


def test_instructions_in_the_middle_are_not_lost_in_silence(client):
    """Nor are messages that a template refuses."""
    answer = client.responses.create(model="chat", input="Hello", **OPTIONS)
    with pytest.raises(openai.BadRequestError, match="system comes first"):
        client.responses.create(model="chat", input="x", instructions="Be rude.", previous_response_id=answer.id)


def test_the_sampling_is_told(client):
    answer = client.responses.create(model="base", input="x", **OPTIONS)
    told = json.loads(answer.model_dump_json())
    assert (told["temperature"], told["top_p"], told["max_output_tokens"]) == (0.9, 0.95, 7)
