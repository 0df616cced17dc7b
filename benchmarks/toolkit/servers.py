"""A server in a process of its own: started, waited for, watched and stopped."""

import http.client
import json
import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HOST = "127.0.0.1"
TICK = os.sysconf("SC_CLK_TCK")
PAGE = os.sysconf("SC_PAGE_SIZE")


@dataclass
class Server:
    """What runs, and where: model is the name that requests call it by."""

    port: int
    process: subprocess.Popen
    log: Path
    model: str = ""

    def pids(self) -> list[int]:
        """Its process and all that descend from it."""
        waiting, pids = [self.process.pid], []
        while waiting:
            pids.append(pid := waiting.pop())
            for task in Path(f"/proc/{pid}/task").glob("*/children"):
                with suppress(OSError):
                    waiting += map(int, task.read_text().split())
        return pids

    def cpu_seconds(self) -> float:
        """Processor time that it has taken."""
        seconds = 0.0
        for pid in self.pids():
            with suppress(OSError):
                fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
                seconds += (int(fields[11]) + int(fields[12])) / TICK
        return seconds

    def resident_bytes(self) -> int:
        pages = 0
        for pid in self.pids():
            with suppress(OSError):
                pages += int(Path(f"/proc/{pid}/statm").read_text().split()[1])
        return pages * PAGE

    def call(self, method: str, path: str, body: Any = None, seconds: float = 120) -> tuple[int, Any]:
        """(status, what it answers): JSON where it is JSON."""
        connection = http.client.HTTPConnection(HOST, self.port, timeout=seconds)
        try:
            text = None if body is None else json.dumps(body)
            connection.request(method, path, text, {"Content-Type": "application/json"})
            response = connection.getresponse()
            data = response.read()
        finally:
            connection.close()
        try:
            return response.status, json.loads(data)
        except ValueError:
            return response.status, data.decode(errors="replace")


class NotStarted(Exception):
    """Why a server can't be measured: the last words of its log."""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return probe.getsockname()[1]


@contextmanager
def serving(
    command: Sequence[str],
    log: Path,
    *,
    environment: Mapping[str, str] | None = None,
    ready: str = "/health",
    model: str = "",
    seconds: float = 120,
) -> Iterator[Server]:
    """A server while it runs. "{port}" in its command is a port that was free. Raises NotStarted."""
    port = free_port()
    with log.open("w") as out:
        process = subprocess.Popen(
            [word.format(port=port) if "{port}" in word else word for word in command],
            stdout=out,
            stderr=out,
            env={**os.environ, **(environment or {})},
            start_new_session=True,
        )
    server = Server(port, process, log, model)
    try:
        wait_until_ready(server, ready, seconds)
        yield server
    finally:
        stop(process)


def wait_until_ready(server: Server, path: str, seconds: float) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if server.process.poll() is not None:
            raise NotStarted(last_words(server.log))
        with suppress(OSError, http.client.HTTPException):
            if server.call("GET", path, seconds=2)[0] == 200:
                return
        time.sleep(0.05)
    raise NotStarted(f"not ready after {seconds:.0f} s; {last_words(server.log)}")


def last_words(log: Path) -> str:
    lines = [x.strip() for x in log.read_text(errors="replace").splitlines() if x.strip()]
    return lines[-1][:300] if lines else "it said nothing"


def stop(process: subprocess.Popen) -> None:
    """Ask, wait, and end it and what it started: they have a session of their own."""
    process.terminate()
    with suppress(subprocess.TimeoutExpired):
        process.wait(10)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
