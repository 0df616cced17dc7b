"""The results of checks, as values and as a page."""

from collections import Counter
from dataclasses import asdict, dataclass
from typing import Any

PASS, FAIL, SKIPPED = "pass", "FAIL", "skipped"


@dataclass(frozen=True)
class Result:
    """One law of one model.

    outcome: pass | FAIL | skipped. largest: difference of two logits, infinite where some are not finite; None: not computed.
    first: the layer, or the state of one, where a difference above rounding appears first. places: how many tokens differ, of how
    many. why: of what was skipped, or could not run; of a comparison, how large a difference may be.
    """

    law: str
    outcome: str
    largest: float | None = None
    first: str | None = None
    places: tuple[int, int] | None = None
    why: str | None = None

    def __str__(self) -> str:
        number = "" if self.largest is None else f"{self.largest:.1e}" if self.largest else "0"
        about = [self.why] if self.why else []
        if self.places:
            over, tokens = self.places
            about.append(f"at {over} of {tokens} tokens; first in {self.first or 'the logits alone'}")
        return f"  {self.outcome:8}{self.law:38}{number:9}{'; '.join(about)}".rstrip()


@dataclass(frozen=True)
class Section:
    """The results of one way to run a model. tolerance: of logits. origin: where it comes from."""

    name: str
    tolerance: float
    origin: str
    results: tuple[Result, ...]

    def __str__(self) -> str:
        return "\n".join([self.name, f"  tolerance {self.tolerance:.2g}: {self.origin}", *map(str, self.results)])


@dataclass(frozen=True)
class Report:
    """Hold the results of `tarnn.check`. It prints as a page.

    source: the model. tokens: lengths of the rows. seed: of their tokens. sections: one for each way to run it.
    """

    source: str
    tokens: tuple[int, ...]
    seed: int
    sections: tuple[Section, ...]

    @property
    def results(self) -> tuple[Result, ...]:
        """Return the results of all sections."""
        return tuple(x for section in self.sections for x in section.results)

    @property
    def failed(self) -> tuple[Result, ...]:
        """Return the results that failed; what was skipped did not."""
        return tuple(x for x in self.results if x.outcome == FAIL)

    def facts(self) -> dict[str, Any]:
        """Return it as JSON has it; a difference that is not finite as null, with its reason."""
        facts = asdict(self)
        for result in (x for section in facts["sections"] for x in section["results"]):
            if result["largest"] == float("inf"):  # no number of JSON
                result |= {"largest": None, "why": result["why"] or "the difference is not finite"}
        return facts | {"failed": len(self.failed)}

    def __str__(self) -> str:
        counts = Counter(x.outcome for x in self.results)
        lengths = ", ".join(map(str, self.tokens))
        head = f"{self.source}: {len(self.tokens)} rows of {lengths} random tokens, seed {self.seed}"
        total = f"{len(self.results)} checks: {counts[PASS]} passed, {counts[FAIL]} failed, {counts[SKIPPED]} skipped"
        return "\n\n".join([head, *map(str, self.sections), total])
