"""Processes that serve behind one port: a conversation finds its own, wherever its connection came in; deaths are told."""

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest

TOY = Path(__file__).parents[1] / "support" / "toy_worker.py"
STARTER = f"""
import socket, sys
from tarnn.serving.workers.supervisor import Supervisor

listener = socket.create_server(("127.0.0.1", 0))
print(listener.getsockname()[1], flush=True)
say = lambda text: print(text, flush=True)
supervisor = Supervisor([sys.executable, {str(TOY)!r}], 2, listener, say=say, on_ready=lambda: say("ready"))
sys.exit(supervisor.run())
"""
WAIT = 60.0


class Served:
    """A supervisor with two toys, and how to ask them."""

    def __init__(self, code=STARTER):
        self.process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
        self.port = int(self.process.stdout.readline())
        self.url = f"http://127.0.0.1:{self.port}"
        headers = {"connection": "close"}  # a connection for each request: either process accepts it
        self.client = httpx.Client(headers=headers)

    def ask(self, client=None, path="/v1/completions", **asked):
        return (client or self.client).post(self.url + path, json=asked, timeout=WAIT)

    def line(self):
        return self.process.stdout.readline().strip()

    def end(self):
        """The exit code."""
        self.process.terminate()
        with self.process.stdout:
            return self.process.wait(WAIT)


@pytest.fixture(scope="module")
def served():
    served = Served()
    assert served.line() == "ready"
    yield served
    assert served.end() == 0


def eventually(check):
    end = time.monotonic() + WAIT
    while not (value := check()):
        assert time.monotonic() < end, "it never came true"
        time.sleep(0.02)
    return value


def test_a_conversation_stays_in_one_process_whoever_receives_it(served):
    names = [f"user {i}" for i in range(8)]
    first = {name: served.ask(user=name).json()["worker"] for name in names}
    assert set(first.values()) == {0, 1}
    for _ in range(3):  # a new connection each time: either process accepts it
        assert {name: served.ask(user=name).json()["worker"] for name in names} == first
    with httpx.Client() as client:  # one connection for all: it moves with each request
        answers = [served.ask(client, user=name).json() for name in names]
    assert [answer["worker"] for answer in answers] == list(first.values())
    assert len({answer["client"] for answer in answers}) == 1


def test_large_bodies_and_slow_ones_are_handed_over_whole(served):
    def pieces():
        yield b'{"user": "user 1", "text": "'
        for _ in range(5):
            time.sleep(0.01)
            yield b"x" * 100_000
        yield b'"}'

    for name in ("user 1", "user 2"):
        assert served.ask(user=name, text="x" * 700_000).json()["bytes"] > 700_000
    answer = httpx.post(served.url + "/v1/completions", content=pieces(), timeout=WAIT)
    assert answer.json()["bytes"] == 500_030


def test_a_body_beyond_the_bound_is_answered_where_it_came_in(served):
    assert served.ask(user="user 1", text="x" * 2**21).json()["bytes"] > 2**21


def test_requests_that_follow_on_the_heels_of_another_are_not_lost(served):
    """Pipelined: both are answered, in their order, though the first may belong elsewhere."""
    for name in ("user 0", "user 1", "user 2", "user 3"):
        body = json.dumps({"user": name}).encode()
        request = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body)
        with socket.create_connection(("127.0.0.1", served.port), WAIT) as connection:
            connection.sendall(request + request.replace(b"\r\n\r\n", b"\r\nconnection: close\r\n\r\n", 1))
            answers = b"".join(iter(lambda: connection.recv(2**16), b""))
        assert answers.count(b"HTTP/1.1 200") == 2


def test_streams_of_both_processes_come_whole(served):
    async def all_of_them():
        async with httpx.AsyncClient(timeout=WAIT) as client:
            return await asyncio.gather(
                *(
                    client.post(served.url + "/v1/completions", json={"user": f"user {i}", "stream": 9})
                    for i in range(8)
                )
            )

    for answer in asyncio.run(all_of_them()):
        words = answer.text.split()
        worker = words[0][0]
        assert words == [f"{worker}:{count}" for count in range(9)]


