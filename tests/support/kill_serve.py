"""`tarnn serve` is killed under load again and again: what a client was told is held must be there afterwards, to the bit."""

import random
import re
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from dataclasses import dataclass, field

import httpx

CLIENTS = 6
CONTINUED = {"prompt": "!", "temperature": 0, "max_tokens": 8, "logprobs": 2, "ignore_eos": True}


@dataclass
class Told:
    """What clients were told. answers: of each id what is written behind it. counts: of kinds of requests."""

    answers: dict[str, list] = field(default_factory=dict)
    deleted: set[str] = field(default_factory=set)
    lock: threading.Lock = field(default_factory=threading.Lock)


@contextmanager
def served_by_a_process(run, state_dir):
    """(process, address): a real server of this run."""
    command = [sys.executable, "-m", "tarnn", "serve", str(run), "--port", "0", "--state-dir", str(state_dir)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        try:
            lines = []
            for line in process.stderr:
                lines.append(line)
                if match := re.search(r"(http://\S+)/v1 answers", line):
                    break
            else:
                raise AssertionError("".join(lines))
            threading.Thread(target=process.stderr.read, daemon=True).start()
            yield process, match[1]
        finally:
            process.kill()


def continued(client, id):
    return client.post("/v1/completions", json=CONTINUED | {"state": id}).raise_for_status().json()["choices"]


def load(address, told, seed):
    """One client: makes states and conversations until the server is gone, and writes down what it was told."""
    rng = random.Random(seed)
    last = None
    with httpx.Client(base_url=address, timeout=60) as client:
        try:
            while True:
                text = "".join(rng.choices("abcdefgh ", k=rng.choice((5, 200, 1500))))
                kind = rng.choice(("state", "response", "response", "fork", "delete"))
                if kind == "state":
                    last = client.post("/v1/states", json={"text": text}).raise_for_status().json()["id"]
                elif kind == "response":
                    body = {"input": text[:50], "max_output_tokens": rng.randrange(1, 30)}
                    body |= {"previous_response_id": last} if last else {}
                    last = client.post("/v1/responses", json=body).raise_for_status().json()["id"]
                elif last is None:
                    continue
                elif kind == "fork":
                    last = client.post(f"/v1/states/{last}/fork").raise_for_status().json()["id"]
                else:
                    with told.lock:
                        told.answers.pop(last, None)
                    client.delete(f"/v1/states/{last}").raise_for_status()
                    with told.lock:
                        told.deleted.add(last)
                    last = None
                    continue
                with told.lock:
                    told.answers[last] = None  # held, from here on
                answer = continued(client, last)
                with told.lock:
                    told.answers[last] = answer
        except httpx.TransportError:
            return


def kill_under_load(run, state_dir, rounds, seed=0, report=lambda text: None):
    """How many states clients were told of; AssertionError if one is lost, changed, or back from the dead."""
    rng, told = random.Random(seed), Told()
    for number in range(rounds + 1):
        with served_by_a_process(run, state_dir) as (process, address):
            check(address, told)
            report(f"round {number}: {len(told.answers)} states are there")
            if number == rounds:
                break
            threads = [threading.Thread(target=load, args=(address, told, rng.random())) for _ in range(CLIENTS)]
            for thread in threads:
                thread.start()
            time.sleep(rng.uniform(0.2, 1.5))
            process.kill()
            for thread in threads:
                thread.join()
    return len(told.answers)


def check(address, told):
    with httpx.Client(base_url=address, timeout=60) as client:
        held = {state["id"]: state for state in client.get("/v1/states").json()["data"]}
        assert not set(told.answers) - set(held)
        assert not told.deleted & set(held)
        for id, answer in told.answers.items():
            assert held[id]["where"] == "disk"
            now = continued(client, id)
            assert answer in (None, now), id
            told.answers[id] = now
            if id.startswith("resp_"):
                assert client.get(f"/v1/responses/{id}").json()["id"] == id
