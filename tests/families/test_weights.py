"""Tensors of a folder are mapped, not copied, each with the shape that is called for; every fault is one sentence."""

import json
import os
import pickle
import struct
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tarnn.errors import UserError
from tarnn.families.weights import Weights

TENSORS = {
    "model.embed_tokens.weight": torch.arange(15.0).view(5, 3),
    "model.layers.0.norm.weight": torch.ones(3, dtype=torch.bfloat16),
    "model.layers.1.norm.weight": torch.tensor([1.0, 2.0, 0.5], dtype=torch.float16),
    "model.layers.10.norm.weight": torch.full((3,), 7.0),
    "lm_head.weight": torch.arange(15.0).view(5, 3),
    "model.layers.0.rotary_emb.inv_freq": torch.ones(2),
    "steps": torch.tensor([3]),
}


def sharded(folder, tensors=TENSORS, files=2):
    """Write the tensors into several files and their index."""
    names = [f"model-{i + 1:05}-of-{files:05}.safetensors" for i in range(files)]
    places = {name: names[i % files] for i, name in enumerate(tensors)}
    for file in names:
        save_file({name: x for name, x in tensors.items() if places[name] == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    return folder


def whole(folder, tensors=TENSORS):
    save_file(tensors, folder / "model.safetensors")
    return folder


OPENED = {
    "one file": lambda folder: Weights.read(whole(folder)),
    "two files": lambda folder: Weights.read(sharded(folder)),
    "a live model": lambda folder: Weights.of(TENSORS),
}


@pytest.fixture(params=OPENED)
def weights(request, tmp_path):
    return OPENED[request.param](tmp_path)


def test_tensors_come_by_name_in_their_own_type(weights):
    assert sorted(weights) == sorted(TENSORS)
    for name, expected in TENSORS.items():
        assert name in weights
        x = weights[name]
        assert (x.dtype, x.device.type, x.requires_grad) == (expected.dtype, "cpu", False)
        assert torch.equal(x, expected)
        assert weights.shape(name) == tuple(expected.shape)
        assert weights.dtype(name) == expected.dtype
    weights.check_all_taken()


def test_a_part_of_the_names(weights):
    layer = weights.under("model.layers.1.")
    assert list(layer) == ["norm.weight"]
    assert "norm.weight" in layer
    assert "model.layers.1.norm.weight" not in layer
    assert torch.equal(layer.get("norm.weight", (3,)), TENSORS["model.layers.1.norm.weight"])
    assert torch.equal(weights.under("model.").under("layers.10.")["norm.weight"], torch.full((3,), 7.0))
    with pytest.raises(UserError, match=r"lacks the weights model\.layers\.1\.bias\. Its config"):
        layer["bias"]
    with pytest.raises(
        UserError, match=r"model\.layers\.1\.norm\.weight of shape \(3,\) where the config calls for \(4,\)"
    ):
        layer.get("norm.weight", (4,))


def test_what_nobody_took_is_refused(weights):
    weights["model.embed_tokens.weight"]
    weights.under("model.layers.0.")["norm.weight"]
    with pytest.raises(UserError, match=r"lm_head\.weight, model\.layers\.1\.norm\.weight, model\.layers\.10\.norm"):
        weights.check_all_taken()
    weights.skip("steps")
    with pytest.raises(UserError, match=r"does not call for: lm_head\.weight\. Its config"):
        weights.check_all_taken("model.layers.*")
    weights.check_all_taken("model.layers.*", "lm_*")


def test_what_was_asked_about_was_not_taken():
    weights = Weights.of({"a": torch.ones(1)})
    assert "a" in weights
    assert weights.shape("a") == (1,)
    assert weights.dtype("a") == torch.float32
    with pytest.raises(UserError, match="call for: a"):
        weights.check_all_taken()


def test_the_first_ten_are_listed():
    weights = Weights.of({f"mtp.{i:02}": torch.ones(1) for i in range(13)})
    with pytest.raises(UserError, match=r"mtp\.00, .*mtp\.09 and 3 more\. Its"):
        weights.check_all_taken()
    weights.check_all_taken("mtp.*")


def test_tied_weights(weights):
    head, embedding = "lm_head.weight", "model.embed_tokens.weight"
    assert torch.equal(weights.tied(head, embedding, (5, 3)), TENSORS[embedding])
    with pytest.raises(UserError) as error:
        weights.check_all_taken()
    assert head not in str(error.value)
    alone = Weights.of({embedding: TENSORS[embedding]})
    assert torch.equal(alone.tied(head, embedding, (5, 3)), TENSORS[embedding])
    other = Weights.of({embedding: torch.ones(5, 3), head: torch.zeros(5, 3)})
    with pytest.raises(UserError, match=r"other numbers in lm_head\.weight than in model\.embed_tokens\.weight"):
        other.tied(head, embedding, (5, 3))
    # of one tensor the numbers are the same, whatever they are, and nobody reads them
    one = torch.full((5, 3), torch.nan)
    assert Weights.of({embedding: one, head: one}).tied(head, embedding, (5, 3)).isnan().all()
    other = Weights.of({embedding: torch.ones(5, 3), head: torch.zeros(3, 3)})
    with pytest.raises(UserError, match=r"lm_head\.weight of shape"):
        other.tied(head, embedding, (5, 3))


def test_a_live_model_is_not_copied():
    model = torch.nn.Linear(3, 5)
    weights = Weights.of(model.state_dict())
    assert weights["weight"].data_ptr() == model.weight.data_ptr()
    assert not Weights.of(dict(model.named_parameters()))["weight"].requires_grad


class OtherTensor(torch.Tensor):
    pass


@pytest.mark.parametrize(
    ("tensor", "message"),
    [
        (torch.ones(3, device="meta"), "w is without numbers"),
        (torch.ones(3).to_sparse(), "w is a Tensor .torch.sparse_coo.; expected a plain tensor"),
        (torch.ones(3).as_subclass(OtherTensor), "w is a OtherTensor"),
        (torch.ones(3).to(torch.float8_e4m3fn), "has w as torch.float8_e4m3fn; expected float32, bfloat16 or float16"),
        (torch.ones(3) * 1j, "has w as torch.complex64"),
    ],
)
def test_tensors_of_a_live_model_that_are_refused(tensor, message):
    with pytest.raises(UserError, match=f"^the model.*{message}"):
        Weights.of({"w": tensor})


def anonymous_bytes():
    [line] = [x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith("RssAnon")]
    return int(line.split()[1]) * 1024


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads /proc")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_tensor_takes_no_memory_of_its_own(tmp_path, dtype):
    size = 64 * 2**20
    save_file({"w": torch.ones(size // dtype.itemsize, dtype=dtype)}, tmp_path / "model.safetensors")
    weights = Weights.read(tmp_path)
    before = anonymous_bytes()
    x = weights["w"]
    assert x.view(torch.uint8)[:: os.sysconf("SC_PAGE_SIZE")].long().sum() >= 0  # every page is looked at
    assert x.amax() == 1
    assert anonymous_bytes() - before < size // 8


def cut(folder):
    file = whole(folder) / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-4])


def cut_shard(folder):
    file = sharded(folder) / "model-00002-of-00002.safetensors"
    file.write_bytes(file.read_bytes()[:40])


def lacks_shard(folder):
    (sharded(folder) / "model-00001-of-00002.safetensors").unlink()


def lacks_tensor(folder):
    file = sharded(folder) / "model-00002-of-00002.safetensors"
    tensors = load_file(file)
    del tensors["model.layers.0.norm.weight"]
    save_file(tensors, file)


def twice(folder):
    file = sharded(folder) / "model-00002-of-00002.safetensors"
    save_file(load_file(file) | {"model.embed_tokens.weight": torch.ones(5, 3)}, file)


def index(value):
    def write(folder):
        sharded(folder)
        (folder / "model.safetensors.index.json").write_text(json.dumps(value))

    return write


def header(**facts):
    """Write a file by hand: one tensor w of 4 bytes, but for these facts."""

    def write(folder):
        data = json.dumps({"w": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]} | facts}).encode()
        (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(data)) + data + bytes(4))

    return write


