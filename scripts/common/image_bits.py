"""Bits per dimension of images by a trained model: in batches, and value after value as a loop that draws would have it."""

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from tarnn.data.examples import Batches, ImageRows
from tarnn.models.images import START, ImageModel, ImageState
from tarnn.tasks.images import Images
from tarnn.tasks.images.readers import check_fit

VALUES_AT_ONCE = 16_384  # in a batch: larger ones are no faster on a CPU, and take more memory


def rows_of(config: Any, images: Images) -> ImageRows:
    check_fit(images, (config.image_height, config.image_width, config.num_channels), config.num_classes)
    return ImageRows(images, labelled=config.num_classes > 0)


@torch.no_grad()
def bits_per_dim(model: Any, images: Images) -> Iterator[Tensor]:
    """(b,) float64, a batch at a time, by the `forward` of a `TarnnForImageGeneration`."""
    length = model.config.sequence_length
    for batch in Batches(rows_of(model.config, images), max(1, VALUES_AT_ONCE // length)):
        nats = model(**{name: x.to(model.device) for name, x in batch.items()}).nats
        yield nats.double().cpu() / (length * math.log(2))


@torch.no_grad()
def bits_per_dim_by_steps(
    model: ImageModel, images: Images, step: Callable[..., tuple[Tensor, ImageState]] | None = None
) -> Tensor:
    """The same, (n,) float64, through `step`, by default `model.step`: what a fused step draws has this likelihood."""
    rows = rows_of(model.config, images).__getitems__(range(len(images)))
    batch = {name: x.to(model.device) for name, x in rows.items()}
    values, labels = model.sequence(batch["pixel_values"]), batch.get("class_labels")
    state, step = model.new_state(len(values), class_labels=labels), step or model.step
    token, nats = torch.full_like(values[:, 0], START), torch.zeros(len(values), dtype=torch.float64)
    for i in range(values.shape[1]):
        parameters, state = step(token, state, inplace=True)
        token = values[:, i]
        nats -= model.likelihood.log_prob(parameters, token).double().cpu()
    return nats / (values.shape[1] * math.log(2))
