"""A script from its first check to its files: NAME.json, NAME.md and NAME.png, which an interruption leaves whole."""

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from scripts.common import plots
from scripts.common.options import as_facts
from scripts.common.others import RECORD, TRIES
from scripts.common.provenance import provenance

Options = argparse.Namespace
Keep = Callable[[], None]


class Unmeasured(Exception):
    """Why nothing can be measured."""


def run(
    options: Options,
    measure: Callable[[Options, Any, Keep], None],
    *,
    results: Any = None,
    check: Callable[[Options], str] = lambda options: "",
    facts: Callable[[Options, Any], dict[str, Any]] = lambda options, results: {},
    targets: Callable[[Any], Sequence[Any]] | None = None,
    report: Callable[[Options, dict[str, Any], Any], str] | None = None,
    figure: Callable[[Options, dict[str, Any], Any], Any] | None = None,
) -> int:
    """check, measure, write: the script's exit code.

    check(options): what is wrong with what would be measured, or ""; then nothing is.
    measure(options, results, keep): fills `results` (a dict, unless another is given), and calls `keep()` when there is
        something more to keep: the JSON file is then written anew.
    facts(options, results): what else belongs into it; targets(results): the goals, judged.
    report(options, facts, results), figure(…): markdown, and a matplotlib figure, after the last measurement.
    """
    begun, code, found = time.perf_counter(), 0, {} if results is None else results
    path = options.out / Path(options.script).with_suffix(".json").name

    def everything() -> dict[str, Any]:
        measured = {"minutes": round((time.perf_counter() - begun) / 60, 1), "other_processes": RECORD.as_json()}
        judged = {} if targets is None else {"targets": as_json(list(targets(found)))}
        return {
            **provenance(options.script),
            **measured,
            "settings": as_facts(options),
            **facts(options, found),
            **judged,
        }

    RECORD.start(1 if options.quick else TRIES)
    here = provenance(options.script)
    print(f"{here['machine']['cpu']}, {options.threads} threads; kernels: {here['kernels']}")
    for name, value in as_facts(options).items():
        print(f"{name:>16}  {value}")
    try:
        if wrong := check(options):
            raise Unmeasured(f"the check is red: {wrong}.")
        measure(options, found, lambda: save(path, everything(), found))
    except Unmeasured as error:
        print(f"nothing is measured: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        code = 130
        goes_on = "; --resume goes on" if hasattr(options, "resume") else ""
        print(f"interrupted: what was measured is kept{goes_on}", file=sys.stderr)
    if found:
        data, files = everything(), [path]
        save(path, data, found)
        if report is not None:
            files.append(path.with_suffix(".md"))
            files[-1].write_text(text := report(options, data, found))
            print(text)
        if figure is not None:
            files.append(path.with_suffix(".png"))
            plots.save(figure(options, data, found), files[-1])
        print(*files, sep="\n")
    print(f"{(time.perf_counter() - begun) / 60:.1f} minutes")
    return code


def save(path: Path, facts: dict[str, Any], results: Any) -> None:
    """Facts and results as JSON, all or nothing; a row of a table a line."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [f"{json.dumps(name)}: {_text(value)}" for name, value in {**facts, "results": as_json(results)}.items()]
    partial = path.with_suffix(".partial")
    partial.write_text("{\n" + ",\n".join(lines) + "\n}\n")
    partial.replace(path)


def _text(value: Any) -> str:
    dumped = [json.dumps(x, ensure_ascii=False) for x in value] if isinstance(value, list) else []
    if dumped and isinstance(value[0], dict):
        return "[\n  " + ",\n  ".join(dumped) + "\n]"
    return json.dumps(value, ensure_ascii=False)


def as_json(found: Any) -> Any:
    """Dicts and lists of dataclasses, or of what JSON has anyway."""
    if isinstance(found, dict):
        return {str(key): as_json(x) for key, x in found.items()}
    if isinstance(found, list | tuple):
        return [as_json(x) for x in found]
    if hasattr(found, "as_json"):
        return found.as_json()
    return asdict(found) if hasattr(found, "__dataclass_fields__") else found


def earlier(path: Path, facts: dict[str, Any], same: Sequence[str]) -> dict[str, Any]:
    """What an earlier run left at `path`; Unmeasured if it ran under other circumstances: the facts named `same` differ."""
    data = json.loads(path.read_text())
    for name in same:
        if data.get(name) != facts[name]:
            raise Unmeasured(
                f"{path.name} was measured with {name} {data.get(name)}, this is {facts[name]}: start anew, without --resume."
            )
    return data
