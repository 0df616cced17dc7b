"""Images from every kind of file, the same whichever way they are stored; and the sentence for each that is damaged."""

import gzip
import struct
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tarnn.data.examples import Batches, EpochSampler, ImageRows, collate
from tarnn.errors import UserError
from tarnn.tasks.images import Images, read_images, readers

DATA = Path(__file__).parents[4] / "shared" / "data"
RNG = np.random.default_rng(0)


def draw(n=5, height=4, width=3, channels=1):
    return RNG.integers(0, 256, (n, height, width, channels), dtype=np.uint8)


def idx(array):
    return struct.pack(f">BBBB{array.ndim}I", 0, 0, 8, array.ndim, *array.shape) + array.tobytes()


def same(images, pixels, labels=None):
    np.testing.assert_array_equal(images.pixels, pixels)
    assert images.pixels.dtype == np.uint8
    assert images.pixels.flags.writeable  # or torch would warn of it
    if labels is None:
        assert images.labels is None
    else:
        np.testing.assert_array_equal(images.labels, labels)
        assert images.labels.dtype == np.int64
    return True


@pytest.mark.parametrize("zipped", [False, True])
@pytest.mark.parametrize("joint", ["-", "."])
def test_idx(tmp_path, zipped, joint):
    pixels, labels = draw(7), np.arange(7, dtype=np.uint8) % 3
    for part, count in (("train", 5), ("t10k", 2)):
        for kind, array in (("images", pixels[:count, ..., 0]), ("labels", labels[:count])):
            data, name = idx(array), f"{part}-{kind}{joint}idx{array.ndim}-ubyte"
            (tmp_path / (name + ".gz" * zipped)).write_bytes(gzip.compress(data) if zipped else data)
    (tmp_path / "README.md").write_text("not an image")
    assert same(read_images(str(tmp_path)), pixels[:5], labels[:5])
    assert same(read_images(f"{tmp_path}:test"), pixels[:2], labels[:2])
    assert same(read_images(str(tmp_path), parts=("valid", "test")), pixels[:2], labels[:2])
    (file,) = tmp_path.glob("t10k-images*")
    assert same(read_images(str(file)), pixels[:2], labels[:2])
    next(tmp_path.glob("t10k-labels*")).unlink()
    assert same(read_images(str(file)), pixels[:2])


def test_npz_and_its_parts(tmp_path):
    colour, grey, labels = draw(6, channels=3), draw(4), np.arange(6)
    np.savez(tmp_path / "train.npz", images=colour, labels=labels)
    np.savez_compressed(tmp_path / "valid.npz", x=colour[:2], y=labels[:2])
    images = read_images(str(tmp_path))
    assert same(images, colour, labels)
    assert (images.source, images.shape, images.num_classes) == (f"{tmp_path}:train", (4, 3, 3), 6)
    assert same(read_images(f"{tmp_path}:valid"), colour[:2], labels[:2])
    np.savez(tmp_path / "grey.npz", images=grey[..., 0])
    assert same(read_images(str(tmp_path / "grey.npz")), grey)


def test_rows_of_datasets(monkeypatch):
    pixels = draw(3, channels=3)
    rows = [("rows, row 0", {"img": Image.fromarray(x), "label": i}) for i, x in enumerate(pixels)]
    monkeypatch.setattr(readers, "dataset_rows", lambda source: iter(rows))
    assert same(read_images("datasets:rows::test"), pixels, [0, 1, 2])
    rows[1][1].pop("label")
    assert same(read_images("datasets:rows"), pixels)
    rows[1][1]["img"] = Image.fromarray(draw(1, 9, 9, 3)[0])
    with pytest.raises(UserError, match="row 0 has images of 9 × 9"):
        read_images("datasets:rows")
    rows[1][1].pop("img")
    with pytest.raises(UserError, match="row 0 has no picture in its fields nothing"):
        read_images("datasets:rows")
    rows.clear()
    with pytest.raises(UserError, match="datasets:rows is empty"):
        read_images("datasets:rows")


