"""Bits per dimension: in batches, value after value, and of images that don't fit."""

import numpy as np
import pytest
import torch

from tarnn.errors import UserError
from tarnn.models import TarnnForImageGeneration, TarnnImageConfig
from tarnn.tasks.images import Images
from tarnn.tasks.images.likelihood import bits_per_dim, bits_per_dim_by_steps

TINY = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "initializer_range": 0.3}


def build(**choices):
    torch.manual_seed(0)
    config = TarnnImageConfig(image_height=3, image_width=2, **{"num_channels": 3, "num_classes": 4, **TINY, **choices})
    return TarnnForImageGeneration(config).double().eval()


def draw(n=7):
    rng = np.random.default_rng(0)
    return Images(rng.integers(0, 256, (n, 3, 2, 3), dtype=np.uint8), np.arange(n) % 4, "made")


@pytest.mark.parametrize("attention", ["linear", "softmax"])
def test_in_batches_and_by_steps_as_whole(attention):
    model, images = build(attention=attention), draw()
    whole = model.bits_per_dim(torch.from_numpy(images.pixels), torch.from_numpy(images.labels))
    parts = list(bits_per_dim(model, images, batch_size=3))
    assert [len(part) for part in parts] == [3, 3, 1]
    torch.testing.assert_close(torch.cat(parts), whole)
    torch.testing.assert_close(bits_per_dim_by_steps(model, images), whole, rtol=1e-5, atol=1e-6)


def test_a_step_that_is_off_is_seen():
    model, images = build(), draw()

    def off(token, state, inplace):
        parameters, state = model.step(token, state, inplace=inplace)
        return parameters + 0.5, state

    exact, found = bits_per_dim_by_steps(model, images), bits_per_dim_by_steps(model, images, off)
    assert (found - exact).abs().min() > 1e-3


def test_images_that_do_not_fit():
    images = draw()
    with pytest.raises(UserError, match=r"made has images of 3 × 2 × 3 .* makes images of 3 × 2 × 1"):
        next(bits_per_dim(build(num_channels=1), images))
    with pytest.raises(UserError, match="made has a label 3, and the model knows 2 classes"):
        bits_per_dim_by_steps(build(num_classes=2), images)
    with pytest.raises(UserError, match="made has no labels, and the model is one of 4 classes"):
        next(bits_per_dim(build(), Images(images.pixels, None, "made")))
