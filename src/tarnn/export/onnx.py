"""The format "onnx": a graph for any number of tokens and one for a single token, over one file of weights.

    model.onnx, step.onnx     input_ids (B, T) or (B, 1), states → logits (B, 1, vocabulary) of the last token, states
    weights.bin               float32
    genai_config.json         for onnxruntime-genai, where it can run the model

Every family that tarnn has a program of can be written, if ONNX has operators for its layers.
"""

from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, get_args

import torch

from tarnn.decoding.packed_file import tokenizer_files
from tarnn.errors import UserError
from tarnn.export.own import as_json
from tarnn.extras import needed_for
from tarnn.families.by_name import family_of
from tarnn.families.config import Config
from tarnn.families.weights import Weights
from tarnn.log import Log
from tarnn.program.definition import new_states, run
from tarnn.program.extra import extra_rows
from tarnn.program.instructions import Program

PROMPT, STEP, WEIGHTS, GENAI = "model.onnx", "step.onnx", "weights.bin", "genai_config.json"
Operators = Literal["onnx", "microsoft"]
READ, STEPS = 16, 4  # tokens whose logits are compared
CLOSE = 1e-3  # of the largest logit


@needed_for("tarnn export --format onnx")
def export(source: Path, out: Path, *, report: Log, operators: Operators = "onnx") -> str:
    """Write the model into the empty folder `out`, with its tokenizer. Return what was written and compared.

    operators: onnx: ONNX's own LinearAttention and CausalConvWithState (opset 27); microsoft: those of com.microsoft, which
    onnxruntime and onnxruntime-web had before (opset 21). Raises UserError, in one sentence, for layers that ONNX does not have.
    """
    from tarnn.export.onnx_graphs.genai import genai_config, unfit
    from tarnn.export.onnx_graphs.graph import WeightFile
    from tarnn.export.onnx_graphs.trace import lacking, trace

    if operators not in get_args(Operators):
        raise ValueError(f"operators must be one of {', '.join(get_args(Operators))}; got {operators!r}.")
    config, weights = Config.read(source), Weights.read(source)
    program = family_of(config)(config, weights)
    weights.check_finite()
    if reasons := list(dict.fromkeys(lacking(program))):
        raise UserError(f"{source} can't be written as ONNX: it has {'; and '.join(reasons)}.")
    inputs, file = set[str](), WeightFile(out / WEIGHTS)
    for name, one_token in ((PROMPT, False), (STEP, True)):
        report(f"tarnn: writing {name}")
        graph = trace(program, file, one_token=one_token, standard=operators == "onnx")
        (out / name).write_bytes(graph.model(name.removesuffix(".onnx")).SerializeToString())
        inputs = {port.name for port in graph.inputs}
    files = tokenizer_files(source)
    if not (why := unfit(program)):
        files[GENAI] = as_json(genai_config(source, program, inputs, PROMPT)).encode()
    for name, data in files.items():
        (out / name).parent.mkdir(exist_ok=True)
        (out / name).write_bytes(data)
    genai = f"no {GENAI}, since onnxruntime-genai can't run it: {why}" if why else GENAI
    return f"{PROMPT}, {STEP}, {WEIGHTS} and {genai}; {compared(source, out, program)}"


def compared(source: Path, out: Path, program: Program) -> str:
    """Run both graphs on a short text, if onnxruntime is there; say how far logits are from the program's in float64.

    Raises UserError where they differ by more than float32's rounding can explain.
    """
    if find_spec("onnxruntime") is None:
        return "not run, since onnxruntime is not installed"
    from tarnn.export.onnx_graphs.running import OnnxModel

    length = min(READ + STEPS, program.limit or READ + STEPS)
    ids = torch.arange(length)[None] % len(program.instructions[0].weights["tokens"])
    expected = defined(program, ids)
    model, cut = OnnxModel(out / PROMPT, out / STEP), max(1, length - STEPS)
    parts = (ids[:, :cut], *ids[:, cut:].split(1, 1))
    found = torch.cat([torch.from_numpy(model.read(part.numpy())) for part in parts], 1)
    error = float((found - expected[:, cut - 1 :]).abs().max() / expected.abs().max().clamp(min=1e-30))
    if not error <= CLOSE:
        raise UserError(
            f"{source} can't be written as ONNX: onnxruntime computes logits that differ by {error:.1g} of the largest. Please "
            "report this, with config.json."
        )
    return f"onnxruntime's logits differ by {error:.1g} of the largest"


def defined(program: Program, ids: Any) -> Any:
    """Compute the logits of each token (1, t) by the definition of programs, in float64."""
    extra = extra_rows(program, torch.arange(ids.shape[1]))
    rows, states = None if extra is None else extra[None], new_states(program, 1, dtype=torch.float64)
    return run(program, ids, states, positions=[0], extra=rows, dtype=torch.float64)[0]
