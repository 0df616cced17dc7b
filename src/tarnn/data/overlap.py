"""Whether what a model is validated on is among what it is trained on."""

from collections.abc import Hashable, Sequence

from tarnn.errors import UserError
from tarnn.log import Log


def refuse_overlap(train: Sequence[Hashable], held_out: Sequence[Hashable], what: str, log: Log) -> None:
    """UserError where the model is trained on all of --val, which then measures nothing; where on some, `log` says so."""
    seen = set(train)
    common = sum(each in seen for each in held_out)
    if held_out and common == len(held_out):
        raise UserError(
            f"all {what} of --val ({common:,}) are among those to train on, so the validation would measure nothing; leave them "
            "out of one of the two, or let --val-fraction hold a part out."
        )
    if common:
        log(f"tarnn: {common:,} of the {len(held_out):,} {what} of --val are among those to train on, too")