def test_pictures(tmp_path):
    """Grey, colour, palette; classes by folder, parts by the outermost one; JPEG only nearly."""
    colour = draw(4, 8, 6, 3)
    for i, name in enumerate(["cat", "train", "cat", "train"]):  # a class that is called like a part
        (tmp_path / "all" / name).mkdir(parents=True, exist_ok=True)
        Image.fromarray(colour[i]).save(tmp_path / "all" / name / f"{i}.png")
    images = read_images(str(tmp_path / "all"))
    assert same(images, colour[[0, 2, 1, 3]], [0, 0, 1, 1])
    for part in ("train", "test"):
        for name in ("a", "b"):
            (tmp_path / "parts" / part / name).mkdir(parents=True)
            Image.fromarray(colour[0]).save(tmp_path / "parts" / part / name / "x.PNG")
    assert same(read_images(f"{tmp_path / 'parts'}:test"), colour[[0, 0]], [0, 1])
    flat = tmp_path / "flat"
    flat.mkdir()
    shades = np.full((8, 6), 7, np.uint8)
    Image.fromarray(shades).save(flat / "grey.png")
    assert same(read_images(str(flat)), shades[None, ..., None])
    Image.fromarray(colour[0]).quantize(40).save(tmp_path / "palette.png")
    assert read_images(str(tmp_path / "palette.png")).pixels.shape == (1, 8, 6, 3)
    Image.fromarray(shades).save(tmp_path / "photo.jpeg", quality=95)
    assert abs(read_images(str(tmp_path / "photo.jpeg")).pixels.astype(int) - 7).max() <= 2
    opaque = np.concatenate([colour[0], np.full((8, 6, 1), 255, np.uint8)], axis=-1)
    Image.fromarray(opaque).save(tmp_path / "opaque.png")
    assert same(read_images(str(tmp_path / "opaque.png")), colour[:1])


@pytest.mark.skipif(not DATA.is_dir(), reason="the shared data sets are not here")
def test_real_mnist_and_cifar():
    mnist, cifar = read_images(f"{DATA}/mnist:test"), read_images(f"{DATA}/cifar10:valid")
    assert (mnist.pixels.shape, mnist.labels[:4].tolist()) == ((10000, 28, 28, 1), [7, 2, 1, 0])
    assert (cifar.pixels.shape, cifar.num_classes) == ((1000, 32, 32, 3), 10)
    assert 30 < mnist.pixels.mean() < 36
    assert 115 < cifar.pixels.mean() < 127


