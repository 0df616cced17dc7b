"""Clients of a server of texts, in a process of their own: who asked for what, and when each of its tokens came.

    python benchmarks/toolkit/stream_load.py < load.json        → what became of each request, JSON

Thin, so that the server is measured and not this: a connection per request, whose bytes are kept with their times as they
come. What they say is read when all is over. The standard library alone.

load.json: {"host", "port", "path", "groups": {NAME: {"bodies": […], …}}}, with `streams`: so many clients, each of which sends
the next body when it has its last answer; or `rate`: so many bodies a second, whatever came of those before. `while`: the name of
another group; when that is done, this one sends no more, and what it still waits for is left. `key`: an API key.
"""

import asyncio
import bisect
import gc
import json
import resource
import sys
import time
from typing import Any, NamedTuple

clock = time.perf_counter


class Conversation(asyncio.Protocol):
    """One request on one connection, up to its end."""

    def __init__(self, message: bytes):
        self.message, self.parts, self.times = message, [], []
        self.begun, self.over = 0.0, asyncio.get_running_loop().create_future()

    def connection_made(self, transport: Any) -> None:
        self.begun = clock()
        transport.write(self.message)

    def data_received(self, data: bytes) -> None:
        self.times.append(clock())
        self.parts.append(data)

    def connection_lost(self, error: Exception | None) -> None:
        if not self.over.done():
            self.over.set_result(error)


class Sent(NamedTuple):
    """A request that was made, when it was meant to be made, and its connection, or why there was none."""

    at: float
    conversation: Conversation | None
    error: str = ""


async def ask(load: dict, body: dict, at: float) -> Sent:
    content = json.dumps({**body, **load.get("fields", {})}).encode()
    head = f"POST {load['path']} HTTP/1.1\r\nHost: {load['host']}\r\nContent-Type: application/json\r\n"
    head += f"Content-Length: {len(content)}\r\nConnection: close\r\n"
    head += f"Authorization: Bearer {load['key']}\r\n" if "key" in load else ""
    loop, conversation = asyncio.get_running_loop(), Conversation(head.encode() + b"\r\n" + content)
    try:
        transport, _ = await loop.create_connection(lambda: conversation, load["host"], load["port"])
    except OSError as error:
        return Sent(at, None, str(error))
    try:
        error = await conversation.over
        return Sent(at, conversation, str(error or ""))
    except asyncio.CancelledError:
        transport.abort()
        return Sent(at, conversation, "left")


async def closed_group(load: dict, group: dict, sent: list[Sent]) -> None:
    bodies = iter(group["bodies"])

    async def client() -> None:
        for body in bodies:
            sent.append(await ask(load, body, clock()))

    await asyncio.gather(*(client() for _ in range(group["streams"])))


async def open_group(load: dict, group: dict, sent: list[Sent]) -> None:
    begun, tasks = clock(), []
    try:
        for i, body in enumerate(group["bodies"]):
            at = begun + i / group["rate"]
            await asyncio.sleep(max(0.0, at - clock()))
            tasks.append(asyncio.create_task(ask(load, body, at)))
        await asyncio.wait(tasks)
    finally:
        for task in tasks:
            task.cancel()
        sent += await asyncio.gather(*tasks)


async def run(load: dict) -> dict[str, list[Sent]]:
    """All groups at once."""
    sent: dict[str, list[Sent]] = {name: [] for name in load["groups"]}
    tasks = {
        name: asyncio.create_task((closed_group if "streams" in group else open_group)(load, group, sent[name]))
        for name, group in load["groups"].items()
    }
    for name, group in load["groups"].items():
        if "while" in group:
            await tasks[group["while"]]
            tasks[name].cancel()
    await asyncio.gather(*tasks.values(), return_exceptions=True)
    return sent


# --- what the bytes say


def answer(sent: Sent, begun: float) -> dict[str, Any]:
    """As JSON: status, seconds (since all began) of sending, of the first byte and of each event with text, the text, usage."""
    if sent.conversation is None:
        return {"status": 0, "error": sent.error, "at": sent.at - begun, "times": [], "text": ""}
    data, times = b"".join(sent.conversation.parts), sent.conversation.times
    ends, total = [], 0
    for part in sent.conversation.parts:
        total += len(part)
        ends.append(total)
    head, _, _ = data.partition(b"\r\n\r\n")
    status = int(head.split(b" ", 2)[1]) if head else 0
    said: dict[str, Any] = {
        "status": status,
        "error": sent.error,
        "at": sent.at - begun,
        "sent": sent.conversation.begun - begun,
        "headers": times[0] - begun if times else None,
        "times": [],
        "text": "",
        "usage": None,
    }
    body, offsets = unchunked(data, len(head) + 4) if b"chunked" in head.lower() else (data[len(head) + 4 :], None)
    if b"text/event-stream" not in head.lower():
        said["body"] = body.decode(errors="replace")[:2000]
        return said
    at, texts = 0, []
    while (end := body.find(b"\n\n", at)) >= 0 or (end := body.find(b"\r\n\r\n", at)) >= 0:
        text, usage = event(body[at:end])
        if text:
            place = end + len(head) + 4 if offsets is None else raw_offset(offsets, end)
            said["times"].append(times[min(bisect.bisect_right(ends, place), len(times) - 1)] - begun)
            texts.append(text)
        said["usage"] = usage or said["usage"]
        at = end + 2
    said["text"] = "".join(texts)
    return said


def unchunked(data: bytes, at: int) -> tuple[bytes, list[tuple[int, int]]]:
    """The body, and of each chunk (where it begins in the body, where in the data)."""
    body, offsets, length = [], [], 0
    while (end := data.find(b"\r\n", at)) >= 0:
        size = int(data[at:end].split(b";")[0] or b"0", 16)
        if not size:
            break
        offsets.append((length, end + 2))
        body.append(data[end + 2 : end + 2 + size])
        length, at = length + size, end + 2 + size + 2
    return b"".join(body), offsets


def raw_offset(offsets: list[tuple[int, int]], place: int) -> int:
    begin, raw = offsets[bisect.bisect_right(offsets, place, key=lambda pair: pair[0]) - 1]
    return raw + place - begin


def event(lines: bytes) -> tuple[str, dict | None]:
    """(what it adds to the text, usage if it tells it) of completions, chats and responses."""
    data = b"".join(line[5:].strip() for line in lines.split(b"\n") if line.startswith(b"data:"))
    if not data.startswith(b"{"):
        return "", None
    said = json.loads(data)
    if said.get("type") == "response.output_text.delta":
        return said["delta"], None
    usage = said.get("usage") or said.get("response", {}).get("usage")
    if "timings" in said:  # llama.cpp's
        usage = {**(usage or {}), "timings": said["timings"]}
    if "response" in said and usage:
        usage = {**usage, "response_id": said["response"]["id"]}
    choice = (said.get("choices") or [{}])[0]
    return choice.get("text") or (choice.get("delta") or {}).get("content") or "", usage


def main() -> None:
    load = json.load(sys.stdin)
    gc.freeze()
    gc.disable()
    before, begun = resource.getrusage(resource.RUSAGE_SELF), clock()
    sent = asyncio.run(run(load))
    seconds, after = clock() - begun, resource.getrusage(resource.RUSAGE_SELF)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    groups = {name: [answer(x, begun) for x in of] for name, of in sent.items()}
    json.dump({"seconds": seconds, "cpu": cpu, "groups": groups}, sys.stdout)


if __name__ == "__main__":
    main()
