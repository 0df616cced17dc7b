"""Who comes in: keys and tenants, names of hosts, pages of others; and what every answer carries."""

import pytest
from support.http_server import call

from tarnn.errors import UserError
from tarnn.serving.http.app import create_app
from tarnn.serving.http.settings import ServerSettings, answered_names, read_keys, tenant_of

KEYS = ("first-key-of-the-file", "second-key-of-the-file")
ASK = {"prompt": "x", "max_tokens": 1}


@pytest.fixture(scope="module")
def ask(engine):
    """ask(settings, method, path, **options): the answer of an app with these settings, without a socket."""

    def ask(settings, method, path, *, prepare=lambda app: None, **options):
        prepare(app := create_app({"linear": engine}, settings))
        return call(app, method, path, **options)

    return ask


def bearer(key):
    return {"Authorization": f"Bearer {key}"}


@pytest.mark.parametrize("path", ["/v1/models", "/metrics", "/v1/completions", "/tokenize", "/nowhere"])
@pytest.mark.parametrize(
    "headers",
    [{}, bearer("wrong"), bearer(""), bearer(KEYS[0][:-1]), {"Authorization": KEYS[0]}, bearer("ключ".encode())],
)
def test_a_key_is_needed(ask, path, headers):
    method = "POST" if path in ("/v1/completions", "/tokenize") else "GET"
    answer = ask(ServerSettings(keys=KEYS), method, path, headers=headers)
    assert answer.status_code == 401
    assert answer.json()["error"]["code"] == "invalid_api_key"
    assert answer.headers["www-authenticate"] == "Bearer"


@pytest.mark.parametrize("key", KEYS)
def test_each_key_is_let_in(ask, key):
    settings = ServerSettings(keys=KEYS)
    assert ask(settings, "POST", "/v1/completions", headers=bearer(key), json=ASK).status_code == 200
    assert ask(settings, "GET", "/health").status_code == 200


def test_only_the_first_key_reads_the_metrics_of_all(ask):
    settings = ServerSettings(keys=KEYS)
    assert ask(settings, "GET", "/metrics", headers=bearer(KEYS[0])).status_code == 200
    assert ask(settings, "GET", "/metrics", headers=bearer(KEYS[1])).status_code == 403


def test_a_key_is_a_tenant(ask, engine, monkeypatch):
    tenants = []
    submit = engine.submit
    monkeypatch.setattr(engine, "submit", lambda request, on: tenants.append(request.tenant) or submit(request, on))
    for key in KEYS:
        ask(ServerSettings(keys=KEYS), "POST", "/v1/completions", headers=bearer(key), json=ASK)
    ask(ServerSettings(), "POST", "/v1/completions", json=ASK)
    assert tenants == [tenant_of(KEYS[0]), tenant_of(KEYS[1]), ""]
    assert len(set(tenants)) == 3
    assert not any(key in tenant for key in KEYS for tenant in tenants)


def test_a_page_that_calls_itself_by_our_address(ask):
    """A name of a stranger that leads to this machine (DNS rebinding), or a page of a stranger that asks us."""
    local = ServerSettings(hosts=answered_names("127.0.0.1", (), False))
    for host in ("localhost:8000", "127.0.0.1", "[::1]:8000", "LOCALHOST"):
        assert ask(local, "GET", "/v1/models", headers={"Host": host}).status_code == 200
    for host in ("stranger.example", "localhost.stranger.example:8000", ""):
        assert ask(local, "GET", "/v1/models", headers={"Host": host}).status_code == 421
    for origin, status in (("http://stranger.example", 403), ("null", 403), ("http://localhost:8000", 200)):
        answer = ask(local, "POST", "/v1/completions", headers={"Origin": origin}, json=ASK)
        assert answer.status_code == status


def test_pages_of_others_are_let_in_by_name(ask):
    asked = {"Origin": "https://page.example", "Access-Control-Request-Method": "POST"}
    assert (
        "access-control-allow-origin" not in ask(ServerSettings(), "OPTIONS", "/v1/completions", headers=asked).headers
    )
    settings = ServerSettings(cors=("https://page.example",))
    answer = ask(settings, "OPTIONS", "/v1/completions", headers=asked)
    assert answer.headers["access-control-allow-origin"] == "https://page.example"
    answer = ask(settings, "POST", "/v1/completions", headers=asked, json=ASK)
    assert answer.status_code == 200
    assert answer.headers["access-control-allow-origin"] == "https://page.example"
    asked["Origin"] = "https://other.example"
    assert ask(settings, "POST", "/v1/completions", headers=asked, json=ASK).status_code == 403


def test_every_answer_has_an_id(ask):
    assert ask(None, "GET", "/health").headers["x-request-id"].startswith("req-")
    assert ask(None, "GET", "/nowhere", headers={"x-request-id": "mine-7"}).headers["x-request-id"] == "mine-7"
    assert ask(None, "GET", "/health", headers={"x-request-id": "x" * 999}).headers["x-request-id"].startswith("req-")


def test_a_server_that_drains_takes_no_more(ask):
    def drain(app):
        app.state.draining = True

    answer = ask(None, "POST", "/v1/completions", json=ASK, prepare=drain)
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "5")
    assert ask(None, "GET", "/ready", prepare=drain).status_code == 503
    assert ask(None, "GET", "/health", prepare=drain).status_code == 200
    assert ask(None, "GET", "/ready").json() == {"status": "ready"}


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/v1/nowhere", 404),
        ("GET", "/v1/completions", 405),
        ("DELETE", "/v1/models", 405),
        ("GET", "/v1/models/x", 404),
        ("POST", "/v1/images/generations", 404),
    ],
)
def test_what_is_not_here_has_a_sentence(ask, method, path, status):
    answer = ask(None, method, path)
    assert answer.status_code == status
    message = answer.json()["error"]["message"]
    assert message.endswith(".") or "expected one of" in message
    assert ("tarnn generate" in message) == ("images" in path)


def test_a_bug_tells_the_client_nothing(ask, engine, monkeypatch):
    def broken(*_):
        raise KeyError("a secret")

    monkeypatch.setattr(engine, "submit", broken)
    with pytest.raises(KeyError):  # for the log; what the client got is below
        ask(None, "POST", "/v1/completions", json=ASK)
    answer = ask(None, "POST", "/v1/completions", json=ASK, raises=False)
    assert answer.status_code == 500
    assert answer.headers["connection"] == "close"  # since uvicorn does that
    assert "secret" not in answer.text
    assert answer.json()["error"]["code"] == "internal_error"


def test_a_file_of_keys(tmp_path):
    file = tmp_path / "keys"
    file.write_text(f"# clients\n{KEYS[0]}\n\n  {KEYS[1]}  \n{KEYS[0]}\n")
    assert read_keys(file) == KEYS


@pytest.mark.parametrize(
    ("content", "message"),
    [("# none\n", "holds no key"), ("short\n", "at least 16"), ("a key with spaces in it\n", "without spaces")],
)
def test_a_file_of_keys_that_is_none(tmp_path, content, message):
    file = tmp_path / "keys"
    file.write_text(content)
    with pytest.raises(UserError, match=message):
        read_keys(file)
    with pytest.raises(UserError, match="can't be read"):
        read_keys(tmp_path / "nowhere")


def test_an_address_of_others_needs_keys():
    with pytest.raises(UserError, match=r"--host 0\.0\.0\.0 is open to other machines: give --api-key-file"):
        answered_names("0.0.0.0", (), False)
    assert answered_names("0.0.0.0", KEYS, False) is None
    assert answered_names("::", (), True) is None
    assert "127.0.0.1" in answered_names("127.0.0.5", (), False)
