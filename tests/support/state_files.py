"""State files taken apart and put together again, as older versions of the format had them."""

from safetensors import safe_open
from safetensors.torch import save_file

from tarnn.data.tensor_file import checksum


def contents(path):
    """Tensors and metadata."""
    with safe_open(path, "pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}, file.metadata()  # noqa: SIM118


def rewrite(path, tensors, metadata):
    """The same file with these contents and their checksum."""
    metadata.pop("checksum", None)
    save_file(tensors, path, metadata | {"checksum": checksum(tensors, metadata)})


def with_one_maximum(tensors):
    """Sums as files had them that knew one maximum per head only."""
    older = dict(tensors)
    for name in [name for name in tensors if name.endswith(".M")]:
        assert tensors[name].ndim == 3
        older[name] = most = tensors[name].amax(-1)
        keep = (tensors[name] - most[..., None]).exp()
        older[f"{name[:-1]}S"] = tensors[f"{name[:-1]}S"] * keep[..., None]
        older[f"{name[:-1]}z"] = tensors[f"{name[:-1]}z"] * keep
    return older
