"""Choose the fastest step that a model can have here, and say why not a faster one."""

from dataclasses import dataclass
from typing import Any

from tarnn.decoding.fused import FusedStep
from tarnn.decoding.loop import Step
from tarnn.decoding.refusal import Refusal


@dataclass(frozen=True)
class ChosenStep:
    """step: with the signature of `model.step`. name: what it is. why_not: a reason against each faster one."""

    step: Step
    name: str
    why_not: tuple[str, ...] = ()


def fastest_step(model: Any, *, weights: str | None = None) -> ChosenStep:
    """Return the fused step where the model has one, else `model.step`.

        loop.step = fastest_step(model).step

    weights: see `FusedStep`.

    Raises Refusal, a ValueError, where weights are given and there is no fused step.
    """
    try:
        fused = FusedStep(model, weights)
        return ChosenStep(fused, f"fused step ({fused.weights} weights)")
    except Refusal as error:
        if weights is not None:
            raise
        return ChosenStep(model.step, "plain step", (f"no fused step: {error.__cause__}",))
