"""A process that serves with others, without a model: it says who it is. Its answers: one word, or one every 20 ms."""

import asyncio
import json
import os
import socket

import uvicorn

from tarnn.serving.workers.gathered import Gathered
from tarnn.serving.workers.member import Member
from tarnn.serving.workers.place import own_place
from tarnn.serving.workers.routing import Routing

PLACE = own_place()
LEFT = []  # conversations whose clients went away
ASKED = []  # all


async def app(scope, receive, send):
    if scope["type"] == "lifespan":
        return
    message = await receive()
    body = message["body"]
    while message.get("more_body"):
        message = await receive()
        body += message["body"]
    asked = json.loads(body or b"{}")
    if scope["path"] == "/metrics":
        told = f"# TYPE toy_left_total counter\ntoy_left_total {len(LEFT)}\n# TYPE toy_asked gauge\ntoy_asked {len(ASKED)}\n"
        await answer(send, told.encode())
        return
    ASKED.append(asked)
    if scope["path"] == "/ready":
        await answer(send, b"ready")
    elif not asked.get("stream"):
        if asked.get("seconds"):
            await asyncio.sleep(asked["seconds"])
        told = {"pid": os.getpid(), "worker": PLACE.index, "bytes": len(body), "client": scope["client"][1]}
        await answer(send, json.dumps(told).encode())
    else:
        await stream(asked, receive, send)


async def stream(asked, receive, send):
    gone = asyncio.ensure_future(receive())
    await send({"type": "http.response.start", "status": 200, "headers": []})
    for count in range(asked["stream"]):
        if gone.done():
            LEFT.append(asked)
            return
        await send({"type": "http.response.body", "body": b"%d:%d " % (PLACE.index, count), "more_body": True})
        await asyncio.sleep(0.02)
    await send({"type": "http.response.body", "body": b""})


async def answer(send, body):
    headers = [(b"content-length", b"%d" % len(body))]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": body})


class Server(uvicorn.Server):
    async def startup(self, sockets=None):
        await super().startup(sockets)
        MEMBER.join(self)

    async def shutdown(self, sockets=None):
        MEMBER.leave()
        await super().shutdown(sockets)


if __name__ == "__main__":
    MEMBER = Member(PLACE)
    routed = Gathered(Routing(app, PLACE, 2**20, 5.0), PLACE)
    config = uvicorn.Config(routed, http=MEMBER.protocol, lifespan="off", log_level="warning")
    Server(config).run(sockets=[socket.socket(fileno=PLACE.listener)])
