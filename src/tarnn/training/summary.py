"""Summarise the resolved settings of a run: as a page before it starts, and for settings.json."""

import platform
from typing import Any

import torch
import transformers
from transformers import PreTrainedModel, TrainingArguments

from tarnn._version import __version__
from tarnn.tasks import RunSettings, Task
from tarnn.training.budget import WARMUP
from tarnn.training.callbacks import random_maps

SHOWN = ("attention", "feature_map", "decay", "position", "likelihood")  # of the model's choices


def describe(
    args: TrainingArguments, task: Task, per_step: int, model: PreTrainedModel, products: str
) -> dict[str, Any]:
    """Model, data, length and versions, as JSON."""
    return {
        "model": model.config.to_diff_dict(),
        task.of: task.data_facts,
        "run": {
            "parameters": model.num_parameters(),
            "random_features": bool(random_maps(model)),
            "device": str(args.device),
            "processes": args.world_size,
            "threads": torch.get_num_threads(),
            "products": products,
            f"{task.counted}_per_step": per_step,
            "examples_per_step": per_step // task.per_example,
            "max_steps": args.max_steps,
            **task.run_facts(),
        },
        "versions": {
            "tarnn": __version__,
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "python": platform.python_version(),
        },
    }


def table(settings: RunSettings, facts: dict[str, Any], task: Task) -> str:
    """The resolved settings, one line per topic."""
    return "\n".join(f"{name:>14}  {value}" for name, value in rows_of(settings, facts, task).items())


def measured(task: Task | type[Task], measure: float | None, step: int | None, rates: dict[str, float]) -> str:
    """Say what the best model measured on held-out data. rates: what was counted besides."""
    if measure is None:
        return f"no validation {task.of}"
    value = f"{measure:.4f} {task.unit.replace('_per_', '/')} on the validation {task.of} (step {step:,})"
    return value + "".join(f", {name.replace('_', ' ')} {x:.4f}" for name, x in rates.items())


def rows_of(settings: RunSettings, facts: dict[str, Any], task: Task) -> dict[str, str]:
    """The resolved settings, by topic."""
    run, model = facts["run"], facts["model"]
    layers = model.get("num_hidden_layers")
    kinds = {key: model[key] for key in SHOWN if key in model}
    length = [f"{settings.epochs:g} epochs"] if settings.epochs else []
    length += [f"{settings.max_minutes:g} minutes"] if settings.max_minutes else []
    length += [f"{run['max_steps']:,} steps"] if run["max_steps"] < 10**9 else []
    rows = {
        **task.rows(),
        "model": f"{run['parameters']:,} parameters: {layers} layers, hidden {model.get('hidden_size')}, "
        f"{model.get('num_attention_heads')} heads" + "".join(f", {key} {value}" for key, value in kinds.items()),
        "step": task.step_row(run[f"{task.counted}_per_step"])
        + (f" × {settings.accumulate} accumulated" if settings.accumulate > 1 else "")
        + (f" × {run['processes']} processes" if run["processes"] > 1 else ""),
        "length": " or ".join(length),
        "learning rate": f"{settings.learning_rate:g}, {schedule(settings)}",
        "redraw": f"every {settings.redraw_every:,} steps" if settings.redraw_every else "never",
        "device": f"{run['device']}, {run['threads']} thread{'s' * (run['threads'] != 1)}"
        + (", bf16" if settings.bf16 else ""),
        "products": run["products"],
        "out": f"{settings.out} (seed {settings.seed})",
    }
    if not run["random_features"]:
        del rows["redraw"]
    return rows | {f"set {key}": repr(value) for key, value in settings.training_arguments.items()}


def schedule(settings: RunSettings) -> str:
    """How the learning rate goes: what the task's recipe or --set say, else a cosine."""
    chosen = settings.recipe | settings.training_arguments
    warmup = chosen.get("warmup_steps", WARMUP)
    kind = chosen.get("lr_scheduler_type") or ("following the clock" if settings.max_minutes else "cosine")
    lead = f"{100 * warmup:g} % warm-up" if 0 < warmup < 1 else f"{warmup:g} steps of warm-up" if warmup else ""
    optimizer = f"; RAdam, weight decay {settings.recipe['weight_decay']:g}" if settings.recipe else ""
    return ", ".join(part for part in (kind, lead) if part) + optimizer