def metric(served, name):
    """Of each process."""
    lines = httpx.get(served.url + "/metrics").text.splitlines()
    numbers = {line.split()[0]: float(line.split()[1]) for line in lines if not line.startswith("#")}
    return [numbers[f'{name}{{worker="{index}"}}'] for index in (0, 1)]


def left(served):
    return metric(served, "toy_left_total")


def test_a_clients_leaving_is_seen_by_the_process_that_works_for_it(served):
    before = left(served)
    for i in range(8):
        with httpx.stream(
            "POST", served.url + "/v1/completions", json={"user": f"user {i}", "stream": 10**6}
        ) as answer:
            next(answer.iter_bytes())
    eventually(lambda: sum(left(served)) == sum(before) + 8)
    assert all(a > b for a, b in zip(left(served), before))


def test_all_say_whether_they_are_ready(served):
    assert httpx.get(served.url + "/ready").text == "ready"


def test_who_waits_for_a_process_that_dies_is_told_and_it_is_started_again():
    served = Served()
    try:
        assert served.line() == "ready"
        first = {f"user {i}": served.ask(user=f"user {i}").json() for i in range(8)}
        victim, name = next((answer["pid"], name) for name, answer in first.items() if answer["worker"] == 1)

        async def ask():
            async with httpx.AsyncClient(timeout=WAIT) as client:
                url, before = served.url + "/v1/completions", metric(served, "toy_asked")[1]
                waiting = asyncio.ensure_future(client.post(url, json={"user": name, "seconds": 50}))
                async with client.stream("POST", url, json={"user": name, "stream": 10**6}) as stream:
                    pieces = stream.aiter_bytes()
                    await anext(pieces)
                    await asyncio.to_thread(eventually, lambda: metric(served, "toy_asked")[1] >= before + 2)
                    os.kill(victim, signal.SIGKILL)
                    with pytest.raises(httpx.RemoteProtocolError, match="incomplete chunked read"):
                        async for _ in pieces:
                            pass
                return await waiting

        answer = asyncio.run(ask())
        assert answer.status_code == 502
        assert answer.json()["error"]["code"] == "worker_died"
        assert served.line() == (
            "tarnn: worker 1 died (signal 9) while an answer waited; these clients were told (502). It is started again."
        )
        assert served.ask(user=name).json()["pid"] != victim  # somebody answers at once, its own process or another
        eventually(lambda: served.ask(user=name).json()["worker"] == 1)
        eventually(lambda: httpx.get(served.url + "/ready").status_code == 200)
    finally:
        served.end()


def test_a_signal_lets_all_answers_end_and_a_second_one_does_not():
    for signals, whole in ((1, True), (2, False)):
        served = Served()
        assert served.line() == "ready"

        async def ask(served=served, signals=signals):
            async with httpx.AsyncClient(timeout=WAIT) as client:
                url = served.url + "/v1/completions"
                running = [
                    asyncio.ensure_future(client.post(url, json={"user": f"user {i}", "stream": 60})) for i in range(4)
                ]
                await asyncio.sleep(0.4)
                for _ in range(signals):
                    served.process.send_signal(signal.SIGINT)
                    await asyncio.sleep(0.15)
                return await asyncio.gather(*running, return_exceptions=True)

        answers = asyncio.run(ask())
        assert served.end() == 0
        assert [isinstance(answer, httpx.Response) and len(answer.text.split()) == 60 for answer in answers] == [
            whole
        ] * 4


def test_a_process_whose_starter_was_killed_ends_too():
    served = Served()
    assert served.line() == "ready"
    pids = {served.ask(user=f"user {i}").json()["pid"] for i in range(8)}
    served.process.kill()
    served.end()
    eventually(lambda: not any(Path(f"/proc/{pid}/exe").exists() for pid in pids))


def test_what_can_not_start_is_not_started_again():
    code = STARTER.replace(f"[sys.executable, {str(TOY)!r}]", '[sys.executable, "-c", "raise SystemExit(3)"]')
    served = Served(code)
    assert served.process.wait(WAIT) == 3
    served.end()
