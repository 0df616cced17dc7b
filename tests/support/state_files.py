"""State files taken apart and put together again."""

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
