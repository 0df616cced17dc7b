"""What we write as PNG, another program reads as it was."""

import io

import numpy as np
import pytest

from tarnn.serving.http.png import png

Image = pytest.importorskip("PIL.Image")


@pytest.mark.parametrize(("shape", "mode"), [((7, 5, 1), "L"), ((3, 11, 3), "RGB"), ((1, 1, 1), "L")])
def test_pillow_reads_the_same_pixels(shape, mode):
    pixels = np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8)
    image = Image.open(io.BytesIO(png(pixels)))
    image.load()  # which checks the sums of all chunks
    assert image.mode == mode
    np.testing.assert_array_equal(np.asarray(image).reshape(shape), pixels)
