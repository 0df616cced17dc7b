"""The settings of an experiment: a full set, a quick one, and options over both; printed before anything runs."""

import argparse
from pathlib import Path
from typing import Any

import torch
from output import RESULTS


def parser(description: str) -> argparse.ArgumentParser:
    """With the options that all experiments have: --out, --threads, --quick."""
    made = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("--out", type=Path, default=RESULTS, help="where results go")
    made.add_argument("--threads", type=int, default=torch.get_num_threads())
    made.add_argument(
        "--quick", action="store_true", help="under a minute: small and short, to see that it runs"
    )
    return made


def resolve(made: argparse.ArgumentParser, full: dict[str, Any], quick: dict[str, Any]) -> argparse.Namespace:
    """What the command line says; what it leaves open, the quick settings or the full ones. Prints and applies it.

    Quick results never land on top of full ones: their default is runs/experiments.
    """
    options = made.parse_args()
    for name, value in {**full, **(quick if options.quick else {})}.items():
        if getattr(options, name) is None:
            setattr(options, name, value)
    if options.quick and options.out == RESULTS:
        options.out = RESULTS.parents[1] / "runs" / "experiments"
    options.out.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(options.threads)
    for name, value in as_facts(options).items():
        print(f"{name:>16}  {value}")
    return options


def as_facts(options: argparse.Namespace) -> dict[str, Any]:
    """The resolved settings as JSON has them, without where results go; of a path, its name."""
    kept = {k: v for k, v in vars(options).items() if k not in ("out", "threads")}
    return {k: v.name if isinstance(v, Path) else v for k, v in kept.items()}
