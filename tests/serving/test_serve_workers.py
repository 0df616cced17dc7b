"""`tarnn serve --workers 2`: one store, one port; answers, states and numbers are those of one server."""

import asyncio
import os
import re
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import httpx
import numpy as np
import pytest

from tarnn.serving.engine import Engine
from tarnn.serving.model import open_served
from tarnn.serving.request import Request, Sampling

pytestmark = pytest.mark.slow
WAIT = 120.0


@contextmanager
def serving(folder, *options, workers=2):
    """(url, process) of a server that takes requests."""
    command = [sys.executable, "-m", "tarnn", "serve", str(folder), "--port", "0", "--workers", str(workers), *options]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment) as process:
        try:
            lines = iter(process.stderr.readline, "")
            url = next(match[0] for line in lines if (match := re.search(r"http://127\.0\.0\.1:\d+", line)))
            yield url, process
        finally:
            process.terminate()
            process.stderr.read()


@pytest.fixture(scope="module")
def folder(served_folder):
    return served_folder("linear")


@pytest.fixture(scope="module")
def url(folder):
    with serving(folder) as (url, _):
        yield url


@pytest.fixture
def client(url):
    """Each request on a connection of its own, so that either process accepts it."""
    with httpx.Client(base_url=url, timeout=WAIT, headers={"connection": "close"}) as client:
        yield client


def test_answers_are_those_of_one_engine(client, folder):
    with Engine(open_served(folder)) as engine:
        for seed in range(6):
            prompt, sampling = f"Conversation {seed}", Sampling(seed=seed, temperature=0.9)
            ids = np.frombuffer(prompt.encode(), np.uint8).astype(np.int32)  # of the tokenizer of bytes
            request = Request(ids, max_tokens=30, sampling=sampling)
            text = "".join(event.text for event in engine.submit(request))
            asked = {"prompt": prompt, "max_tokens": 30, "seed": seed, "temperature": 0.9}
            assert client.post("/v1/completions", json=asked).json()["choices"][0]["text"] == text


def numbers(client, name):
    """Of each process, all models together."""
    found = re.findall(rf'^{name}{{.*worker="(\d)".*}} ([\d.e+-]+)$', client.get("/metrics").text, re.MULTILINE)
    return {worker: sum(float(value) for w, value in found if w == worker) for worker, _ in found}


def test_a_conversation_goes_on_in_the_process_that_has_its_state(client):
    before = numbers(client, "tarnn:generation_tokens_total")
    assert set(before) == {"0", "1"}
    previous = None
    for turn in range(6):
        asked = {
            "input": f"Turn {turn}.",
            "max_output_tokens": 16,
            "previous_response_id": previous,
            "stream": turn % 2 == 0,
        }
        answer = client.post("/v1/responses", json=asked)
        assert answer.status_code == 200, answer.text
        previous = re.search(r'"id": ?"(resp_\w+)"', answer.text)[1]
    after = numbers(client, "tarnn:generation_tokens_total")
    assert sorted(after[worker] - before[worker] > 0 for worker in "01") == [False, True]


def test_a_state_is_every_processs(client):
    """Whoever accepts the connection lists all of them; each lies in one process's memory and answers alike each time."""
    made = [client.post("/v1/states", json={"text": f"Chapter {i}. Call me Ishmael."}).json()["id"] for i in range(6)]
    for _ in range(4):
        assert set(made) <= {state["id"] for state in client.get("/v1/states").json()["data"]}
    for id in made:
        asked = {"prompt": " Some", "state": id, "seed": 1}
        texts = {client.post("/v1/completions", json=asked).json()["choices"][0]["text"] for _ in range(3)}
        assert len(texts) == 1
    data = client.get(f"/v1/states/{made[0]}/file").content
    assert client.delete(f"/v1/states/{made[0]}").status_code == 200
    assert client.post("/v1/completions", json=asked | {"state": made[0]}).status_code == 404
    assert client.put("/v1/states/back/file", content=data).status_code in (200, 201)
    assert client.post("/v1/completions", json=asked | {"state": "back"}).status_code == 200


def test_all_are_ready(client):
    assert client.get("/ready").status_code == client.get("/health").status_code == 200


def workers_of(process):
    return [
        int(pid)
        for task in Path(f"/proc/{process.pid}/task").iterdir()
        for pid in (task / "children").read_text().split()
    ]


def test_no_acknowledged_state_is_lost_with_its_process(folder, tmp_path):
    """Processes are killed while clients make states; what was acknowledged is there, and after a restart of all."""
    states = tmp_path / "states"
    with serving(folder, "--state-dir", str(states)) as (url, process):

        async def make(client, number, made):
            for i in range(12):
                asked = {"text": f"State {number}.{i}: " + "x" * 200}
                try:
                    answer = await client.post("/v1/states", json=asked)
                except httpx.TransportError:
                    continue
                assert answer.status_code in (200, 201, 502), answer.text
                if answer.status_code != 502:
                    made.append(answer.json()["id"])
                await asyncio.sleep(0.05)

        async def kill():
            for _ in range(2):
                await asyncio.sleep(0.4)
                os.kill(workers_of(process)[0], signal.SIGKILL)
                end = time.monotonic() + WAIT
                while len(workers_of(process)) < 2 and time.monotonic() < end:
                    await asyncio.sleep(0.05)

        async def all_at_once():
            made = []
            async with httpx.AsyncClient(base_url=url, timeout=WAIT) as client:
                await asyncio.gather(kill(), *(make(client, number, made) for number in range(6)))
            return made

        made = asyncio.run(all_at_once())
        assert made
        assert_there(url, made)
        with pytest.raises(AssertionError, match="belong to a server that is running"):
            second(folder, states)
        assert_drains(url, process)
    with serving(folder, "--state-dir", str(states), workers=1) as (url, _):
        assert_there(url, made)


def assert_drains(url, process):
    """A system that ends services sends its signal to each process: what runs is answered to its end all the same."""
    asked = {
        "prompt": "a",
        "max_tokens": 2000,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    with httpx.stream("POST", f"{url}/v1/completions", json=asked, timeout=WAIT) as answer:
        lines = answer.iter_lines()
        next(lines)
        for pid in (*workers_of(process), process.pid):
            os.kill(pid, signal.SIGTERM)
        last = [line for line in lines if line][-2:]
    assert '"completion_tokens":2000' in last[0].replace(" ", "")
    assert last[1] == "data: [DONE]"
    assert process.wait(WAIT) == 0


def assert_there(url, made):
    with httpx.Client(base_url=url, timeout=WAIT) as client:
        for id in made:
            answer = client.post("/v1/completions", json={"prompt": " and", "state": id, "max_tokens": 2})
            assert answer.status_code == 200, answer.text


def second(folder, states):
    command = [sys.executable, "-m", "tarnn", "serve", str(folder), "--port", "0", "--state-dir", str(states)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=WAIT)
    assert not run.returncode, run.stderr
