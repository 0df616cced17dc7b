"""Images by the engine: the values are drawn as the pixel loop's steps give them, whatever is drawn beside them."""

import numpy as np
import pytest
import torch
from support.served import answer

from tarnn.decoding.draws import RowSampling, draw_rows
from tarnn.models.images import START
from tarnn.serving.engine import Engine
from tarnn.serving.request import Request, Sampling


@torch.no_grad()
def image_alone(served, request):
    """All values that the request asks for, a step at a time."""
    labels = None if request.class_label is None else torch.tensor([request.class_label])
    state = served.model.new_state(1, class_labels=labels)
    row = RowSampling(1, 256)
    row.put(0, request.sampling, seed=request.sampling.seed)
    for token in request.prompt.tolist():
        parameters, state = served.step(torch.tensor([token]), state)
    values = []
    for _ in range(served.model.config.sequence_length + 1 - len(request.prompt)):
        if values:
            parameters, state = served.step(torch.tensor(values[-1:]), state)
        values += draw_rows(served.model.likelihood.log_probs(parameters), row).tokens.tolist()
        row.wrote(torch.tensor(values[-1:]))
    return values


@pytest.mark.parametrize("kind", ["image", "classes", "colour"])
def test_images_side_by_side(engine, served, kind):
    one = engine(kind, max_rows=3)
    requests = [
        Request(
            np.array([START, *range(7, 7 + 3 * (i % 3))], np.int32),
            max_tokens=1000,
            sampling=Sampling(seed=i, top_k=50 * (i % 2)),
            class_label=i % 3 if kind == "classes" else None,
        )
        for i in range(7)
    ]
    streams = [one.submit(request) for request in requests]
    for request, stream in zip(requests, streams):
        [(text, values, finish, _)] = answer(stream)
        assert (values, finish, text) == (image_alone(served(kind), request), "length", "")
        assert len(values) + len(request.prompt) == served(kind).model.config.sequence_length + 1


def test_the_class_counts(engine):
    one = engine("classes")
    images = [
        answer(one.submit(Request(np.array([START]), 100, Sampling(seed=1), class_label=label)))[0][1]
        for label in range(3)
    ]
    assert len(set(map(tuple, images))) == 3


def test_an_image_is_not_a_text(served):
    start = np.array([START])
    with pytest.raises(ValueError, match="class_label must be from 0 to 2; got None"):
        Engine(served("classes")).submit(Request(start))
    with pytest.raises(ValueError, match="knows no classes"):
        Engine(served("image")).submit(Request(start, class_label=0))
    with pytest.raises(ValueError, match="stop strings end texts"):
        Engine(served("image")).submit(Request(start, stop=("x",)))
