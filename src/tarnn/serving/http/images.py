"""/v1/images/generations: images of models that draw, row after row."""

import base64
import time
from collections.abc import AsyncGenerator, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from tarnn.models.images import START
from tarnn.serving.http.answers import check
from tarnn.serving.http.asking import check_choices, client, engine_of, sampling_given, start, tenant
from tarnn.serving.http.body import read_request
from tarnn.serving.http.errors import bad
from tarnn.serving.http.image_wire import (
    CompletedImage,
    Image,
    ImageInputTokens,
    ImageList,
    ImageRequest,
    ImageUsage,
    PartialImage,
)
from tarnn.serving.http.live import LiveStream, attended
from tarnn.serving.http.png import png
from tarnn.serving.http.reader import Reader
from tarnn.serving.http.sse import DONE, PING
from tarnn.serving.request import Event, Request


async def create(request: HttpRequest) -> Response:
    asked = await read_request(request, ImageRequest)
    engine = engine_of(request, asked.model)
    if not engine.model.draws_images:
        raise bad(f"{engine.model.name} writes text and draws no images. POST /v1/completions.", "model")
    n = asked.n or 1
    check_choices(request, 1, n)
    config = engine.model.model.config
    size = f"{config.image_width}x{config.image_height}"
    if asked.size not in (None, "auto", size):
        raise bad(f"{engine.model.name} draws images of {size}; got {asked.size[:40]!r}.", "size", "invalid_value")
    check_class(config.num_classes, asked.class_label)
    drawing = Drawing(request, engine, asked, n, size)
    if asked.stream:
        return LiveStream(drawing.frames())
    images = await attended(request.receive, drawing.whole())
    return JSONResponse(images.model_dump())


def check_class(num_classes: int, label: int | None) -> None:
    if num_classes and (label is None or label >= num_classes):
        got = "none" if label is None else label
        raise bad(f"class_label must be from 0 to {num_classes - 1}; got {got}.", "class_label", "invalid_value")
    if not num_classes and label is not None:
        raise bad("This model knows no classes; leave class_label out.", "class_label", "invalid_value")


class Drawing:
    """The images of one request as they are drawn. values (n, height × width × channels): black where nothing is yet."""

    def __init__(self, request: HttpRequest, engine: Any, asked: ImageRequest, n: int, size: str):
        self.request, self.engine, self.asked, self.size = request, engine, asked, size
        config = engine.model.model.config
        self.shape = config.image_height, config.image_width, config.num_channels
        self.values = np.zeros((n, config.sequence_length), np.uint8)
        self.drawn = [0] * n
        self.created = int(time.time())

    async def whole(self) -> ImageList:
        with self._reader() as reader:
            while reader.open:
                for event in await reader.next():
                    self._take(event)
        data = [Image(b64_json=self._png(index)) for index in range(len(self.drawn))]
        return ImageList(created=self.created, data=data, size=self.size, usage=usage_of(sum(self.drawn), len(data)))

    async def frames(self) -> AsyncGenerator[bytes]:
        """Server-sent events: each image when some more of its rows are whole, and when all are."""
        height = self.shape[0]
        row = self.values.shape[1] // height
        every = height / (height if self.asked.partial_images is None else self.asked.partial_images or 1)
        sent = [0] * len(self.drawn)
        with self._reader() as reader:
            while reader.open:
                frames = []
                for event in (events := await reader.next()):
                    self._take(event)
                    index, rows = event.choice, self.drawn[event.choice] // row
                    if event.finish:
                        frames.append(frame(self._completed(index)))
                    elif self.asked.partial_images != 0 and rows >= (sent[index] + 1) * every:
                        frames.append(frame(self._partial(index, sent[index], rows)))
                        sent[index] += 1
                if frames or not events:
                    yield b"".join(frames) or PING
        yield DONE

    @contextmanager
    def _reader(self) -> Iterator[Reader]:
        asked = Request(
            prompt=np.array([START], np.int32),
            max_tokens=self.values.shape[1],
            sampling=sampling_given(self.asked),
            n=len(self.drawn),
            tenant=tenant(self.request),
            client=client(self.request),
            class_label=self.asked.class_label,
        )
        reader = start(self.request, self.engine, [asked])
        try:
            yield reader
        finally:
            reader.leave()

    def _take(self, event: Event) -> None:
        check(event)
        past, index = self.drawn[event.choice], event.choice
        self.values[index, past : past + len(event.tokens)] = event.tokens
        self.drawn[index] += len(event.tokens)

    def _partial(self, index: int, number: int, rows: int) -> PartialImage:
        return PartialImage(
            b64_json=self._png(index),
            created_at=self.created,
            size=self.size,
            partial_image_index=number,
            image_index=index,
            rows=rows,
        )

    def _completed(self, index: int) -> CompletedImage:
        usage = usage_of(self.drawn[index], 1)
        return CompletedImage(
            b64_json=self._png(index), created_at=self.created, size=self.size, image_index=index, usage=usage
        )

    def _png(self, index: int) -> str:
        return base64.b64encode(png(self.values[index].reshape(self.shape))).decode()


def usage_of(values: int, images: int) -> ImageUsage:
    details = ImageInputTokens(image_tokens=images)
    return ImageUsage(
        input_tokens=images, input_tokens_details=details, output_tokens=values, total_tokens=images + values
    )


def frame(event: PartialImage | CompletedImage) -> bytes:
    data = event.model_dump_json()
    return f"event: {event.type}\ndata: {data}\n\n".encode()


routes = [Route("/v1/images/generations", create, methods=["POST"])]
