"""What a run on images holds out."""

import math
from pathlib import Path

import numpy as np
import pytest

from tarnn.tasks.images import Images
from tarnn.tasks.images.task import VALIDATION_VALUES, ImageSettings, split


def made(n, *shape):
    return Images(np.arange(n * math.prod(shape)).reshape(n, *shape).astype(np.uint8), None, "made")


@pytest.mark.parametrize(
    ("n", "fraction", "held_out"), [(50, None, 5), (200, None, 8), (200, 0.5, 100), (200, 0, 0), (3, None, 0)]
)
def test_a_tenth_is_held_out_but_no_more_than_can_be_validated_in_a_moment(n, fraction, held_out):
    images = made(n, 181, 181, 1)
    assert VALIDATION_VALUES // (181 * 181) == 8
    rest, other = split(images, ImageSettings(("gone",), Path("out"), val_fraction=fraction))
    assert (len(rest), 0 if other is None else len(other)) == (n - held_out, held_out)
