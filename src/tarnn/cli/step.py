"""The step that a command's loop takes, and what the command says of it."""

from typing import Any

from tarnn.decoding import fastest_step
from tarnn.decoding.plan import Refusal
from tarnn.errors import UserError
from tarnn.log import Log
from tarnn.models.backbone import TextModel
from tarnn.models.images import ImageModel


def prepare_step(loop: Any, weights: str | None, report: Log) -> None:
    """Give the loop the fastest step that its model can have, and report which and why.

    weights: how the fused step keeps them. Raises UserError where it is given and there is no fused step.
    """
    if not isinstance(loop.model, TextModel | ImageModel):  # a converted one, which was opened with its step
        loop.step, name = loop.model.fastest_step
        report(f"tarnn: {name}")
        return
    try:
        chosen = fastest_step(loop.model, weights=weights)
    except Refusal as error:
        raise UserError(f"--weights is not possible here: {error} Leave --weights out.") from error
    loop.step = chosen.step
    report("tarnn: " + "; ".join((chosen.name, *chosen.why_not)))
