"""Images side by side: each where it belongs, and readable again."""

import numpy as np
import pytest

from tarnn.errors import UserError
from tarnn.tasks.images import read_images
from tarnn.tasks.images.drawing import BACKGROUND, GAP, LABEL, image_grid, write_png


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize(("columns", "least_side", "scale"), [(None, 0, 1), (4, 9, 3), (1, 4, 1)])
def test_every_image_has_its_place(channels, columns, least_side, scale, tmp_path):
    images = np.random.default_rng(0).integers(0, 256, (7, 4, 3, channels), dtype=np.uint8)
    grid = image_grid(images, columns, least_side=least_side)
    columns = columns or 3
    for i, image in enumerate(images):
        top, left = i // columns * (4 * scale + GAP), i % columns * (3 * scale + GAP)
        found = grid[top : top + 4 * scale, left : left + 3 * scale]
        np.testing.assert_array_equal(found[::scale, ::scale], image)
        np.testing.assert_array_equal(found, image.repeat(scale, 0).repeat(scale, 1))
    assert grid.shape == (-(-7 // columns) * (4 * scale + GAP) - GAP, columns * (3 * scale + GAP) - GAP, channels)
    assert (grid[4 * scale : 4 * scale + GAP] == BACKGROUND).all()
    write_png(tmp_path / "grid.png", grid)
    np.testing.assert_array_equal(read_images(str(tmp_path / "grid.png")).pixels[0], grid)


def test_a_place_where_nothing_can_be_written(tmp_path):
    with pytest.raises(UserError, match=r"can't be written to .*nowhere.*No such file"):
        write_png(tmp_path / "nowhere" / "grid.png", np.zeros((2, 2, 1), np.uint8))


@pytest.mark.parametrize("channels", [1, 3])
def test_labels_stand_above_their_images(channels):
    """Equal labels look alike, others don't, and the images are as without them."""
    images = np.random.default_rng(0).integers(0, 256, (4, 16, 16, channels), dtype=np.uint8)
    plain, labelled = image_grid(images, 2), image_grid(images, 2, labels=[3, 3, 4, 17])
    cells = [(row * (LABEL + 16 + GAP), column * (16 + GAP)) for row in range(2) for column in range(2)]
    strips = [labelled[top : top + LABEL, left : left + 16] for top, left in cells]
    for image, (top, left) in zip(images, cells):
        assert np.array_equal(labelled[top + LABEL : top + LABEL + 16, left : left + 16], image)
    assert np.array_equal(strips[0], strips[1])
    assert not np.array_equal(strips[0], strips[2])
    assert not np.array_equal(strips[2], strips[3])
    assert all(strip.max() > 200 for strip in strips)
    assert labelled.shape == (plain.shape[0] + 2 * LABEL, *plain.shape[1:])