DAMAGED = {
    "no weights": (lambda folder: None, "holds no weights"),
    "pickle": (lambda folder: (folder / "pytorch_model.bin").write_bytes(pickle.dumps({})), "a format that may hold code"),
    "a file cut short": (cut, "cut short or is no safetensors file"),
    "an empty file": (lambda folder: (folder / "model.safetensors").write_bytes(b""), "cut short or is no safetensors"),
    "another kind of file": (lambda folder: (folder / "model.safetensors").write_bytes(b"GGUF" * 99), "no safetensors file"),
    "a shard cut short": (cut_shard, "model-00002-of-00002.safetensors can't be read: it was cut short"),
    "a shard missing": (lacks_shard, "lacks model-00001-of-00002.safetensors, which its model.safetensors.index.json lists"),
    "a shard of another model": (lacks_tensor, "lacks .*, which model.safetensors.index.json lists in it"),
    "a tensor in two files": (twice, "both hold model.embed_tokens.weight"),
    "an index to outside": (index({"weight_map": {"a": "../model.safetensors"}}), "to a file beside it; got '../model"),
    "an index to the root": (index({"weight_map": {"a": "/etc/passwd"}}), "to a file beside it; got '/etc/passwd'"),
    "an index of numbers": (index({"weight_map": {"a": 3}}), "to a file beside it; got 3"),
    "an index of lists": (index({"weight_map": {"a": ["b"]}}), r"to a file beside it; got \['b'\]"),
    "an index of nothing": (index({"weight_map": {}}), "must hold weight_map"),
    "no index": (index([]), "must hold a JSON object"),
    "float8": (header(dtype="F8_E4M3", shape=[4]), "has w as F8_E4M3; expected float32, bfloat16 or float16. Take"),
    "an unknown type": (header(dtype="X9"), "can't be read"),
    "a shape beyond the file": (header(shape=[2**40]), "can't be read"),
    "a shape that overflows": (header(shape=[2**62, 2**62, 2]), "can't be read"),
    "offsets beyond the file": (header(data_offsets=[0, 2**50]), "can't be read"),
    "offsets backwards": (header(data_offsets=[4, 0]), "can't be read"),
    "a negative shape": (header(shape=[-1]), "can't be read"),
}  # fmt: skip


@pytest.mark.parametrize("kind", DAMAGED)
def test_a_damaged_folder_is_refused_in_a_sentence(tmp_path, kind):
    damage, message = DAMAGED[kind]
    damage(tmp_path)
    with pytest.raises(UserError, match=message) as error:
        Weights.read(tmp_path)
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 600


def test_links_to_files_elsewhere_are_followed(tmp_path):
    """The cache of the Hugging Face hub keeps files in one place and links to them."""
    (tmp_path / "blobs").mkdir()
    (tmp_path / "model").mkdir()
    whole(tmp_path / "blobs")
    (tmp_path / "model" / "model.safetensors").symlink_to(tmp_path / "blobs" / "model.safetensors")
    assert "steps" in Weights.read(tmp_path / "model")


def test_a_tensor_that_is_not_aligned_is_copied(tmp_path):
    facts = {"a": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]}}
    facts["b"] = {"dtype": "F32", "shape": [1], "data_offsets": [1, 5]}
    data = json.dumps(facts).encode()
    data = data.ljust(len(data) + -len(data) % 8)
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", len(data)) + data + bytes([9, 0, 0, 128, 63]))
    x = Weights.read(tmp_path)["b"]
    assert x.item() == 1
    assert x.data_ptr() % 4 == 0
