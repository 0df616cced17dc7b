"""Training runs that an experiment makes, and goes on with where they were stopped."""

from pathlib import Path
from typing import Any

from tarnn.training.folder import LOG
from tarnn.training.log import read_log
from tarnn.training.run import train


def validations(folder: Path, measure: str) -> list[dict[str, Any]]:
    """The lines of a run's log that have `measure`."""
    return [line for line in read_log(folder / LOG) if measure in line]


def trained(settings: Any, measure: str) -> list[dict[str, Any]]:
    """Train up to `settings.steps`, unless that was done; the run's validations."""
    if max((line["step"] for line in validations(settings.out, measure)), default=0) < settings.steps:
        train(settings)
    return validations(settings.out, measure)
