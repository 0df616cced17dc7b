"""Pack the model in a folder into one file, which opens at once."""

import json
from pathlib import Path
from typing import Any

from tarnn.decoding.from_program import default_format
from tarnn.decoding.lm import tokenizer_in
from tarnn.decoding.opened import Opened
from tarnn.decoding.opening import open_step
from tarnn.decoding.packed_file import tokenizer_files, write_packed
from tarnn.decoding.refusal import Refusal
from tarnn.decoding.state_file import check_writable
from tarnn.errors import UserError
from tarnn.families.by_name import open_program
from tarnn.log import Log, silent, ticking
from tarnn.program.outline import outline_of
from tarnn.program.plain import PlainRuntime
from tarnn.program.recording import ProgramError
from tarnn.program.runtime import Runtime, Unavailable


def pack_folder(
    folder: str | Path,
    out: str | Path,
    weights: str | None = None,
    *,
    adapter: Path | None = None,
    replace: bool = False,
    report: Log = silent,
) -> int:
    """Write the model of text in a folder as one file; return its size in bytes. The file is whole, or not there.

    weights: float32 | bfloat16 | int8 | int4; None: as they were saved, float16 as float32. adapter: as in `open_step`. replace:
    an existing file. report: called with a line now and then where this takes long.

    Raises UserError for a folder that can't be packed, with the reason, for an `out` that exists, and where it can't be written.
    """
    folder, out = Path(folder), Path(out)
    check_writable(out, "the packed file")
    if out.exists() and not replace:
        raise UserError(f"{out} exists already; name a new file, or replace it with --force.")
    with ticking(f"tarnn: packing {folder}", report):
        try:
            opened = open_step(folder, weights, adapter=adapter, report=report)
            runtime = runtime_of(opened, folder, weights)
        except (Refusal, Unavailable, ProgramError) as error:
            raise UserError(f"{folder} can't be packed: {error}") from error
        tokenizer_in(folder, opened.config.vocab_size)  # its errors now, not when the file is opened
        return write_packed(out, runtime.packed, facts_of(opened, runtime), tokenizer_files(folder))


def runtime_of(opened: Opened, folder: Path, weights: str | None) -> Runtime:
    """Return the compiled runtime of what was opened. Raises UserError where its program does not run compiled."""
    if isinstance(opened.step, PlainRuntime):
        raise UserError(f"{folder} can't be packed: {'; '.join(opened.about)}. `tarnn generate` runs the folder.")
    if isinstance(opened.step, Runtime):
        return opened.step
    return Runtime(open_program(folder), weights or opened.weights or default_format(opened.dtype))


def facts_of(opened: Opened, runtime: Runtime) -> dict[str, Any]:
    """Return what a packed file tells of its model, as JSON has it."""
    return {
        "weights": runtime.weights,
        "outline": outline_of(runtime.program),
        "fingerprint": opened.fingerprint,
        "parameters": opened.num_parameters,
        "bytes": opened.num_bytes,
        "config": list(opened.config),
        "architecture": opened.architecture,
        "fields": json.loads(json.dumps(dict(opened.fields), default=str)),
        "dtype": str(opened.dtype).removeprefix("torch."),
        "key_bytes": opened.key_bytes,
        "end_ids": sorted(opened.end_ids),
        "pad_id": opened.pad_id,
        "sampling": dict(opened.sampling),
    }
