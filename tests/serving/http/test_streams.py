"""Streams that are silent for long, begin from a state, or fail."""

from support.http_server import http_server

from tarnn.serving.http.settings import ServerSettings

from .test_completions import ids

PATH = "/v1/completions"
ENDLESS = {"prompt": "Call me", "max_tokens": 200_000, "ignore_eos": True, "stream": True}


def test_a_silent_stream_gets_comments(served):
    """While a long prompt is read; proxies close connections on which nothing moves."""
    with http_server({"m": served("linear")}, ServerSettings(ping_seconds=0.01)) as server:
        answer = server.post(PATH, ENDLESS | {"prompt": "a" * 40_000, "max_tokens": 1})
    assert answer.text.startswith(": ping\n\n")
    assert "data: [DONE]" in answer.text
    assert "x-tarnn-state" not in answer.headers  # nothing is known yet when the headers go out


def test_what_was_read_once_is_found_again(served):
    with http_server({"m": served("linear")}) as server:
        for expected in (0, 7):
            answer = server.post(PATH, ENDLESS | {"max_tokens": 2, "stream_options": {"include_usage": True}})
            assert answer.headers["x-tarnn-state"] == f"hit={expected}/7"
            assert f'"prompt_tokens_details":{{"cached_tokens":{expected}}}' in answer.text
        store = server.engines["m"].store
        state = store.hold("", store.longest("", ids("Call me")), name="begun")
        answers = [
            server.post(PATH, {"prompt": prompt, "state": begin, "temperature": 0, "max_tokens": 5}).json()
            for prompt, begin in (("Call me Ishmael", None), (" Ishmael", "begun"), (" Ishmael", state.id))
        ]
        assert len({answer["choices"][0]["text"] for answer in answers}) == 1
        assert {answer["usage"]["prompt_tokens"] for answer in answers} == {15}
        assert server.post(PATH, {"prompt": "", "state": "nowhere"}).json()["error"]["code"] == "state_not_found"


def test_an_engine_that_fails_ends_the_stream_with_an_error(served):
    with http_server({"m": served("linear")}) as server:
        with server.client.stream("POST", PATH, json=ENDLESS) as answer:
            lines = answer.iter_lines()
            assert next(lines).startswith("data: ")
            server.engines["m"].close()
            last = [line for line in lines if line][-1]
        assert last.startswith('data: {"error": {"message": "The server stopped before the answer was whole."')
        assert server.post(PATH, {"prompt": "x"}).json()["error"]["code"] == "unavailable"
