"""A trained model's folder, and what its run held out."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tarnn.errors import UserError


@dataclass(frozen=True)
class Trained:
    """A trained model's folder, and what is known of its run."""

    folder: Path
    config: Any  # of the model
    settings: Any  # of the run; the task's defaults where `saved` is None
    saved: dict[str, Any] | None  # settings.json; None for a model that was saved without a run

    def held_out(self, of: str) -> Any:
        """What settings.json says of what the run held out of its data, which it calls `of`; UserError for nothing."""
        if self.saved is None:
            raise UserError(f"{self.folder} holds no settings.json, which says what a run held out. {self.name_data}")
        facts = (self.saved.get(of) or {}).get("validation")
        if not facts or 0 in (facts.get("tokens"), facts.get("rows")):
            raise UserError(f"the run in {self.folder} held nothing out. {self.name_data}")
        return facts

    def refuse_other(self, of: str, now: Any) -> None:
        """UserError where the sources now hold out other data than those of the run; `now` are their facts."""
        if self.held_out(of) != now:
            raise UserError(
                f"{', '.join(self.settings.sources)} no longer hold what the run in {self.folder} held out. "
                f"{self.name_data}"
            )

    @property
    def name_data(self) -> str:
        return f"Name the data: `tarnn eval {self.folder} DATA`."
