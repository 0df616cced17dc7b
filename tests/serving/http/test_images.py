"""/v1/images/generations: what a model draws over HTTP is what it draws alone, and is seen row by row."""

import asyncio
import base64
import io
import json
from contextlib import nullcontext

import numpy as np
import openai
import pytest
from support.http_server import events_of, http_server

from tarnn.models.images import START
from tarnn.serving.http import images
from tarnn.serving.request import Event, Request, Sampling

PIL = pytest.importorskip("PIL.Image")
PATH = "/v1/images/generations"


@pytest.fixture(scope="module")
def server(served):
    models = {"classes": served("classes"), "colour": served("colour"), "text": served("linear")}
    with http_server(models) as server:
        yield server


def pixels(b64):
    image = PIL.open(io.BytesIO(base64.b64decode(b64)))
    return np.asarray(image).reshape(image.height, image.width, -1)


def drawn_alone(server, name, n=1, **fields):
    """By the engine, without HTTP. (n, height, width, channels)"""
    engine, config = server.engines[name], server.engines[name].model.model.config
    request = Request(prompt=np.array([START], np.int32), max_tokens=config.sequence_length, n=n, **fields)
    values = [[] for _ in range(n)]
    for event in engine.submit(request):
        values[event.choice] += event.tokens
    return np.array(values, np.uint8).reshape(n, config.image_height, config.image_width, config.num_channels)


@pytest.mark.parametrize(("name", "label"), [("classes", 2), ("colour", None)])
def test_images_are_those_that_the_engine_draws(server, name, label):
    extra = {"seed": 5, "temperature": 0.7, "top_k": 40} | ({} if label is None else {"class_label": label})
    with openai.OpenAI(api_key="-", base_url=server.url + "/v1") as client:
        answer = client.images.generate(model=name, prompt="", n=3, size="3x4", extra_body=extra)
    sampling = Sampling(temperature=0.7, top_k=40, seed=5)
    expected = drawn_alone(server, name, 3, sampling=sampling, class_label=label)
    np.testing.assert_array_equal([pixels(image.b64_json) for image in answer.data], expected)
    assert len(np.unique(expected.reshape(3, -1), axis=0)) == 3
    assert answer.usage.output_tokens == expected.size
    assert answer.size == "3x4"


@pytest.mark.parametrize(("partial", "rows"), [(None, {1, 2, 3, 4}), (2, {2, 3, 4}), (0, set())])
def test_rows_are_seen_as_they_are_drawn(server, partial, rows):
    """On a busy machine several rows may come at once: then fewer are shown, later."""
    asked = {"model": "classes", "class_label": 1, "seed": 7, "stream": True}
    asked |= {} if partial is None else {"partial_images": partial}
    *partials, last = [json.loads(data) for data in events_of(server.post(PATH, asked))]
    expected = drawn_alone(server, "classes", sampling=Sampling(seed=7), class_label=1)[0]
    assert last["type"] == "image_generation.completed"
    np.testing.assert_array_equal(pixels(last["b64_json"]), expected)
    assert {event["type"] for event in partials} <= {"image_generation.partial_image"}
    assert {event["rows"] for event in partials} <= rows
    for event in partials:
        np.testing.assert_array_equal(pixels(event["b64_json"])[: event["rows"]], expected[: event["rows"]])


class Script:
    """A reader that has these events, one after the other."""

    def __init__(self, events):
        self.events = list(events)

    @property
    def open(self):
        return bool(self.events)

    async def next(self):
        return [self.events.pop(0)]


@pytest.mark.parametrize(("partial", "rows"), [(None, [1, 2, 3]), (2, [2]), (0, [])])
def test_a_row_is_shown_as_soon_as_it_is_whole(server, monkeypatch, partial, rows):
    values = list(range(100, 112))  # of 4 rows, which come by twos
    events = [Event(0, tokens=tuple(values[i : i + 2]), finish="length" if i == 10 else "") for i in range(0, 12, 2)]
    monkeypatch.setattr(images.Drawing, "_reader", lambda self: nullcontext(Script(events)))
    asked = images.ImageRequest(model="classes", class_label=1, stream=True, partial_images=partial)
    drawing = images.Drawing(None, server.engines["classes"], asked, 1, "3x4")

    async def frames():
        return b"".join([frame async for frame in drawing.frames()])

    data = [line.removeprefix("data: ") for line in asyncio.run(frames()).decode().split("\n") if "b64_json" in line]
    *partials, last = [json.loads(x) for x in data]
    assert [x["rows"] for x in partials] == rows
    for event in partials:
        done = 3 * event["rows"]
        assert pixels(event["b64_json"]).flatten().tolist()[:done] == values[:done]
    assert pixels(last["b64_json"]).flatten().tolist() == values


def test_the_official_client_reads_the_stream(server):
    with openai.OpenAI(api_key="-", base_url=server.url + "/v1") as client:
        events = list(client.images.generate(model="colour", prompt="", stream=True, partial_images=1))
    assert events[-1].type == "image_generation.completed"
    assert events[-1].usage.total_tokens == 37


BAD = {
    "words": ({"model": "colour", "prompt": "a cat"}, "prompt", "without words"),
    "a model of text": ({"model": "text"}, "model", "writes text and draws no images"),
    "another size": ({"model": "colour", "size": "1024x1024"}, "size", "draws images of 3x4"),
    "no class": ({"model": "classes"}, "class_label", "from 0 to 2; got none"),
    "no such class": ({"model": "classes", "class_label": 3}, "class_label", "from 0 to 2; got 3"),
    "a class that means nothing": ({"model": "colour", "class_label": 0}, "class_label", "knows no classes"),
    "a link": ({"model": "colour", "response_format": "url"}, "response_format", "b64_json"),
    "too many": ({"model": "colour", "n": 10**6}, "n", "at most"),
    "another format": ({"model": "colour", "output_format": "webp"}, "output_format", "PNG"),
    "unknown": ({"model": "colour", "mask": "x"}, "mask", "Unknown parameter"),
}


@pytest.mark.parametrize("why", BAD)
def test_what_cannot_be_drawn_is_told(server, why):
    body, param, sentence = BAD[why]
    refused = server.post(PATH, body)
    assert refused.status_code == 400
    error = refused.json()["error"]
    assert (error["param"], sentence in error["message"]) == (param, True)
