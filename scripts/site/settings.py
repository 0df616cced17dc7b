"""The page of the settings of a training run, from the records that declare them."""

from dataclasses import MISSING, fields
from types import UnionType
from typing import get_args, get_type_hints

from scripts.site.command_line import cell
from tarnn.tasks.settings import RunSettings


def settings() -> str:
    """Return the page: the fields that all tasks share, then those that each task adds."""
    from tarnn.tasks.base import TASKS

    shared = {x.name for x in fields(RunSettings)}
    intro = (
        "Each is an option of `tarnn train`, a field of a task's record in Python, and a key of the `settings.json` that a "
        "run leaves in its folder. The keys of a *model* are in [the model's config](../docs/config.md)."
    )
    parts = [f"# The settings of a training run\n\n{intro}", f"## All tasks\n\n{table(RunSettings, set())}"]
    for name, task in TASKS.items():
        record = task.settings_class
        parts.append(f"## {name}\n\n`{record.__module__}.{record.__name__}`\n\n{table(record, shared)}")
    return "\n\n".join(parts) + "\n"


def table(record: type, without: set[str]) -> str:
    """Return the fields of a record that stand in no other table."""
    hints = get_type_hints(record)
    rows = ["| key | type | default | what it is |", "|---|---|---|---|"]
    for x in fields(record):
        if x.name not in without:
            default = x.default if x.default is not MISSING else "required" if x.default_factory is MISSING else {}
            shown = default if default == "required" else f"`{default}`"
            rows.append(
                f"| `{x.name}` | `{kind(hints[x.name])}` | {cell(shown)} | {cell(x.metadata.get('help', ''))} |"
            )
    return "\n".join(rows)


def kind(hint: object) -> str:
    """Write a type as the source does, without modules."""
    if isinstance(hint, UnionType):
        return " or ".join(kind(x) for x in get_args(hint))
    return (
        "None"
        if hint is type(None)
        else hint.__name__
        if isinstance(hint, type) and not get_args(hint)
        else str(hint).replace("typing.", "")
    )
