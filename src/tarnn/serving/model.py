"""A model as it is served: its fused step, its tokenizer, the key of its states, and their sizes."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from tarnn.decoding.first_state import beginning_from
from tarnn.decoding.fused import FusedStep
from tarnn.decoding.lm import tokenizer_in
from tarnn.decoding.opened import Opened
from tarnn.decoding.opening import open_step
from tarnn.decoding.refusal import Refusal
from tarnn.decoding.streaming import decoder
from tarnn.errors import UserError
from tarnn.ops.backends import cpu_kernels
from tarnn.program.packing import VERSION
from tarnn.program.runtime import Runtime

PROGRAM = f"program-{VERSION}"


class StateKey(NamedTuple):
    """The model and machine of a state. Two states with the same key and the same tokens are the same to the last bit.

    fingerprint: of the weights and the config. weights: the format in which the step keeps them. isa: the instructions of the
    compiled kernels. products: what computes them: "fused", a step over a model's modules, or a program and its version.
    """

    fingerprint: str
    weights: str
    isa: str
    products: str = "fused"


@dataclass(frozen=True, eq=False)
class ServedModel:
    """name: as clients call it. model: its config, end tokens and new states; step: what runs."""

    name: str
    model: Opened
    step: FusedStep | Runtime
    key: StateKey
    tokenizer: Any = None
    folder: Path | None = None

    @property
    def chats(self) -> bool:
        """Return True if its tokenizer has a template for conversations."""
        return bool(getattr(self.tokenizer, "chat_template", None))

    def decoder(self) -> Any:
        """Return the function from token ids to their text that `TextStream` takes."""
        return decoder(self.tokenizer)


def open_served(
    folder: str | Path, *, name: str | None = None, weights: str | None = None, adapter: Path | None = None
) -> ServedModel:
    """Open the model in a folder for serving. weights, adapter: as `tarnn.load` takes them.

    Raises UserError for a folder that holds no model of text, or one that has no fused step, with the reason.
    """
    folder = Path(folder)
    try:
        model = open_step(folder, weights, adapter=adapter)
    except Refusal as reason:
        raise UserError(f"{folder} can't be served: {reason.__cause__}. `tarnn generate` runs it.") from reason
    if model.weights is None or not isinstance(model.step, FusedStep | Runtime):
        raise UserError(f"{folder} can't be served: it has a {'; '.join(model.about)}. `tarnn generate` runs it.")
    products = PROGRAM if isinstance(model.step, Runtime) else "fused"
    key = StateKey(model.fingerprint, model.step.weights, cpu_kernels()["path"], products)
    return ServedModel(
        name or folder.name, model, model.step, key, tokenizer_in(folder, model.config.vocab_size), folder
    )


def served_from(served: ServedModel, path: Path, name: str) -> ServedModel:
    """Return the same model under another name, whose texts begin from the state in a file. The weights are shared.

    Raises UserError for a file that holds no first state of this model.
    """
    model = beginning_from(served.model, path)
    return replace(served, name=name, model=model, key=served.key._replace(fingerprint=model.fingerprint))


class Sizes(NamedTuple):
    """Bytes of one sequence of t tokens.

    Its state takes state_bytes + t · state_bytes_per_token: only softmax layers of a hybrid grow. The keys and values of the same
    model with softmax in every layer of attention, in the weights' own type, would take t · cache_bytes_per_token.
    """

    state_bytes: int
    state_bytes_per_token: int
    cache_bytes_per_token: int


def sizes_of(served: ServedModel) -> Sizes:
    """Compute the sizes of a model's states, and of the cache of a softmax model of its shape."""
    empty, one = (sum(x.nbytes for x in served.model.new_state(1, capacity).layers) for capacity in (0, 1))
    return Sizes(empty, one - empty, served.model.key_bytes)