def damaged(folder: Path):
    """(file, what the sentence must say) for everything that can be wrong with one."""
    good, labels = idx(draw(3)[..., 0]), idx(np.zeros(3, np.uint8))
    zipped = gzip.compress(good)
    np.savez(folder / "good.npz", images=(stored := draw(3)))
    npz = (folder / "good.npz").read_bytes()
    png = folder / "good.png"
    Image.fromarray(draw(1, 32, 32, 3)[0]).save(png)
    picture = png.read_bytes()

    def saved(**arrays):
        np.savez(folder / "tmp.npz", **arrays)
        return (folder / "tmp.npz").read_bytes()

    return [
        ("a-images-idx3-ubyte", b"", "begins with nothing"),
        (
            "a-images-idx3-ubyte",
            good[:-1],
            r"cannot reshape array of size 35 into shape \(3,4,3\)\): it is damaged or no idx",
        ),
        ("a-images-idx3-ubyte", good[:10], "ubyte can't be read .*: it is damaged or no idx file"),
        ("a-images-idx3-ubyte", b"\x89PNG" + good, "begins with 89 50 4e 47, expected 00 00 08"),
        ("a-images-idx3-ubyte", labels, r"shape \(3,\) and type uint8; expected uint8 \(n, height"),
        ("a-images-idx3-ubyte", idx(np.zeros((0, 4, 3), np.uint8)), r"shape \(0, 4, 3, 1\).*at least one"),
        ("a-images-idx3-ubyte.gz", zipped[:-12], "can't be read .*damaged or no idx file"),
        ("a-images-idx3-ubyte.gz", zipped[:20] + b"\xff\xff" + zipped[22:], "damaged"),
        ("a.npz", npz[: len(npz) // 2], "BadZipFile.*damaged or no npz file"),
        ("a.npz", npz.replace(stored.tobytes(), bytes(stored.size)), "Bad CRC-32.*damaged"),
        ("a.npz", saved(pictures=draw(2)), "it holds pictures; expected `images`"),
        ("a.npz", saved(images=draw(2).astype(np.float32)), "type float32; expected uint8"),
        ("a.npz", saved(images=draw(2)[0, 0]), r"shape \(3, 1\) and type uint8; expected uint8 \(n, height, width"),
        ("a.npz", saved(images=draw(2, channels=4)), r"shape \(2, 4, 3, 4\).*of 1 channel or 3"),
        ("a.npz", saved(images=draw(2), labels=np.zeros(3, int)), r"labels of shape \(3,\).* for 2 images"),
        ("a.npz", saved(images=draw(2), labels=np.array([0, -1])), "has a label -1; expected 0 to 65,535"),
        ("a.npz", saved(images=draw(2), labels=np.array([0, 10**12])), "has a label 1000000000000; expected .* 65,535"),
        ("a.npz", saved(images=draw(2), labels=np.array([2**63, 0], np.uint64)), "has a label 9223372036854775808;"),
        ("a.npz", saved(images=draw(2), labels=np.zeros(2)), "type float64 for 2 images"),
        ("a.npz", saved(images=np.array([None])), "can't be read.*damaged"),
        ("a.npz", saved(data=np.zeros((2, 3072), np.uint8)), "it holds data; expected `images`"),
        ("data_batch_1", b"", "is no file of images by its name; .*datasets:NAME"),
        ("a.png", picture[: len(picture) // 2], "damaged or no picture"),
        ("a.png", b"GIF", "damaged or no picture"),
        ("a.jpg", b"", "damaged or no picture"),
        ("a.txt", b"", "is no file of images by its name; expected a folder or file"),
    ]


def test_damaged_files_and_wrong_shapes(tmp_path):
    for name, data, message in damaged(tmp_path):
        path = tmp_path / name
        path.write_bytes(data)
        with pytest.raises(UserError, match=message) as error:  # noqa: PT012
            read_images(str(path))
            pytest.fail(f"{name} was read: {message}")
        assert str(path) in str(error.value), message
        assert "\n" not in str(error.value)


def test_folders_that_do_not_fit_together(tmp_path):
    def folder(name, **files):
        (tmp_path / name).mkdir()
        for file, arrays in files.items():
            np.savez(tmp_path / name / f"{file}.npz", **arrays)
        return str(tmp_path / name)

    two = folder("sizes", a={"images": draw(2)}, b={"images": draw(2, 5, 5)})
    with pytest.raises(UserError, match=r"b\.npz has images of 5 × 5 pixels in grey, .*a\.npz of 4 × 3"):
        read_images(two)
    two = folder("labels", a={"images": draw(2), "labels": np.arange(2)}, b={"images": draw(2)})
    with pytest.raises(UserError, match=r"a\.npz and .*b\.npz one has labels; expected all or none"):
        read_images(two)
    only = folder("parts", test={"images": draw(2)})
    with pytest.raises(UserError, match=r"has no part called train; it has test. Name .*parts:test"):
        read_images(only)
    with pytest.raises(UserError, match="no part called valid"):
        read_images(only + ":valid")
    with pytest.raises(UserError, match="has no images in it; expected a folder or file"):
        read_images(folder("empty"))
    runs = folder("beside a run", train={"images": draw(2)})
    (Path(runs) / "run").mkdir()
    for name in ("run/sample.png", "images.png"):
        Image.fromarray(draw(1, channels=3)[0]).save(Path(runs) / name)
    assert len(read_images(runs)) == 2
    with pytest.raises(UserError, match="nowhere: no such file or folder"):
        read_images(str(tmp_path / "nowhere"))
    with pytest.raises(UserError, match=r"digits: no such file .* has been removed. Write scikit-learn's"):
        read_images("digits:test")
    with pytest.raises(UserError, match="names a part of a file"):
        read_images(str(Path(two) / "a.npz:test"))
    Image.fromarray(np.zeros((4, 4, 4), np.uint8)).save(tmp_path / "clear.png")
    with pytest.raises(UserError, match=r"clear\.png is a picture .* can't hold \(RGBA\); convert"):
        read_images(str(tmp_path / "clear.png"))


def test_holding_out_is_at_random_and_repeatable():
    images = Images(draw(20), np.arange(20) // 10, "made")
    rest, held_out = images.split(6)
    assert (len(rest), len(held_out)) == (14, 6)
    assert set(held_out.labels) == {0, 1}
    rows = {x.tobytes() for x in rest.pixels} | {x.tobytes() for x in held_out.pixels}
    assert rows == {x.tobytes() for x in images.pixels}
    assert images.split(6)[1].digest == held_out.digest
    assert images.split(6, seed=1)[1].digest != held_out.digest
    assert Images(images.pixels, None, "made").digest != images.digest


def test_batches():
    images = Images(draw(7), np.arange(7), "made")
    batches = Batches(ImageRows(images, labelled=True), 3)
    assert [len(batch["class_labels"]) for batch in batches] == [3, 3, 1]
    np.testing.assert_array_equal(np.concatenate([b["pixel_values"].numpy() for b in batches]), images.pixels)
    rows = ImageRows(images, labelled=False)
    assert list(rows[2]) == ["pixel_values"]
    assert collate([rows[2], rows[4]])["pixel_values"].shape == (2, 4, 3, 1)
    order = list(EpochSampler(7, 17, seed=3))
    assert sorted(order[:7]) == sorted(order[7:14]) == list(range(7))
    assert order[:7] != order[7:14]
    assert list(EpochSampler(7, 9, seed=3)) == order[:9]
    assert list(EpochSampler(7, 9, seed=4)) != order[:9]
