"""A training run: every choice in one checked, frozen record that is printed, saved, compared on resume."""

import json
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, ClassVar

from tarnn.errors import UserError

DEFAULT_STEPS = 1000
# What may differ when a run is resumed: how long it goes on, how fast, and what is looked at on the way.
MAY_CHANGE = {
    "out", "steps", "epochs", "max_minutes", "learning_rate", "eval_every", "save_every", "keep",
    "sample_tokens", "sample_images", "resume", "overwrite",
}  # fmt: skip


@dataclass(frozen=True)
class RunSettings:
    """What runs of `tarnn train` have in common; the fields are its options, with the same defaults.

    Model choices that are None are taken from `config`, else from `preset`. Without steps, epochs and
    max_minutes a run has 1,000 steps; where more than one is given, the first to be reached ends it.
    """

    task: ClassVar[str]

    sources: tuple[str, ...]
    out: Path
    val: str | None = None
    val_fraction: float | None = None
    # model
    preset: str = "modern"
    config: Path | None = None
    hidden_size: int | None = None
    layers: int | None = None
    heads: int | None = None
    attention: str | None = None
    feature_map: str | None = None
    feature_map_options: dict[str, Any] = field(default_factory=dict)
    redraw_every: int = 1000
    decay: str | None = None
    position: str | None = None
    dropout: float | None = None
    # length and speed
    steps: int | None = None
    epochs: float | None = None
    max_minutes: float | None = None
    batch_size: int = 16
    accumulate: int = 1
    learning_rate: float | None = None
    bf16: bool = False
    gradient_checkpointing: bool = False
    seed: int = 0
    # what is kept and when
    eval_every: int = 250
    save_every: int = 250
    keep: int = 2
    resume: bool = False
    overwrite: bool = False
    training_arguments: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.steps is None and self.epochs is None and self.max_minutes is None:
            object.__setattr__(self, "steps", DEFAULT_STEPS)
        if self.learning_rate is None:
            object.__setattr__(self, "learning_rate", self.usual_learning_rate)
        for name in (
            "context", "steps", "batch_size", "accumulate", "eval_every", "save_every", "keep", "mixtures"
        ):  # fmt: skip
            value = getattr(self, name, None)
            if value is not None and value < 1:
                raise UserError(f"{option(name)} {value} is not possible; expected 1 or more.")
        for name in ("epochs", "max_minutes", "learning_rate"):
            value = getattr(self, name)
            if value is not None and not 0 < value < float("inf"):
                raise UserError(f"{option(name)} {value} is not possible; expected a number above 0.")
        for name in ("seed", "redraw_every", "sample_tokens", "sample_images"):
            if (value := getattr(self, name, 0)) < 0:
                raise UserError(f"{option(name)} {value} is not possible; expected 0 or more.")
        if self.preset not in ("modern", "paper"):
            raise UserError(f"--preset {self.preset} is not known; expected modern or paper.")
        if self.resume and self.overwrite:
            raise UserError("--resume goes on with a run and --overwrite deletes it; give one of them.")
        if self.val is not None and self.val_fraction is not None:
            raise UserError(
                "--val names a source of its own and --val-fraction splits one off; give one of them."
            )

    @property
    def usual_learning_rate(self) -> float:
        return 1e-3

    @property
    def recipe(self) -> dict[str, Any]:
        """Fields of TrainingArguments that this kind of run sets otherwise than `training_arguments` does."""
        return {}

    @property
    def log_every(self) -> int:
        """Steps between lines of the log: at most 10, and a divisor of save_every.

        Each line holds the mean loss since the line before. As every checkpoint falls on a line, a resumed
        run writes the very lines of an uninterrupted one.
        """
        return next(n for n in range(10, 0, -1) if self.save_every % n == 0)

    def as_json(self) -> dict[str, Any]:
        return json.loads(json.dumps(asdict(self), default=str))

    def differences(self, saved: dict[str, Any]) -> list[tuple[str, Any, Any]]:
        """(option, saved value, value now) of all choices that a resumed run must share and does not."""
        now = self.as_json()
        keys = sorted((set(now) | set(saved)) - MAY_CHANGE)
        return [(option(k), saved.get(k), now.get(k)) for k in keys if saved.get(k) != now.get(k)]


@dataclass(frozen=True)
class TrainSettings(RunSettings):
    """A run of `tarnn train` on text."""

    task: ClassVar[str] = "text"

    text_field: str = "text"
    tokenizer: str = "bytes"
    context: int = 256
    sample_tokens: int = 256


@dataclass(frozen=True)
class ImageSettings(RunSettings):
    """A run of `tarnn train --task image`. The preset "paper" is trained as the paper's scripts do: RAdam, constant."""

    task: ClassVar[str] = "image"

    likelihood: str | None = None
    mixtures: int | None = None
    class_conditional: bool = False
    optimizer: str | None = None
    sample_images: int = 16

    def __post_init__(self) -> None:
        if self.optimizer is None:
            object.__setattr__(self, "optimizer", "radam" if self.preset == "paper" else "adamw")
        if self.optimizer not in ("adamw", "radam"):
            raise UserError(f"--optimizer {self.optimizer} is not known; expected adamw or radam.")
        super().__post_init__()
        if len(self.sources) != 1:
            raise UserError(
                f"images come from one source at a time; got {len(self.sources)}: {', '.join(self.sources)}. Put them "
                "into one folder."
            )

    @property
    def usual_learning_rate(self) -> float:
        return 1e-4 if self.preset == "paper" else 1e-3

    @property
    def recipe(self) -> dict[str, Any]:
        """RAdam as the paper's scripts have it: weight decay 0.01, β₂ = 0.999, a constant learning rate."""
        if self.optimizer != "radam":
            return {}
        return {"weight_decay": 0.01, "adam_beta2": 0.999, "lr_scheduler_type": "constant", "warmup_steps": 0}

    def as_json(self) -> dict[str, Any]:
        return {"task": self.task, **super().as_json()}


TASKS = {kind.task: kind for kind in (TrainSettings, ImageSettings)}


def option(name: str) -> str:
    """The name of a field on the command line."""
    others = {"sources": "SOURCE", "training_arguments": "--set", "feature_map_options": "--map-option"}
    return others.get(name, "--" + name.replace("_", "-"))


def only_for(task: str) -> dict[str, Any]:
    """The options that no other task has, and their defaults."""
    shared = {f.name for f in fields(RunSettings)}
    return {f.name: f.default for f in fields(TASKS[task]) if f.name not in shared}
