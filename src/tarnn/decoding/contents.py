"""The weights of a model that was opened: where they are, how many, and a hash of them."""

import hashlib
import json
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from tarnn.data.tensor_file import add_tensors, fingerprint_of
from tarnn.decoding.state_file import facts_of, fingerprint
from tarnn.models.backbone import TextModel

# keys of a config that say nothing of the function
NOT_THE_FUNCTION = {"architectures", "dtype", "torch_dtype", "transformers_version", "use_cache", "_name_or_path"}


class Contents(Protocol):
    """The weights as they were opened."""

    @property
    def device(self) -> torch.device: ...
    @property
    def num_parameters(self) -> int: ...
    @property
    def num_bytes(self) -> int:
        """The bytes of weights and tables."""

    def fingerprint(self) -> str:
        """Compute a hash of the weights and of what the config says about the function."""


@dataclass(frozen=True, eq=False)
class OfModule:
    """The weights of a model in PyTorch."""

    model: nn.Module

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device

    @property
    def num_parameters(self) -> int:
        return sum(x.numel() for x in self.model.parameters())

    @property
    def num_bytes(self) -> int:
        return sum(x.nbytes for x in (*self.model.parameters(), *self.model.buffers()))

    def fingerprint(self) -> str:
        if isinstance(self.model, TextModel):
            return fingerprint(self.model)
        config: Any = self.model.config
        return fingerprint_of(self.model.state_dict(), of_the_function(config.to_diff_dict()))


@dataclass(frozen=True, eq=False)
class OfFolder:
    """Tensors of a folder by name, mapped, and the fields of its config.json."""

    tensors: Mapping[str, Tensor]
    fields: Mapping[str, Any]

    @property
    def device(self) -> torch.device:
        return torch.device("cpu")

    @property
    def num_parameters(self) -> int:
        return sum(x.numel() for x in self.tensors.values())

    @property
    def num_bytes(self) -> int:
        return sum(x.nbytes for x in self.tensors.values())

    def fingerprint(self) -> str:
        return hash_of(self.tensors, of_the_function(self.fields))


@dataclass(frozen=True, eq=False)
class OfOwnFolder(OfFolder):
    """Tensors of one of tarnn's own models, with the fingerprint that it has in PyTorch. model: without numbers."""

    model: TextModel

    @property
    def num_parameters(self) -> int:
        return sum(x.numel() for x in self.model.parameters())

    def fingerprint(self) -> str:
        tied = {name: self.tensors[source] for name, source in self.model.tied.items()}
        return fingerprint_of({**self.tensors, **tied}, facts_of(self.model.config))


def of_the_function(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a config that say what the model computes."""
    return {name: x for name, x in fields.items() if name not in NOT_THE_FUNCTION}


def hash_of(tensors: Mapping[str, Tensor], config: Mapping[str, Any]) -> str:
    """SHA-256 over a config and the SHA-256 of each tensor, of which as many are computed at once as there are threads."""

    def of_one(name: str) -> bytes:
        return bytes(add_tensors(hashlib.sha256(), {name: tensors[name]}).digest())

    digest = hashlib.sha256(json.dumps(config, sort_keys=True, default=str).encode())
    with ThreadPoolExecutor(torch.get_num_threads()) as pool:
        for part in pool.map(of_one, sorted(tensors)):
            digest.update(part)
    return digest.hexdigest()
