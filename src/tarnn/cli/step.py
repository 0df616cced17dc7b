"""Which step the token loop takes: the fused one where it can be had, on a GPU a recorded one, a compiled one where that
pays, else the model's own."""

from dataclasses import dataclass
from typing import Any

from tarnn.cli.progress import Report
from tarnn.decoding.compiled import choose, compile_step
from tarnn.decoding.fused import FusedStep, refusal
from tarnn.decoding.recorded import RecordedStep, cannot_record
from tarnn.errors import UserError
from tarnn.models.backbone import TextModel
from tarnn.models.images import ImageModel


@dataclass(frozen=True)
class StepOptions:
    """compile: whether to compile the model's own step; None: where it pays and there is no fused one.
    weights: how the fused step keeps them, float32 | bfloat16 | int8 | int4; None: as float32, where there is one."""

    compile: bool | None = None
    weights: str | None = None

    def __post_init__(self) -> None:
        if self.compile and self.weights:
            raise UserError(
                "--weights is for the fused step, and --compile takes the model's own. Leave one of them out."
            )


def prepare_step(loop: Any, num_tokens: int, options: StepOptions, report: Report) -> None:
    """Gives the loop its step for so many tokens, and says which and why.

    Raises UserError where what was asked for can't be had.
    """
    if not isinstance(loop.model, TextModel | ImageModel):
        report("tarnn: step by transformers, on a cache of constant size")
        return
    reason = refusal(loop.model)
    if options.weights and reason:
        raise UserError(f"--weights is for the fused step, which can't be had here: {reason}. Leave it out.")
    if reason is None and not options.compile:
        weights = options.weights or "float32"
        loop.step = FusedStep(loop.model, weights)
        report(f"tarnn: fused step ({weights} weights)")
        return
    if options.compile is None and cannot_record(loop) is None:
        try:
            loop.step = RecordedStep(loop)
        except RuntimeError as error:  # something in the step waits for the GPU
            report(f"tarnn: the step can't be recorded in a CUDA graph: {str(error).splitlines()[0]}")
        else:
            report("tarnn: step recorded in a CUDA graph")
            return
    compiled, why = choose(loop, options.compile, num_tokens)
    if compiled:
        report(f"tarnn: compiling the step ({why}), which takes 15 to 40 s on most machines")
        try:
            why += f"; it took {compile_step(loop):.1f} s"
        except Exception as error:  # torch.compile raises many kinds
            # what follows the first paragraph is advice to developers
            failure = " ".join(str(error).split("\n\n")[0].split()).rstrip(".")
            if options.compile:
                raise UserError(f"the step can't be compiled: {failure}. Leave --compile out.") from error
            compiled, why = False, f"compiling failed: {failure}"
    fused = "" if reason is None else f"; no fused one: {reason}"
    report(f"tarnn: {'compiled' if compiled else 'eager'} step ({why}{fused})")
