"""Goals of a benchmark: computed from its results, met or missed, never typed in. What is guaranteed stands apart."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from scripts.common.tables import markdown


@dataclass(frozen=True)
class Target:
    """A claim about all the values of one case: each at least (or at most) the bound."""

    claim: str
    case: str
    bound: float
    at_least: bool
    values: Mapping[str, float]  # by where it was measured
    unit: str = "×"

    @property
    def missed(self) -> dict[str, float]:
        return {
            where: x for where, x in self.values.items() if not (x >= self.bound if self.at_least else x <= self.bound)
        }

    @property
    def met(self) -> bool | None:
        """None where nothing was measured."""
        return not self.missed if self.values else None

    @property
    def worst(self) -> tuple[str, float]:
        choose = min if self.at_least else max
        where = choose(self.values, key=lambda x: self.values[x])
        return where, self.values[where]

    def shown(self, value: float) -> str:
        return f"{value:.0%}" if self.unit == "%" else f"{value:.2f}{self.unit}"

    def as_json(self) -> dict:
        where, worst = self.worst if self.values else (None, None)
        return {
            "claim": self.claim,
            "case": self.case,
            "bound": self.bound,
            "at_least": self.at_least,
            "met": self.met,
            "worst": worst,
            "where": where,
            "measured": len(self.values),
            "missed": self.missed,
        }


def at_least(claim: str, case: str, bound: float, values: Mapping[str, float], unit: str = "×") -> Target:
    return Target(claim, case, bound, True, values, unit)


def at_most(claim: str, case: str, bound: float, values: Mapping[str, float], unit: str = "×") -> Target:
    return Target(claim, case, bound, False, values, unit)


def target_table(targets: Sequence[Target]) -> str:
    """Markdown: a row a claim, a column a case, in each the worst value and where; then every value that missed."""
    cases = list(dict.fromkeys(t.case for t in targets))
    by = {(t.claim, t.case): t for t in targets}
    rows = [
        [claim, *(_cell(by[claim, case]) if (claim, case) in by else "" for case in cases)]
        for claim in dict.fromkeys(t.claim for t in targets)
    ]
    table = markdown(["goal", *cases], rows, left=1 + len(cases))
    missed = [t for t in targets if t.met is False]
    lines = [table, "", f"{summary(targets)}. In each cell the worst value, and where it was measured."]
    for t in missed:
        values = ", ".join(f"{t.shown(x)} ({where})" if where else t.shown(x) for where, x in t.missed.items())
        lines.append(f"* missed, {t.case}: {t.claim}: {values} of {len(t.values)} measured")
    return "\n".join(lines)


def summary(targets: Sequence[Target]) -> str:
    met, missed, unknown = (sum(t.met is x for t in targets) for x in (True, False, None))
    return f"{met} met, {missed} missed" + (f", {unknown} not measured" if unknown else "")


def _cell(t: Target) -> str:
    if t.met is None:
        return "not measured"
    where, worst = t.worst
    at = f" ({where})" if where else ""
    return f"{t.shown(worst)}{at} met" if t.met else f"**{t.shown(worst)}{at} missed**"


GUARANTEE = (
    "**Guaranteed** by the script's exit code: results are checked before anything is measured. "
    "If the check is red, the script measures nothing and exits with 1."
)


def section(targets: Sequence[Target], guarantee: str = GUARANTEE) -> str:
    """Markdown: what is guaranteed, then the goals, which hold nothing up."""
    goals = "No test holds these, and a goal that is missed does not change the exit code."
    return f"{guarantee}\n\n## Goals: {summary(targets)}\n\n{goals}\n\n{target_table(targets)}"
