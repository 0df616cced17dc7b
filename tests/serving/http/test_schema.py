"""/openapi.json says what is there, and what is there does what it says: schemathesis asks all of it, rightly and wrongly."""

import re

import pytest
from schemathesis.generation.modes import GenerationMode
from support.http_server import http_server
from support.schema_fuzz import ask, operations

from tarnn.serving.http import page
from tarnn.serving.http.app import create_app
from tarnn.serving.http.operations import OPERATIONS
from tarnn.serving.http.schema import document
from tarnn.serving.http.settings import ServerSettings

COUNT = 5  # requests of each kind; scripts/schema_fuzz.py asks more


@pytest.fixture(scope="module")
def address(served):
    models = {"text": served("linear"), "image": served("colour")}
    with http_server(models, ServerSettings(max_prompt=200, max_choices=4)) as server:
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


ASKED = [x for x in OPERATIONS if x.name != "openapi"]  # which says all of this


@pytest.mark.parametrize("operation", ASKED, ids=lambda x: x.name)
def test_what_may_be_asked_is_answered_as_described(found, operation):
    ask(found[f"{operation.method} {operation.path}"], GenerationMode.POSITIVE, COUNT)


@pytest.mark.parametrize("operation", [x for x in ASKED if x.body or x.query or x.other_bodies], ids=lambda x: x.name)
def test_what_may_not_be_asked_is_refused(found, operation):
    ask(found[f"{operation.method} {operation.path}"], GenerationMode.NEGATIVE, COUNT)
