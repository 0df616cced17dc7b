"""`tarnn.check`: whether a model gives one text the same logits, however it is computed."""

from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

import torch
from torch import nn

from tarnn.checkpoint_keys import MODEL_TYPES
from tarnn.conversion.opening import open_pretrained
from tarnn.decoding.contents import OfModule
from tarnn.decoding.memory import check_memory
from tarnn.decoding.opened import Opened
from tarnn.decoding.opening import open_step
from tarnn.errors import UserError
from tarnn.huggingface.patching.patch import patch_transformers
from tarnn.json_file import read_json
from tarnn.laws.forward import Forward
from tarnn.laws.report import Report, Section
from tarnn.laws.runtime import Running, against_definition, against_forward
from tarnn.laws.ways import Texts
from tarnn.log import Log, silent
from tarnn.tasks.checkpoint import open_model

TOKENS = (70, 23, 7)  # longer than the chunks in which linear layers compute; a few words; one
ALSO = ("transformers", "patched")


@torch.no_grad()
def check(
    source: str | Path | nn.Module,
    weights: str | Sequence[str] | None = None,
    *,
    also: Sequence[str] = (),
    tokens: Sequence[int] = TOKENS,
    seed: int = 0,
    report: Log = silent,
) -> Report:
    """Check that a language model gives the same logits in every way to compute the same text.

        report = tarnn.check("Qwen3.5-0.8B", "int8")   # or tarnn.check(model), a live one, patched or not
        assert not report.failed, report

    Rows of random tokens are computed in all the ways of `tarnn.laws.ways`. Of a live model its own `forward` is checked, and
    tarnn's runtime compared with it; of a folder the runtime, which is compared with its definition and with PyTorch's model.

    weights: formats of a folder's weights, float32 | bfloat16 | int8 | int4; None: as saved. also: of a folder check also
    `transformers`' own model, or that one `patched` with tarnn's ops. tokens: how long the rows are. report: called with lines.

    Returns a `Report`, which prints as a page. What can't be checked is skipped, with the reason. Raises UserError, a ValueError,
    for a source that holds no language model, and for other tokens.
    """
    if wrong := [x for x in also if x not in ALSO]:
        raise UserError(f"also must be of {', '.join(ALSO)}; got {wrong[0]!r}.")
    if len(tokens) < 2 or min(tokens) < 2 or max(tokens) > 10**5 or max(tokens) == min(tokens):
        raise UserError(
            f"tokens are the lengths of two rows or more, from 2 to 100,000 and not all the same; got {[*tokens]}."
        )
    texts = Texts(tuple(tokens), seed, report)
    if not isinstance(source, nn.Module):
        formats = [weights] if weights is None or isinstance(weights, str) else weights
        return Report(str(source), texts.lengths, seed, tuple(_folder(Path(source), formats, also, texts)))
    if also or weights is not None:
        raise UserError("weights and also are for folders; a live model is checked as it is. Leave them out.")
    training = [x for x in source.modules() if x.training]
    source.eval()
    try:
        return Report(type(source).__name__, texts.lengths, seed, (_live(source, texts),))
    finally:
        for x in training:
            x.training = True


def _live(model: nn.Module, texts: Texts) -> Section:
    try:
        forward = Forward(model)
    except UserError:
        return _opened(open_step(model), texts)
    compare = partial(against_forward, lambda: forward, lambda: Running(open_step(model)))
    return texts.section(forward, {"tarnn's runtime against it": compare})


def _folder(folder: Path, formats: Sequence[str | None], also: Sequence[str], texts: Texts) -> Iterator[Section]:
    for i, weights in enumerate(formats):
        yield _opened(open_step(folder, weights, report=texts.report), texts, None if i else folder)
    for kind in also:
        yield texts.section(opened_model(folder, texts.report, patched=kind == "patched"))


def _opened(opened: Opened, texts: Texts, folder: Path | None = None) -> Section:
    """Check what was opened. folder: compare it with that folder's model in PyTorch."""
    try:
        running = Running(opened)
    except UserError:
        if not isinstance(opened.contents, OfModule):
            raise
        return texts.section(Forward(opened.contents.model))
    comparisons = {"against the definition, in float64": partial(against_definition, running, opened.dtype)}
    if folder is not None:
        single = (
            (lambda: running) if running.runtime.weights == "float32" else lambda: Running(open_step(folder, "float32"))
        )
        compare = partial(against_forward, lambda: opened_model(folder, texts.report), single)
        comparisons["in float32, against PyTorch's model"] = compare
    return texts.section(running, comparisons)


def opened_model(folder: Path, report: Log, *, patched: bool = False) -> Forward:
    """Open a folder's model in PyTorch, in float32, and return its runner. Raises UserError where there is none."""
    if folder.is_file():
        raise UserError("a packed file has no model in PyTorch; check the folder that it was made of.")
    files = sum(x.stat().st_size for x in folder.glob("*.safetensors"))
    check_memory(3 * files, f"{folder}: the model in PyTorch, in float32 and float64,", "It was not compared.")
    if read_json(folder / "config.json").get("model_type") in MODEL_TYPES:
        return Forward(open_model(folder, dtype=torch.float32))
    model = open_pretrained(folder, text_only=True, report=report).float()
    if patched:
        patch_transformers(model)
    return Forward(model)
