"""/openapi.json says what is there, and what is there does what it says: schemathesis asks all of it, rightly and wrongly."""

import json
import re
import shutil

import pytest
from jsonschema_rs import validator_for
from schemathesis.generation.modes import GenerationMode
from support.http_server import events_of, http_server
from support.schema_fuzz import ask, operations

from tarnn.serving.http import page
from tarnn.serving.http.app import create_app
from tarnn.serving.http.errors import failed
from tarnn.serving.http.operations import OPERATIONS
from tarnn.serving.http.schema import document
from tarnn.serving.http.settings import ServerSettings
from tarnn.serving.model import open_served

COUNT = 5  # requests of each kind; scripts/schema_fuzz.py asks more


@pytest.fixture(scope="module")
def address(served):
    settings = ServerSettings(max_prompt=200, max_choices=4)
    with http_server({"text": served("linear"), "other": served("decay")}, settings) as server:
        yield server.url


@pytest.fixture(scope="module")
def found(address):
    return operations(address)


def test_every_route_is_described_and_no_other():
    routes = create_app({}).routes
    there = {
        (method, re.sub(r":\w+}", "}", route.path))
        for route in routes
        for method in (getattr(route, "methods", None) or ()) - {"HEAD"}
        if route not in page.routes
    }
    assert {(x.method, x.path) for x in OPERATIONS} == there
    assert len({x.name for x in OPERATIONS}) == len(OPERATIONS)


def test_keys_are_asked_for_where_there_are_some():
    assert document(True)["security"] == [{"key": []}]
    assert "security" not in document(False)


MESSAGES = [{"role": "user", "content": "Hi"}]
SHORT = {"max_tokens": 3, "ignore_eos": True}
STREAMED = {
    "complete": SHORT | {"prompt": "Hi", "logprobs": 2, "echo": True, "stream_options": {"include_usage": True}},
    "chat": SHORT | {"messages": MESSAGES, "logprobs": True, "top_logprobs": 2},
    "respond": {"input": "Hi", "max_output_tokens": 3, "top_logprobs": 2},
    "createState": {"text": "Hi"},
}


@pytest.fixture(scope="module")
def chatty(served_folder, tmp_path_factory):
    folder = tmp_path_factory.mktemp("chat") / "chatty"
    shutil.copytree(served_folder("linear"), folder)
    (folder / "chat_template.jinja").write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    with http_server({"text": open_served(folder)}) as server:
        yield server


@pytest.mark.parametrize("operation", [x for x in OPERATIONS if x.events], ids=lambda x: x.name)
def test_events_are_what_they_are_described_as(chatty, operation):
    described = document(False)
    answers = described["paths"][operation.path]["post"]["responses"]["200"]["content"]
    schema = validator_for(answers["text/event-stream"]["schema"] | {"components": described["components"]})
    answer = chatty.post(operation.path, {"model": "text", "stream": True} | STREAMED[operation.name])
    events = [json.loads(event) for event in events_of(answer)]
    assert events
    for event in events:
        schema.validate(event)
        assert not schema.is_valid(event | {"object" if "object" in event else "type": "other"})
    schema.validate(failed().content)


ASKED = [x for x in OPERATIONS if x.name != "openapi"]  # which says all of this


@pytest.mark.parametrize("operation", ASKED, ids=lambda x: x.name)
def test_what_may_be_asked_is_answered_as_described(found, operation):
    ask(found[f"{operation.method} {operation.path}"], GenerationMode.POSITIVE, COUNT)


@pytest.mark.parametrize("operation", [x for x in ASKED if x.body or x.query or x.other_bodies], ids=lambda x: x.name)
def test_what_may_not_be_asked_is_refused(found, operation):
    ask(found[f"{operation.method} {operation.path}"], GenerationMode.NEGATIVE, COUNT)
