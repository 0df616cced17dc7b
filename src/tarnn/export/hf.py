"""The format "hf": a model of ours as a folder in the layout of another family, which that family's readers open.

`tarnn.families` reads each of these layouts, and has the last word: what was made is read back by it, every key of the config and
every tensor, and must compute the logits of the model before anything is written.
"""

import shutil
from pathlib import Path
from types import ModuleType

import torch
from safetensors.torch import save_file
from torch import Tensor

from tarnn.decoding.packed_file import tokenizer_files
from tarnn.errors import UserError
from tarnn.export.layouts import mamba2, qwen3_5, rwkv7
from tarnn.export.own import OwnModel, as_json
from tarnn.families.by_name import family_of
from tarnn.families.config import FILE, Config
from tarnn.families.own.text import program as own_program
from tarnn.families.weights import Weights
from tarnn.log import Log
from tarnn.program.definition import new_states, run
from tarnn.program.instructions import Program

LAYOUTS: dict[str, ModuleType] = {"gated_delta": qwen3_5, "mamba2": mamba2, "rwkv7": rwkv7}  # by a kind of attention
GENERATION = "generation_config.json"
WEIGHTS = "model.safetensors"
TRIED = 16  # tokens whose logits are compared
CLOSE = 1e-4  # of the largest logit: float32's rounding, through all layers


def export(source: Path, out: Path, *, report: Log) -> str:
    """Write the model into the empty folder `out`, weights in float32, with its tokenizer. Return the layout and the difference.

    Raises UserError, in one sentence, for choices of the model that the layout lacks, by their names.
    """
    model = OwnModel.read(source)
    layout = layout_of(model)
    layout.check(model)
    ready = layout.prepared(model)
    fields = layout.config(ready) | model.ends() | {"dtype": "float32"}
    tensors = {name: x.float().contiguous() for name, x in layout.tensors(ready).items()}
    program = family_of(config := Config(fields, out / FILE))(config, Weights.of(tensors, str(out)))
    report(f"tarnn: reading {fields['architectures'][0]} back")
    ids = torch.arange(min(TRIED, model.record.max_position_embeddings or TRIED))[None] % model.record.vocab_size
    expected = logits(own_program(Config.read(source), Weights.read(source)), ids)
    error = float((logits(program, ids) - expected).abs().max() / expected.abs().max().clamp(min=1e-30))
    if not error <= CLOSE:
        raise UserError(
            f"{source} can't be exported: read back as {fields['model_type']}, its logits differ by {error:.1g} of the largest "
            f"(at most {CLOSE:g} is float32's rounding). Its numbers may be too large or too small; please report this."
        )
    (out / FILE).write_text(as_json(fields))
    save_file(tensors, out / WEIGHTS, metadata={"format": "pt"})
    for name, data in tokenizer_files(source).items():
        (out / name).parent.mkdir(exist_ok=True)
        (out / name).write_bytes(data)
    if (source / GENERATION).is_file():
        shutil.copy(source / GENERATION, out / GENERATION)
    return f"{fields['architectures'][0]}; logits differ by {error:.1g} of the largest"


def layout_of(model: OwnModel) -> ModuleType:
    """Return the layout for the kinds of attention that a model has. Raises UserError where there is none."""
    found = [LAYOUTS[kind] for kind in dict.fromkeys(model.kinds) if kind in LAYOUTS]
    if not found:
        raise UserError(
            f"{model.place} has layers of {' and '.join(dict.fromkeys(model.kinds))}, which no other program has; layers of "
            f"{', '.join(LAYOUTS)} can be written as a folder for others."
        )
    return found[0]


def logits(program: Program, ids: Tensor) -> Tensor:
    """Compute the logits of each token by the definition of programs."""
    dtype = torch.float64
    out, _ = run(program, ids, new_states(program, len(ids), dtype=dtype), positions=[0] * len(ids), dtype=dtype)
    assert isinstance(out, Tensor)
    return out
