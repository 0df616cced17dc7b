"""The folder of a run or a model: who may write there, its lock, what it holds, and how it is cleared."""

import json
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tarnn.data.tensor_file import flush
from tarnn.errors import UserError
from tarnn.json_file import read_json
from tarnn.tasks import RunSettings
from tarnn.tasks.images.task import PICTURE
from tarnn.tasks.text.task import SAMPLE
from tarnn.tasks.text.windowed import DATA
from tarnn.training.checkpoints import DOOMED, PARTIAL
from tarnn.training.model_card import CARD, is_unchanged

LOCK = "run.lock"


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Within, no other process trains into `folder`. UserError that names the process which does already."""
    try:
        import fcntl
    except ImportError:  # Windows
        yield
        return
    folder.mkdir(parents=True, exist_ok=True)
    handle = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise UserError(
                f"another run is training into {folder}{holder(folder / LOCK)}; wait until it ends, stop it, or name "
                "another folder with --out."
            ) from None
        os.ftruncate(handle, 0)
        os.write(handle, json.dumps({"pid": os.getpid(), "since": time.strftime("%Y-%m-%d %H:%M:%S")}).encode())
        yield
    finally:
        os.close(handle)


def holder(path: Path) -> str:
    """Return the holder of the lock, as far as it is known."""
    try:
        who = json.loads(path.read_text())
        return f" (process {who['pid']}, since {who['since']})"
    except (OSError, ValueError, KeyError, TypeError):
        return ""


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
    "adapter_config.json",
    "adapter_model.safetensors",
    "tarnn_base.json",
    SETTINGS,
)


def refuse_stranger(folder: Path) -> None:
    """UserError where a folder holds files that are none of ours: nothing is written there."""
    if folder.exists() and not folder.is_dir():
        raise UserError(f"--out {folder} is a file; expected a folder, or a name that is free.")
    if not folder.exists() or (folder / SETTINGS).exists():
        return
    strange = [p.name for p in sorted(folder.iterdir()) if p.name not in (partial_name(SETTINGS), LOCK)]
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
    if is_unchanged(folder / CARD):
        (folder / CARD).unlink()


BEGUN = {LOCK, "log.jsonl", "checkpoints", PARTIAL}  # what a training has before its first checkpoint


def check_new(out: Path) -> None:
    """UserError where `out` holds something already, or no folder can be made there: asked before any work."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UserError(f"{out} exists already; name a new folder.")
    check_writable(out)


def check_trained(out: Path, resume: bool) -> None:
    """Check a folder in which a training may be resumed, or was killed before its first checkpoint."""
    if out.exists() and not out.is_dir():
        raise UserError(f"{out} is a file; name a new folder.")
    if not resume and out.exists() and not is_only_begun(out):
        raise UserError(f"{out} exists already; name a new folder, or go on in it with --resume.")
    check_writable(out)


def check_writable(out: Path) -> None:
    """UserError where the folder, or the nearest one above it that is there, can't be written."""
    above = next(path for path in (out.absolute(), *out.absolute().parents) if path.exists())
    if not above.is_dir() or not os.access(above, os.W_OK | os.X_OK):
        raise UserError(f"{out} can't be made: {above} is no folder that can be written. Name another folder.")


@contextmanager
def whole_folder(out: Path) -> Iterator[Path]:
    """A folder beside `out` to write into, which takes that name once all is written.

    A command that is killed leaves `.NAME.partial`, which the next one for the same name removes.
    """
    beside = out.absolute().parent / f".{out.absolute().name}{PARTIAL}"
    with written_aside(beside):
        yield beside
        flush_all(beside)
        if out.exists():
            out.rmdir()
        beside.rename(out)


@contextmanager
def whole_model(out: Path) -> Iterator[Path]:
    """A folder within `out`, where a training lies, to write its model into; the files move to `out` when all are written,
    config.json last."""
    beside = out / PARTIAL
    with written_aside(beside):
        yield beside
        flush_all(beside)
        for path in sorted(beside.iterdir(), key=lambda path: path.name == "config.json"):
            os.replace(path, out / path.name)
        beside.rmdir()


@contextmanager
def written_aside(beside: Path) -> Iterator[None]:
    """An empty folder `beside`, which is gone where what is done within fails; UserError for a full disk."""
    shutil.rmtree(beside, ignore_errors=True)
    try:
        beside.mkdir(parents=True)
        yield
    except BaseException as error:
        from tarnn.training.error_messages import write_failure  # imports accelerate

        shutil.rmtree(beside, ignore_errors=True)
        if reason := write_failure(error):
            raise UserError(
                f"writing to {beside.parent} failed: {reason}. Nothing is left of it; make room and run the command again."
            ) from error
        raise


def is_only_begun(out: Path) -> bool:
    """Whether a folder holds nothing but what a training leaves before its first checkpoint."""
    return {path.name for path in out.iterdir()} <= BEGUN and not any(out.glob("checkpoints/checkpoint-*"))


def flush_all(folder: Path) -> None:
    for path in (*folder.rglob("*"), folder):
        flush(path)
