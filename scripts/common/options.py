"""The settings of a script: a full set, a quick one, and what the command line says over both."""

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).parents[2]
ABOUT = {  # options of several scripts
    "books": "a folder of .txt or .txt.gz",
    "data": "a folder: see above",
    "looks": "how often a run is measured",
    "runs": "where the runs are kept",
    "unseen": "the book that is kept for validation",
}
NO_SETTINGS = ("threads", "resume", "device")  # they change where and when something is measured, not what


def parse(
    file: str,
    doc: str,
    full: Mapping[str, Any],
    quick: Mapping[str, Any] | None = None,
    *,
    choices: Mapping[str, Sequence[str]] | None = None,
    about: Mapping[str, str] | None = None,
) -> argparse.Namespace:
    """What the command line says; what it leaves open, the quick settings (with --quick) or the full ones.

    file, doc: the script's `__file__` and `__doc__`. full: name → default, whose type is the option's; a type in its place
    (or a list of one) has no default. All scripts have --out and --threads, and --quick where there is a quick set.

    Results of a full run go into `results/` beside the script, where they are committed. What was changed by an
    option goes into `runs/`, so that it never lands on top of them; data are no setting, and --out goes first.
    """
    script, about = Path(file).resolve(), {**ABOUT, **(about or {})}
    made = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--out", type=Path, help=f"folder; {script.parent.name}/results for the full run")
    if quick:
        made.add_argument("--quick", action="store_true", help="small and short: to see that it runs")
    for name, value in {"threads": int, **full}.items():
        made.add_argument(
            f"--{name.replace('_', '-')}",
            help=about.get(name, f"by default {shown(default_of(value))}"),
            **kind_of(value, (choices or {}).get(name)),
        )
    given = {name: value for name, value in vars(made.parse_args()).items() if value is not None}
    defaults = {name: default_of(x) for name, x in {"threads": int, **full}.items()}
    small = dict(quick or {}) if given.pop("quick", False) else {}
    options = argparse.Namespace(**{**defaults, **small, **given}, quick=bool(small))
    changed = {
        name
        for name, value in vars(options).items()
        if name in full and not isinstance(value, Path) and value != defaults[name]
    }
    partial = ROOT / "runs" / script.parent.name
    options.out = given.get("out") or (partial if small or changed - {*NO_SETTINGS} else script.parent / "results")
    options.script = str(script.relative_to(ROOT)) if script.is_relative_to(ROOT) else script.name
    torch.set_num_threads(options.threads or torch.get_num_threads())
    options.threads = torch.get_num_threads()
    return options


def default_of(value: Any) -> Any:
    return None if isinstance(value, type) or (isinstance(value, list) and isinstance(value[0], type)) else value


def kind_of(value: Any, choices: Sequence[str] | None) -> dict[str, Any]:
    """argparse's words for an option with this default."""
    if isinstance(value, bool):
        return {"action": "store_true", "default": None}
    if isinstance(value, list):
        return {"nargs": "+", **kind_of(value[0], choices)}
    return {"type": value if isinstance(value, type) else type(value), "choices": choices}


def shown(value: Any) -> str:
    return " ".join(map(str, value)) if isinstance(value, list) else str(value)


def as_facts(options: argparse.Namespace) -> dict[str, Any]:
    """The settings as JSON has them, without where results go; of a path, its name."""
    kept = {k: v for k, v in vars(options).items() if k not in ("out", "threads", "script", "resume")}
    return {k: v.name if isinstance(v, Path) else v for k, v in kept.items()}
