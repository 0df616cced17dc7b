"""`tarnn serve`: what it refuses before it serves, and how it ends."""

import json
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from contextlib import ExitStack

import pytest
from support.served import save_served

from tarnn.cli.formats import num_bytes, num_seconds
from tarnn.cli.main import main
from tarnn.errors import UserError
from tarnn.models import TarnnForImageGeneration, TarnnImageConfig


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    save_served(made := tmp_path_factory.mktemp("served") / "tiny", "linear")
    return made


def refused(capsys, *options):
    assert main(["serve", *map(str, options)]) == 2
    line = capsys.readouterr().err.strip()
    assert line.startswith("tarnn: error: ")
    assert "\n" not in line
    return line


def test_a_port_in_use(capsys, folder):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert f"port {port} is in use. Give another --port" in refused(capsys, folder, "--port", port)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--host", "0.0.0.0"], "open to other machines: give --api-key-file, or --no-auth"),
        (["--host", "no.such.host.invalid", "--no-auth"], "is no address of this machine"),
        (["--host", "192.0.2.1", "--no-auth"], "192.0.2.1:8000 can't be served"),
        (["--api-key-file", "nowhere"], "the keys can't be read from nowhere"),
        (["--trusted-proxy", "nginx"], "--trusted-proxy must be an address or a network"),
        (["--state-memory", "much"], "--state-memory must be a number of bytes"),
        (["--session-ttl", "1y"], "--session-ttl must be a time"),
        (["--port", "70000"], "less than or equal to 65535"),
        (["--weights", "int2"], "int2"),
    ],
)
def test_what_cannot_be(capsys, folder, options, sentence):
    assert sentence in refused(capsys, folder, *options)


def test_folders_that_cannot_be_served(capsys, folder, tmp_path):
    assert "does not exist" in refused(capsys, tmp_path / "nowhere", "--port", 0)
    assert "two models are called tiny" in refused(capsys, folder, folder, "--port", 0)


def test_a_model_of_images_is_refused(capsys, tmp_path):
    sizes = {"image_height": 2, "image_width": 3, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    TarnnForImageGeneration(TarnnImageConfig.paper(**sizes, intermediate_size=8)).save_pretrained(tmp_path / "digits")
    capsys.readouterr()  # a progress bar
    line = refused(capsys, tmp_path / "digits")
    assert "holds a model of images; expected one of text. `tarnn generate" in line


def test_keys_and_no_auth_exclude_each_other(capsys, folder, tmp_path):
    (tmp_path / "keys").write_text("0123456789abcdef\n")
    assert "give one of them" in refused(capsys, folder, "--api-key-file", tmp_path / "keys", "--no-auth")


def test_amounts():
    assert [num_bytes(x, "--x") for x in ("7", "1.5kB", "2 GiB", "20GB")] == [7, 1500, 2**31, 20 * 10**9]
    assert [num_seconds(x, "--x") for x in ("90s", "2m", "12h", "1d")] == [90, 120, 43200, 86400]
    for wrong in ("", "GB", "-1GB", "1e9", "1XB", "nan"):
        with pytest.raises(UserError, match="--x must be"):
            num_bytes(wrong, "--x")
    with pytest.raises(UserError, match="--x must be a time"):
        num_seconds("5", "--x")


def post(address, body):
    request = urllib.request.Request(
        f"{address}/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    return urllib.request.urlopen(request, timeout=60)


@pytest.mark.slow
@pytest.mark.parametrize("signals", [1, 2])
def test_the_first_signal_drains_and_the_second_stops(folder, signals):
    command = [sys.executable, "-m", "tarnn", "serve", str(folder), "--port", "0"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as server, ExitStack() as stack:
        stack.callback(server.kill)  # where the test fails
        address = None
        while address is None:
            line = server.stderr.readline()
            assert line, "the server has ended"
            address = re.search(r"http://\S+/v1", line)
        address = address[0]
        length = 3000 if signals == 1 else 10**7
        with post(address, {"prompt": "x", "max_tokens": length, "ignore_eos": True, "stream": True}) as stream:
            assert stream.readline().startswith(b"data: ")
            server.send_signal(signal.SIGINT)
            assert "answers 1 to their ends" in server.stderr.readline()
            with pytest.raises(urllib.error.HTTPError) as error:
                post(address, {"prompt": "x"})
            with error.value as refusal:
                assert refusal.code == 503
            if signals == 2:
                server.send_signal(signal.SIGINT)
            rest = stream.read()
        begun = time.monotonic()
        assert server.wait(60) == 0
        assert time.monotonic() - begun < 30
    if signals == 1:
        assert rest.endswith(b"data: [DONE]\n\n")
        assert b'"finish_reason":"length"' in rest
    else:
        assert b"The server stopped before the answer was whole" in rest
