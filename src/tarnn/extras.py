"""The packages that tarnn's extras bring, and the one sentence for whoever lacks one of them."""

from collections.abc import Iterator
from contextlib import contextmanager

from tarnn.errors import UserError

# what Python imports → (what pip installs, the extra that brings it)
PACKAGES = {
    "transformers": ("transformers", "hf"),
    "tokenizers": ("tokenizers", "hf"),
    "huggingface_hub": ("huggingface_hub", "hf"),
    "accelerate": ("accelerate", "hf"),
    "datasets": ("datasets", "train"),
    "matplotlib": ("matplotlib", "train"),
    "psutil": ("psutil", "train"),
    "zstandard": ("zstandard", "train"),
    "PIL": ("pillow", "images"),
    "peft": ("peft", "lora"),
    "onnx": ("onnx", "onnx"),
    "onnxruntime": ("onnxruntime", "onnx"),
    "starlette": ("starlette", "serve"),
    "uvicorn": ("uvicorn", "serve"),
    "httptools": ("httptools", "serve"),
    "prometheus_client": ("prometheus-client", "serve"),
}


class MissingPackageError(UserError, ImportError):
    """A package that one of tarnn's extras brings is not installed."""


@contextmanager
def needed_for(purpose: str) -> Iterator[None]:
    """Name the line that installs a package whose import fails inside: raise MissingPackageError.

    `purpose` begins the sentence: "tarnn train", "picture.png". Decorates a function as well.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in PACKAGES:
            raise
        name, extra = PACKAGES[package]
        raise MissingPackageError(f"{purpose} needs {name}: pip install 'tarnn[{extra}]'.") from None
