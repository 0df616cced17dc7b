"""A model as it is served: its fused step, its tokenizer, and the key that its states go by."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from tarnn.decoding.fused import FusedStep
from tarnn.decoding.plan import Refusal
from tarnn.decoding.state_file import fingerprint
from tarnn.decoding.streaming import decoder
from tarnn.errors import UserError
from tarnn.models.images import ImageModel
from tarnn.ops.backends import cpu_kernels
from tarnn.tasks.checkpoint import GENERATED, open_model, open_tokenizer


class StateKey(NamedTuple):
    """What a state belongs to. Two states with the same key and the same tokens are the same to the last bit.

    fingerprint: of the weights and the config. weights: the format in which the step keeps them. isa: the instructions of the
    compiled kernels. products: who multiplies; the fused step does that itself.
    """

    fingerprint: str
    weights: str
    isa: str
    products: str = "fused"


@dataclass(frozen=True, eq=False)
class ServedModel:
    """name: as clients call it. model: its config, end tokens and new states; step: what runs."""

    name: str
    model: Any
    step: FusedStep
    key: StateKey
    tokenizer: Any
    folder: Path | None = None

    @property
    def chats(self) -> bool:
        """Whether its tokenizer has a template for conversations."""
        return bool(getattr(self.tokenizer, "chat_template", None))

    def decoder(self) -> Any:
        """From token ids to their text, as `TextStream` takes it."""
        return decoder(self.tokenizer)


def open_served(folder: str | Path, *, name: str | None = None, weights: str = "float32") -> ServedModel:
    """Open the checkpoint in a folder for serving. weights: as `FusedStep` keeps them.

    Raises UserError for a folder that holds no model of text, or one that has no fused step, with the reason.
    """
    folder = Path(folder)
    model = open_model(folder, tasks=GENERATED)
    if isinstance(model, ImageModel):
        raise UserError(
            f"{folder} holds a model of images; `tarnn serve` serves texts. `tarnn generate {folder}` draws."
        )
    try:
        step = FusedStep(model, weights)
    except Refusal as reason:
        raise UserError(f"{folder} can't be served: {reason.__cause__}. `tarnn generate` runs it.") from reason
    key = StateKey(fingerprint(model), weights, cpu_kernels()["path"])
    return ServedModel(name or folder.name, model, step, key, open_tokenizer(folder), folder)
