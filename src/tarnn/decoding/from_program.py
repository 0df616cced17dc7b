"""Open a folder by the program that its family writes: no module of a model is built, and none of transformers is loaded."""

from functools import partial
from pathlib import Path
from typing import Any

import torch

from tarnn.decoding.contents import OfFolder, OfOwnFolder
from tarnn.decoding.memory import check_packing
from tarnn.decoding.opened import Limits, Opened
from tarnn.decoding.refusal import Refusal
from tarnn.families.adapter import quick_fingerprint, with_adapter
from tarnn.families.by_name import draft_program, family_of
from tarnn.families.config import FILE as CONFIG, Config
from tarnn.families.own.text import checked
from tarnn.families.weights import Weights
from tarnn.json_file import read_json
from tarnn.log import Log, silent
from tarnn.models.backbone import TextModel
from tarnn.models.config import ModelConfig
from tarnn.models.meta_device import build_on_meta
from tarnn.program.instructions import Program, StateSpec
from tarnn.program.outline import without_weights
from tarnn.program.plain import PlainRuntime
from tarnn.program.runtime import Runtime, Unavailable

OWN = "tarnn"  # the model_type of tarnn's own models of text
LISTED = 3  # names of tensors that are of other parts


def open_folder(
    folder: Path,
    weights: str | None = None,
    *,
    dtype: torch.dtype | None = None,
    adapter: Path | None = None,
    plain: bool = False,
    report: Log = silent,
) -> Opened:
    """Open the model in a folder of a known family. weights, dtype, adapter, report: as in `open_step`.

    plain: computed by the program's definition, as without the compiled kernels. Raises UserError for what the folder holds,
    `ProgramError` for a program with an instruction that the kernels don't have, and Refusal where weights are given and there
    are no kernels.
    """
    config = Config.read(folder)
    write = family_of(config)  # an unknown family is refused before any weight is looked at
    tensors, fields = Weights.read(folder), read_json(folder / CONFIG)
    if adapter is not None:
        tensors = with_adapter(tensors, adapter, quick_fingerprint(tensors))
    tensors = tensors if dtype is None else tensors.cast(dtype)
    program = write(config, tensors)
    saved = program.instructions[0].weights["tokens"].dtype
    if not plain:
        check_packing(sum(x.numel() for x in tensors.used().values()), weights or default_format(saved))
    tensors.check_finite()
    if left := tensors.left():
        more = f" and {len(left) - LISTED:,} more" if len(left) > LISTED else ""
        report(f"{folder} has weights that its language model does not use: {', '.join(left[:LISTED])}{more}")
    step, about = runtime_of(program, weights or default_format(saved), required=weights is not None, plain=plain)
    if adapter is not None and isinstance(step, Runtime):
        step.program = without_weights(step.program)  # sums are copies, not mapped files
    names = fields.get("architectures")
    return Opened(
        contents=contents_of(folder, config, tensors, fields),
        step=step,
        prefill=step.prefill,
        new_state=step.new_state,
        config=Limits(step.vocab_size, most_positions(program, text_fields(fields, config.place))),
        architecture=names[0] if isinstance(names, list) and names and isinstance(names[0], str) else config.model_type,
        fields=fields,
        weights=None if isinstance(step, PlainRuntime) else step.weights,
        dtype=saved,
        key_bytes=key_bytes(program) * saved.itemsize,
        about=about,
        make_head=partial(head_of, folder, tensors, step),
    )


def head_of(folder: Path, tensors: Weights, step: Runtime) -> Runtime | None:
    """Open the head of a folder that expects the token after next; None where there is none, or the step is in plain PyTorch."""
    if isinstance(step, PlainRuntime):
        return None
    program = draft_program(Config.read(folder), tensors)
    return None if program is None else Runtime(program, step.weights)


def contents_of(folder: Path, config: Config, tensors: Weights, fields: dict[str, Any]) -> OfFolder:
    """Return what was opened; tarnn's own models have parameters and a fingerprint as in PyTorch."""
    if config.model_type != OWN:
        return OfFolder(tensors.used(), fields)
    record = checked(Config.read(folder), ModelConfig, "TarnnForCausalLM")
    return OfOwnFolder(tensors.used(), fields, build_on_meta(TextModel, record))


def text_fields(fields: dict[str, Any], place: str) -> Config:
    """Return the part of a config that is about the language model, with all else that is said besides."""
    inner = fields.get("text_config")
    return Config(inner or {k: x for k, x in fields.items() if k != "quantization_config"}, place)


def most_positions(program: Program, config: Config) -> int | None:
    """Return how many tokens a sequence can have: as many as the program has positions, and the model was made for."""
    limits = (program.limit, config.size("max_position_embeddings", None))
    return min((x for x in limits if x is not None), default=None)


def default_format(dtype: torch.dtype) -> str:
    """Return the format that rounds no weight: float16 has more digits than bfloat16, and needs float32."""
    return "bfloat16" if dtype == torch.bfloat16 else "float32"


def runtime_of(
    program: Program, weights: str, *, required: bool, plain: bool = False
) -> tuple[Runtime, tuple[str, ...]]:
    """Return what runs a program, and lines about it. required: there must be a step with these weights."""
    if plain and required:
        why = "the compiled kernels lack an instruction of this family"
        raise Refusal(f"there is no fused step for this model: {why}.") from Refusal(why)
    if plain:
        return PlainRuntime(program), ("plain step", "no fused step: the compiled kernels lack an instruction")
    try:
        return Runtime(program, weights), (f"fused step ({weights} weights)",)
    except Unavailable as error:
        if required:
            raise Refusal(
                f"there is no fused step for this model: {error}. Leave the weights as they are."
            ) from Refusal(str(error))
        return PlainRuntime(program), ("plain step", f"no fused step: {error}")


def key_bytes(program: Program) -> int:
    """Count the numbers of keys and values of one token, with softmax in each layer of attention.

    Where the program has softmax, other layers count as many; else each counts as many as its state's values, twice.
    """
    grown = [(x.layer, one_token(x)) for x in program.states if x.grows is not None]
    if not grown:
        return sum(2 * x.shape[0] * x.shape[2] for x in program.states if x.name == "S")
    attention = [kind for kind in program.layers if kind not in ("NoState", "ConvolutionState", "RwkvState")]
    return sum(n for _, n in grown) // len({layer for layer, _ in grown}) * len(attention)


def one_token(spec: StateSpec) -> int:
    """Count the numbers by which a token makes a tensor longer."""
    return torch.Size(n for axis, n in enumerate(spec.shape) if axis != spec.grows).numel()
