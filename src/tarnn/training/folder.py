"""The folder of a run: who may write there, what it holds, and how it is cleared."""

import json
import os
import shutil
from pathlib import Path
from typing import Any

from tarnn.errors import UserError
from tarnn.json_file import read_json
from tarnn.tasks import RunSettings
from tarnn.tasks.images.task import PICTURE
from tarnn.tasks.text.task import SAMPLE
from tarnn.tasks.text.windowed import DATA
from tarnn.training import lock
from tarnn.training.checkpoints import DOOMED, PARTIAL

SETTINGS, LOG, CHECKPOINTS = "settings.json", "log.jsonl", "checkpoints"
FILES = (
    LOG,
    SAMPLE,
    PICTURE,
    "model.safetensors",
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "vocab.json",
    "added_tokens.json",
    "preprocessor_config.json",
    SETTINGS,
)


def refuse_stranger(folder: Path) -> None:
    """UserError where a folder holds files that are none of ours: nothing is written there."""
    if folder.exists() and not folder.is_dir():
        raise UserError(f"--out {folder} is a file; expected a folder, or a name that is free.")
    if not folder.exists() or (folder / SETTINGS).exists():
        return
    strange = [p.name for p in sorted(folder.iterdir()) if p.name not in (partial_name(SETTINGS), lock.NAME)]
    if strange:
        raise UserError(
            f"{folder} holds {', '.join(strange[:3])}{' …' if len(strange) > 3 else ''} and no run of `tarnn "
            f"train` (no {SETTINGS}); name another folder with --out."
        )


def claim(settings: RunSettings) -> dict[str, Any] | None:
    """Make `settings.out` the folder of this run; returns what an earlier run saved there, if it is resumed.

    Raises UserError where the folder holds a run (and neither resume nor overwrite was asked for), or a run with
    other settings.
    """
    folder, saved = settings.out, None
    if (folder / SETTINGS).exists():
        if settings.overwrite or not begun(folder):
            clear(folder)
        elif settings.resume:
            saved = read_settings(folder)
            refuse_differences(settings, saved, folder)
        else:
            raise UserError(
                f"{folder} holds a run already; --resume goes on with it, --overwrite deletes it, and "
                "another --out leaves it alone."
            )
    folder.mkdir(parents=True, exist_ok=True)
    if saved is None:
        write_settings(folder, {"settings": settings.as_json()})
    return saved


def begun(folder: Path) -> bool:
    """Whether anything was trained there: a start that failed over its text is no run to protect."""
    log = folder / LOG
    return (log.exists() and log.stat().st_size > 0) or any(folder.glob(f"{CHECKPOINTS}/checkpoint-*"))


def refuse_differences(settings: RunSettings, saved: dict[str, Any], folder: Path) -> None:
    differences = settings.differences(saved["settings"])
    if differences:
        named = "; ".join(
            f"{name} was {json.dumps(before)}, is {json.dumps(now)}" for name, before, now in differences[:3]
        )
        raise UserError(
            f"{folder} holds a run with other settings: {named}. --resume takes the settings that the run "
            "began with; for others name another --out, or --overwrite."
        )


def read_settings(folder: Path) -> dict[str, Any]:
    saved = read_json(folder / SETTINGS)
    if not isinstance(saved.get("settings"), dict):
        raise UserError(f"{folder / SETTINGS} has no settings in it; start again with --overwrite.")
    return saved


def write_settings(folder: Path, content: dict[str, Any]) -> None:
    """Whole or not at all: written aside, then renamed."""
    partial = folder / partial_name(SETTINGS)
    partial.write_text(json.dumps(content, indent=2) + "\n")
    os.replace(partial, folder / SETTINGS)


def partial_name(name: str) -> str:
    return name + ".partial"


def clear(folder: Path) -> None:
    """Delete what a run wrote, and nothing else. Folders go by a rename first, the settings go last."""
    for name in (CHECKPOINTS, DATA):
        shutil.rmtree(folder / DOOMED, ignore_errors=True)
        if (folder / name).exists():
            (folder / name).rename(folder / DOOMED)
    for name in (DOOMED, PARTIAL, DATA + ".partial"):
        shutil.rmtree(folder / name, ignore_errors=True)
    for name in FILES:
        (folder / name).unlink(missing_ok=True)
