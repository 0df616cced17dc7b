"""One chooser for all who make tokens: the fastest step that a model can have here, and why not a faster one."""

from dataclasses import dataclass
from typing import Any

from tarnn.decoding.cuda_graph import RecordedStep, cannot_record
from tarnn.decoding.fused import MOST_PLACES, FusedStep
from tarnn.decoding.loop import Step
from tarnn.decoding.plan import Refusal


@dataclass(frozen=True)
class ChosenStep:
    """step: with the signature of `model.step`. name: what it is. why_not: a reason against each faster one."""

    step: Step
    name: str
    why_not: tuple[str, ...] = ()


def fastest_step(
    model: Any, state: Any = None, *, weights: str | None = None, most_places: int = MOST_PLACES
) -> ChosenStep:
    """The fused step; on a GPU the model's own, recorded in a CUDA graph; else the model's own, plain.

        loop.step = fastest_step(model, loop.state).step

    state: what the step begins with, which a recording needs for its number of rows; None: nothing is recorded. weights:
    how a fused step keeps them, float32 by default; most_places: see `FusedStep`.

    Raises Refusal, a ValueError, where weights are given and there is no fused step.
    """
    try:
        fused = FusedStep(model, weights or "float32", most_places)
        return ChosenStep(fused, f"fused step ({fused.weights} weights)")
    except Refusal as error:
        if weights is not None:
            raise
        why_not = f"no fused step: {error.__cause__}"
    no_graph = cannot_record(state)
    if no_graph is None:
        try:
            return ChosenStep(RecordedStep(model, state), "step recorded in a CUDA graph", (why_not,))
        except RuntimeError as error:  # something in the step waits for the GPU
            no_graph = f"recording failed: {str(error).splitlines()[0]}"
    return ChosenStep(model.step, "plain step", (why_not, f"no CUDA graph: {no_graph}"))
