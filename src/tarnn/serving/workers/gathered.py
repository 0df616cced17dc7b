"""What all processes say together: /metrics, with a label for each, and /ready."""

import asyncio

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tarnn.serving.workers.connection import CONNECTION, Connection, as_bytes
from tarnn.serving.workers.member import ask
from tarnn.serving.workers.place import Place

LABEL = "worker"


class Joined(Collector):
    """Metrics of several processes. texts: of each, by its index, in Prometheus' format."""

    def __init__(self, texts: dict[int, str]):
        self.texts = texts

    def collect(self) -> list[Metric]:
        joined: dict[str, Metric] = {}
        for index, text in self.texts.items():
            for metric in text_string_to_metric_families(text):
                whole = joined.setdefault(metric.name, Metric(metric.name, metric.documentation, metric.type))
                for sample in metric.samples:
                    whole.samples.append(sample._replace(labels={LABEL: str(index), **sample.labels}))
        return list(joined.values())


class Gathered:
    """Asks the others where a client asks for what concerns all; app: answers for this process alone."""

    def __init__(self, app: ASGIApp, place: Place):
        self.app, self.place = app, place

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        connection: Connection | None = scope.get(CONNECTION)
        of_all = scope["type"] == "http" and scope["method"] == "GET" and scope["path"] in ("/metrics", "/ready")
        if connection is None or connection.is_handed or not of_all:
            await self.app(scope, receive, send)
            return
        own: list[Message] = []

        async def keep(message: Message) -> None:
            own.append(message)

        await self.app(scope, receive, keep)
        start, *parts = own
        if start["status"] == 200:
            body = b"".join(part["body"] for part in parts)
            status, body = await self._together(scope, body)
            headers = [(name, x) for name, x in start["headers"] if name != b"content-length"]
            start = {**start, "status": status, "headers": [*headers, (b"content-length", b"%d" % len(body))]}
            parts = [{"type": "http.response.body", "body": body}]
        for message in (start, *parts):
            await send(message)

    async def _together(self, scope: Scope, own: bytes) -> tuple[int, bytes]:
        """The status and the body: /ready is as ready as the least of all, /metrics has what can be had."""
        others = [index for index in range(self.place.count) if index != self.place.index]
        question = as_bytes({**scope, "http_version": "1.0"}, b"")
        answers = await asyncio.gather(*(ask(self.place, index, question) for index in others))
        known = {index: split(answer) for index, answer in zip(others, answers) if answer is not None}
        if scope["path"] == "/ready":
            worst = max((status for status, _ in known.values()), default=200)
            if len(known) < len(others):
                return 503, b'{"status": "a worker is starting"}'
            return next(
                ((status, body) for status, body in known.values() if status == worst and status != 200), (200, own)
            )
        texts = {index: body.decode() for index, (status, body) in known.items() if status == 200}
        registry = CollectorRegistry()
        registry.register(Joined(dict(sorted({self.place.index: own.decode(), **texts}.items()))))
        return 200, generate_latest(registry)


def split(answer: bytes) -> tuple[int, bytes]:
    """The status and the body of an answer that ends with its connection."""
    head, _, body = answer.partition(b"\r\n\r\n")
    return int(head.split(b" ", 2)[1]), body
