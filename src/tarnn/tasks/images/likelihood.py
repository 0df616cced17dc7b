"""What a model of images makes of given images: bits per dimension."""

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from tarnn.data.examples import Batches
from tarnn.errors import UserError
from tarnn.models.images import START, ImageModel, ImageState
from tarnn.tasks.images.batches import ImageRows
from tarnn.tasks.images.sources import Images

VALUES_AT_ONCE = 16_384  # in a batch: larger ones are no faster on a CPU, and take more memory


def check_fit(config: Any, images: Images) -> None:
    """UserError where the model of that config was made for images of another size, or for classes that these don't have."""
    shape = (config.image_height, config.image_width, config.num_channels)
    if images.shape != shape:
        raise UserError(
            f"{images.source} has images of {' × '.join(map(str, images.shape))} (height, width, channels), and the model "
            f"makes images of {' × '.join(map(str, shape))}. Give images of that size."
        )
    if config.num_classes and images.labels is None:
        raise UserError(f"{images.source} has no labels, and the model is one of {config.num_classes} classes.")
    if config.num_classes and images.num_classes > config.num_classes:
        raise UserError(
            f"{images.source} has a label {images.num_classes - 1}, and the model knows {config.num_classes} classes."
        )


@torch.no_grad()
def bits_per_dim(model: Any, images: Images, batch_size: int | None = None) -> Iterator[Tensor]:
    """Bits per dimension of all images, in order: (b,) float64, a batch at a time (by default of a size that suits).

    model: a `TarnnForImageGeneration`. Raises UserError for images that don't fit it.
    """
    check_fit(model.config, images)
    length = model.config.sequence_length
    rows = ImageRows(images, labelled=model.config.num_classes > 0)
    for batch in Batches(rows, batch_size or max(1, VALUES_AT_ONCE // length)):
        nats = model(**{name: x.to(model.device) for name, x in batch.items()}).nats
        yield nats.double().cpu() / (length * math.log(2))


@torch.no_grad()
def bits_per_dim_by_steps(
    model: ImageModel, images: Images, step: Callable[..., tuple[Tensor, ImageState]] | None = None
) -> Tensor:
    """The same, (n,) float64, as the pixel loop has it: value after value through `step`, by default `model.step`.

    For a fused step, or one with weights in fewer bits: what it draws has this likelihood.
    """
    check_fit(model.config, images)
    rows = ImageRows(images, labelled=model.config.num_classes > 0).__getitems__(range(len(images)))
    batch = {name: x.to(model.device) for name, x in rows.items()}
    values, labels = model.sequence(batch["pixel_values"]), batch.get("class_labels")
    state, step = model.new_state(len(values), class_labels=labels), step or model.step
    token, nats = torch.full_like(values[:, 0], START), torch.zeros(len(values), dtype=torch.float64)
    for i in range(values.shape[1]):
        parameters, state = step(token, state, inplace=True)
        token = values[:, i]
        nats -= model.likelihood.log_prob(parameters, token).double().cpu()
    return nats / (values.shape[1] * math.log(2))
