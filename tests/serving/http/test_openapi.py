"""/openapi.json: real answers are as it describes them. schemathesis sends requests that it allows, and that it forbids."""

import json

import pytest
from jsonschema_rs import validator_for
from schemathesis.generation.modes import GenerationMode
from support.http_server import events_of, http_server
from support.schema_fuzz import ask, operations

from tarnn.serving.http import page
from tarnn.serving.http.app import create_app
from tarnn.serving.http.errors import failed
from tarnn.serving.http.openapi import Operation, document
from tarnn.serving.http.settings import ServerSettings

COUNT = 5  # requests of each kind; tests/fuzz_http.py sends more
ROUTES = [route for route in create_app({}).routes if route not in page.routes]


@pytest.fixture(scope="module")
def found(served):
    settings = ServerSettings(max_prompt=200, max_choices=4)
    with http_server({"text": served("linear"), "other": served("decay")}, settings) as server:
        yield operations(server.url)


def test_every_route_is_described():
    assert all(isinstance(route, Operation) for route in ROUTES)
    described = document(ROUTES, False)
    names = [x["operationId"] for path in described["paths"].values() for x in path.values()]
    assert len(set(names)) == len(names) == len(ROUTES) == 21
    summaries = {route.summary for route in ROUTES}
    assert "Continue a text" in summaries
    assert all(0 < len(summary) < 60 for summary in summaries)


def test_keys_are_asked_for_if_there_are_some():
    assert document(ROUTES, True)["security"] == [{"key": []}]
    assert "security" not in document(ROUTES, False)


MESSAGES = [{"role": "user", "content": "Hi"}]
SHORT = {"max_tokens": 3, "ignore_eos": True}
STREAMED = {
    "complete": SHORT | {"prompt": "Hi", "logprobs": 2, "echo": True, "stream_options": {"include_usage": True}},
    "chat": SHORT | {"messages": MESSAGES, "logprobs": True, "top_logprobs": 2},
    "respond": {"input": "Hi", "max_output_tokens": 3, "top_logprobs": 2},
    "create_state": {"text": "Hi"},
}


@pytest.mark.parametrize("route", [x for x in ROUTES if x.events], ids=lambda x: x.name)
def test_events_are_as_described(chatty, route):
    path, body = route.path, {"model": "text", "stream": True} | STREAMED[route.name]
    described = document(ROUTES, False)
    answers = described["paths"][path]["post"]["responses"]["200"]["content"]
    schema = validator_for(answers["text/event-stream"]["schema"] | {"components": described["components"]})
    with http_server({"text": chatty}) as server:
        events = events_of(server.post(path, body))
    assert events
    for event in map(json.loads, events):
        schema.validate(event)
        assert not schema.is_valid(event | {"object" if "object" in event else "type": "other"})
    schema.validate(failed().content)


ASKED = [x for x in ROUTES if x.name != "openapi"]  # whose answer is the document


@pytest.mark.parametrize("route", ASKED, ids=lambda x: x.name)
def test_allowed_requests_are_answered_as_described(found, route):
    ask(found[f"{route.method} {route.template}"], GenerationMode.POSITIVE, COUNT)


@pytest.mark.parametrize("route", [x for x in ASKED if x.body or x.query or x.other_bodies], ids=lambda x: x.name)
def test_forbidden_requests_are_refused(found, route):
    ask(found[f"{route.method} {route.template}"], GenerationMode.NEGATIVE, COUNT)
