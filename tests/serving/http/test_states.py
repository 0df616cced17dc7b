"""/v1/states: read once, begin from it as often as you like; another tenant's states are as unknown as none."""

import json

import httpx
import pytest
from support.http_server import events_of, http_server

from tarnn.serving.http import chunked_prefill
from tarnn.serving.http.settings import ServerSettings

BOOK = "It was a bright cold day in April, and the clocks were striking thirteen. " * 9


@pytest.fixture(scope="module")
def server(served):
    with http_server({"linear": served("linear"), "decay": served("decay")}) as server:
        yield server


@pytest.fixture(autouse=True)
def clean(server):
    """Each test finds an empty server."""
    yield
    for state in server.get("/v1/states").json()["data"]:
        server.client.delete(f"/v1/states/{state['id']}")


def written(server, **body):
    """Tokens' texts and logprobs of a completion, to compare to the last digit."""
    asked = {"model": "linear", "temperature": 0, "max_tokens": 12, "logprobs": 3, "ignore_eos": True}
    [choice] = server.post("/v1/completions", asked | body).raise_for_status().json()["choices"]
    return choice["text"], choice["logprobs"]["token_logprobs"], choice["logprobs"]["top_logprobs"]


def test_a_text_is_read_once_and_gone_on_from(server, monkeypatch):
    monkeypatch.setattr(chunked_prefill, "PIECE", 100)
    made = server.post("/v1/states", {"model": "linear", "text": BOOK, "name": "book"}).json()
    assert made["tokens"] == made["usage"]["prompt_tokens"] == len(BOOK)
    assert made["usage"]["prompt_tokens_details"] == {"cached_tokens": 0}
    assert made["bytes"] > 0
    cold = written(server, prompt=BOOK + "So", state=None)
    for name in ("book", made["id"]):
        assert written(server, prompt="So", state=name) == cold
    answer = server.post("/v1/completions", {"model": "linear", "prompt": "So", "state": "book"}).json()
    assert answer["usage"]["prompt_tokens"] == len(BOOK) + 2
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] >= len(BOOK)


def test_a_text_is_not_read_twice(server, monkeypatch):
    monkeypatch.setattr(chunked_prefill, "PIECE", 100)
    text = "Nobody had read this before. " * 20
    [first, second] = [server.post("/v1/states", {"model": "linear", "text": text}).json()["usage"] for _ in "12"]
    assert first["prompt_tokens_details"]["cached_tokens"] == 0
    assert second["prompt_tokens_details"]["cached_tokens"] == len(text)


@pytest.mark.parametrize("source", ["text", "tokens", "body"])
def test_all_ways_to_read_a_text_give_the_same_state(server, source):
    data = BOOK.encode()
    if source == "body":
        path, headers = "/v1/states?model=linear", {"content-type": "text/plain; charset=utf-8"}
        made = server.client.post(path, content=data, headers=headers).json()
    else:
        made = server.post(
            "/v1/states", {"model": "linear", source: {"text": BOOK, "tokens": list(data)}[source]}
        ).json()
    assert written(server, prompt="!", state=made["id"]) == written(server, prompt=BOOK + "!")


def test_a_state_goes_on_from_another(server):
    first = server.post("/v1/states", {"model": "linear", "text": BOOK, "name": "first"}).json()
    second = server.post("/v1/states", {"model": "linear", "text": " And then.", "state": "first"}).json()
    assert second["parent"] == first["id"]
    assert second["tokens"] == len(BOOK) + 10
    assert written(server, prompt="?", state=second["id"]) == written(server, prompt=BOOK + " And then.?")


def test_the_reading_of_a_long_text_is_seen(server, monkeypatch):
    monkeypatch.setattr(chunked_prefill, "PIECE", 100)
    asked = {"model": "linear", "text": "seen " * 70, "stream": True}
    events = [json.loads(data) for data in events_of(server.post("/v1/states", asked))]
    assert [event["tokens_read"] for event in events] == [100, 200, 300, 350, 350]
    assert {event["tokens"] for event in events} == {350}
    state = events[-1]["state"]
    assert server.get(f"/v1/states/{state['id']}").json() == state | {"usage": None}


def test_a_state_is_listed_forked_and_deleted(server):
    made = server.post("/v1/states", {"model": "linear", "text": "one", "name": "one"}).json()
    fork = server.post("/v1/states/one/fork").json()
    assert (fork["parent"], fork["tokens"]) == (made["id"], 3)
    named = server.post(f"/v1/states/{made['id']}/fork", {"name": "other"}).json()
    listed = {state["id"]: state for state in server.get("/v1/states").json()["data"]}
    assert set(listed) == {made["id"], fork["id"], named["id"]}
    assert listed[named["id"]]["name"] == "other"
    assert server.client.delete("/v1/states/one").json() == {"id": made["id"], "object": "state", "deleted": True}
    assert server.get("/v1/states/one").status_code == 404
    assert written(server, prompt="!", state="other") == written(server, prompt="one!")


def test_states_are_listed_in_pages(server):
    made = [server.post("/v1/states", {"model": "linear", "text": text}).json()["id"] for text in "abc"]
    page = server.get("/v1/states?limit=2").json()
    assert ([state["id"] for state in page["data"]], page["has_more"]) == (made[:2], True)
    page = server.get(f"/v1/states?limit=2&after={made[1]}").json()
    assert ([state["id"] for state in page["data"]], page["has_more"]) == (made[2:], False)
    assert server.get("/v1/states?model=decay").json()["data"] == []
    assert server.get("/v1/states?after=state_0").status_code == 404
    assert server.get("/v1/states?limit=0").status_code == 400


def test_a_state_travels_as_bytes(server, served):
    made = server.post("/v1/states", {"model": "linear", "text": BOOK}).json()
    data = server.get(f"/v1/states/{made['id']}/file").content
    with http_server({"linear": served("linear")}) as other:
        added = other.client.put("/v1/states/moved/file", content=data).json()
        assert (added["name"], added["tokens"]) == ("moved", len(BOOK))
        assert written(other, prompt="!", state="moved") == written(server, prompt=BOOK + "!")
        again = other.client.post(
            "/v1/states?name=x", content=data, headers={"content-type": "application/octet-stream"}
        )
        assert again.json()["name"] == "x"


@pytest.mark.parametrize(
    ("weights", "name"), [("float32", "decay"), ("int8", "linear")], ids=["another model", "another weights format"]
)
def test_a_state_of_another_key_is_refused(server, served, weights, name):
    made = server.post("/v1/states", {"model": "linear", "text": BOOK}).json()
    data = server.get(f"/v1/states/{made['id']}/file").content
    with http_server({"other": served(name, weights)}) as other:
        refused = other.client.put("/v1/states/moved/file", content=data)
        assert (refused.status_code, refused.json()["error"]["code"]) == (400, "unfit_state")
        assert {"decay": "another model", "linear": "float32"}[name] in refused.json()["error"]["message"]
        assert other.get("/v1/states").json()["data"] == []


def test_damaged_bytes_are_refused(server):
    made = server.post("/v1/states", {"model": "linear", "text": "some text"}).json()
    data = server.get(f"/v1/states/{made['id']}/file").content
    flipped = bytearray(data)
    flipped[-3] ^= 1
    for damaged in (data[:-1], bytes(flipped), b"", b"\x00" * 100, b"PK\x03\x04" + data):
        refused = server.client.put("/v1/states/x/file?model=linear", content=damaged)
        assert (refused.status_code, refused.json()["error"]["code"]) == (400, "unfit_state")


BAD = {
    "no source": ({}, "Give one of text, tokens and messages"),
    "two sources": ({"text": "a", "tokens": [1]}, "Give one of text, tokens and messages"),
    "no tokens": ({"tokens": []}, "not empty"),
    "unknown token": ({"tokens": [9999]}, "no token 9999"),
    "a name that is a path": ({"text": "a", "name": "../x"}, "name"),
    "unknown field": ({"text": "a", "file": "/etc/passwd"}, "Unknown parameter: 'file'"),
    "nothing behind a state": ({"text": "", "state": "here"}, "nothing to read"),
}


@pytest.mark.parametrize("why", BAD)
def test_bad_requests_are_told(server, why):
    server.post("/v1/states", {"model": "linear", "text": "here", "name": "here"}).raise_for_status()
    body, sentence = BAD[why]
    refused = server.post("/v1/states", {"model": "linear"} | body)
    assert refused.status_code == 400
    assert sentence in refused.json()["error"]["message"]


def test_a_name_means_one_state(server):
    for status in (200, 409):
        assert server.post("/v1/states", {"model": "linear", "text": "a", "name": "x"}).status_code == status


def test_bodies_have_a_type(server):
    refused = server.client.post("/v1/states", content=b"<x/>", headers={"content-type": "text/xml"})
    assert refused.status_code == 415
    headers = {"content-type": "text/plain"}
    refused = server.client.post("/v1/states?model=linear", content=b"caf\xe9", headers=headers)
    assert "byte 3" in refused.json()["error"]["message"]


def test_another_tenants_states_are_unknown(served):
    """By no way in is there a difference between a state of somebody else and one that never was."""
    with http_server({"linear": served("linear")}, ServerSettings(keys=("mine", "yours"))) as server:
        keys = [{"authorization": f"Bearer {key}"} for key in ("mine", "yours")]
        mine, yours = (httpx.Client(base_url=server.url, headers=key) for key in keys)
        with mine, yours:
            made = mine.post("/v1/states", json={"text": BOOK}).json()["id"]
            never = made[:-1] + ("0" if made[-1] != "0" else "1")
            for method, path, body in (
                ("GET", "/v1/states/{}", None),
                ("GET", "/v1/states/{}/file", None),
                ("POST", "/v1/states/{}/fork", None),
                ("DELETE", "/v1/states/{}", None),
                ("GET", "/v1/responses/{}", None),
                ("DELETE", "/v1/responses/{}", None),
                ("POST", "/v1/completions", {"prompt": "", "state": "{}"}),
                ("POST", "/v1/states", {"text": "x", "state": "{}"}),
            ):
                answers = []
                for name in (made, never):
                    sent = json.dumps(body).replace("{}", name) if body else None
                    answer = yours.request(method, path.format(name), content=sent)
                    headers = {key: x for key, x in answer.headers.items() if key not in ("x-request-id", "date")}
                    answers.append((answer.status_code, answer.text.replace(name, "ID"), headers))
                assert answers[0] == answers[1]
                assert answers[0][0] == 404
            assert yours.get("/v1/states").json()["data"] == []
            seen = yours.post("/v1/states", json={"text": BOOK}).json()["usage"]
            assert seen["prompt_tokens_details"]["cached_tokens"] == 0
            assert mine.get(f"/v1/states/{made}").json()["id"] == made
