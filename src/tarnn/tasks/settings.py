"""The settings of a training run: every choice is declared once, here or in its task's file, with default, bounds and help.

A field is an option of `tarnn train`, a key of settings.json, and checked when the record is made. Nothing here
imports torch, so that a wrong option is refused at once.
"""

# ruff: noqa: RUF009 (an option is a dataclass field)

import json
from collections.abc import Callable, Sequence
from dataclasses import Field, asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, ClassVar, NoReturn

from tarnn.errors import UserError

DEFAULT_STEPS = 1000
DATA, MODEL, LENGTH, KEPT = "Data", "Model", "Length and speed", "What is kept"  # headings of --help
PATTERN = (
    "linear, gated_delta, mamba2, rwkv7, softmax, none, or a pattern over the layers: linear,linear,softmax (default: "
    "linear)."
)
NOTHING_HELD_OUT = "none: the latest model is kept, not the best"
VALIDATION = (
    "Validate on this part of the data: the end of a text, or images picked at random; 0: none (default: a tenth, at "
    "most 256 KB)."
)


def option(
    default: Any,
    help: str,
    heading: str | None = None,
    *,
    least: float | None = None,
    most: float | None = None,
    above: float | None = None,
    below: float | None = None,
    one_of: Sequence[str] = (),
    may_change: bool = False,
    flag: str | None = None,
    metavar: str | None = None,
    parse: Callable[[list[str]], dict[str, Any]] | None = None,
    key: str | None = None,
) -> Any:
    """A field that is an option.

    least, most, above, below: bounds of a number. one_of: the words it may be. may_change: a resumed run may have another
    value than the run before. flag: its name on the command line, where that is not the field's. parse: makes a
    dictionary of an option that may be given many times. key: of the model's config, where the option is one of its choices.
    """
    given = locals()
    value = {"default_factory": default} if default is dict else {"default": default}
    return field(metadata={k: x for k, x in given.items() if k != "default"}, **value)


def held_out_count(total: int, fraction: float | None, most: int) -> int:
    """How many of `total` a run holds out: --val-fraction of them, or by default a tenth, and then at most `most`."""
    return min(round(0.1 * total), most) if fraction is None else round(fraction * total)


def json_value(text: str) -> Any:
    """The value of a KEY=VALUE: JSON where it can be, else text."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def parse_assignments(assignments: list[str]) -> dict[str, Any]:
    """`key=value` strings as a dictionary."""
    parsed = {}
    for assignment in assignments:
        key, equals, text = assignment.partition("=")
        if not equals:
            raise UserError(
                f"--set {assignment} has no value; expected --set key=value, such as --set weight_decay=0.1."
            )
        parsed[key] = json_value(text)
    return parsed


def parse_map_options(assignments: list[str]) -> dict[str, dict[str, Any]]:
    """`map.option=value` strings as a config has them: {"favor": {"num_features": 128}}."""
    parsed: dict[str, dict[str, Any]] = {}
    for assignment in assignments:
        key, equals, text = assignment.partition("=")
        name, dot, what = key.partition(".")
        if not equals or not dot:
            raise UserError(
                f"--map-option {assignment} is not an option of a map; expected map.option=value, such as "
                "favor.num_features=128."
            )
        parsed.setdefault(name, {})[what] = json_value(text)
    return parsed


@dataclass(frozen=True)
class RunSettings:
    """Options of the runs of all tasks.

    Model choices that are None are taken from `config`, else from `preset`. Without steps, epochs and
    max_minutes a run has 1,000 steps; where more than one is given, the first to be reached ends it.
    """

    task: ClassVar[str]  # the name of the task whose settings these are

    sources: tuple[str, ...]
    out: Path = field(metadata={"may_change": True})
    val: str | None = option(None, "Validate on this source.", DATA)
    val_fraction: float | None = option(None, VALIDATION, DATA, least=0, below=1)
    preset: str = option(
        "modern", "modern, or paper: the model of the paper of 2020.", MODEL, one_of=("modern", "paper")
    )
    config: Path | None = option(None, "A JSON file of TarnnConfig's keys; options win over it.", MODEL)
    hidden_size: int | None = option(None, "Channels (default: 256).", MODEL, least=1, key="hidden_size")
    layers: int | None = option(
        None, "Blocks (default: 4; paper 8).", MODEL, least=1, most=10_000, key="num_hidden_layers"
    )
    heads: int | None = option(
        None, "Attention heads (default: 4; paper 8).", MODEL, least=1, key="num_attention_heads"
    )
    attention: str | None = option(None, PATTERN, MODEL, key="attention")
    feature_map: str | None = option(
        None,
        "elu, relu, dpfp, hedgehog, favor, oprf … (default: elu), or a pattern over the layers.",
        MODEL,
        key="feature_map",
    )
    feature_map_options: dict[str, Any] = option(
        dict,
        "An option of a feature map, such as favor.num_features=128.",
        MODEL,
        flag="--map-option",
        metavar="MAP.OPTION=VALUE",
        parse=parse_map_options,
    )
    redraw_every: int = option(
        1000, "Steps between new draws of random features; 0: keep the first draw.", MODEL, least=0
    )
    decay: str | None = option(None, "none, head, token or channel (default: the preset's).", MODEL, key="decay")
    position: str | None = option(
        None,
        "rotary, sinusoidal, learned or none; for images also grid (default: the preset's).",
        MODEL,
        key="position",
    )
    dropout: float | None = option(None, "On the embedding and in every block (default: 0).", MODEL, key="dropout")
    steps: int | None = option(
        None,
        f"Optimizer steps (default: {DEFAULT_STEPS}, if nothing else ends the run).",
        LENGTH,
        least=1,
        most=999_999_999,
        may_change=True,
    )
    epochs: float | None = option(None, "Passes over the data.", LENGTH, above=0, may_change=True)
    max_minutes: float | None = option(
        None, "The time for the whole command; the learning rate follows the clock.", LENGTH, above=0, may_change=True
    )
    batch_size: int = option(16, "Sequences or images per batch, on each device.", LENGTH, least=1, most=10**9)
    accumulate: int = option(1, "Batches per step.", LENGTH, least=1, most=10**9)
    learning_rate: float | None = option(
        None, "The highest one (default: 1e-3; images with --preset paper: 1e-4).", LENGTH, above=0, may_change=True
    )
    bf16: bool = option(False, "Train in mixed precision.", LENGTH)
    device: str = option("auto", "cpu, cuda, mps …; auto: an accelerator if there is one.", LENGTH, may_change=True)
    threads: int | None = option(
        None, "Threads of the CPU (default: as torch has them).", LENGTH, least=1, most=4096, may_change=True
    )
    gradient_checkpointing: bool = option(
        False, "Save memory by computing activations twice.", LENGTH, flag="--gradient-checkpointing"
    )
    seed: int = option(0, "For the first weights, the order of the data, and dropout.", LENGTH, least=0, most=2**32 - 1)
    eval_every: int = option(250, "Steps between validations.", KEPT, least=1, most=10**9, may_change=True)
    save_every: int = option(250, "Steps between checkpoints.", KEPT, least=1, most=10**9, may_change=True)
    keep: int = option(2, "Checkpoints to keep.", KEPT, least=1, most=10**9, may_change=True)
    resume: bool = option(False, "Go on from the last complete checkpoint, if any.", KEPT, may_change=True)
    overwrite: bool = option(False, "Delete the run in --out first.", KEPT, may_change=True)
    training_arguments: dict[str, Any] = option(
        dict,
        "Any other field of Hugging Face's TrainingArguments.",
        flag="--set",
        metavar="KEY=VALUE",
        parse=parse_assignments,
    )

    def __post_init__(self) -> None:
        if self.steps is None and self.epochs is None and self.max_minutes is None:
            object.__setattr__(self, "steps", DEFAULT_STEPS)
        if self.learning_rate is None:
            object.__setattr__(self, "learning_rate", self.usual_learning_rate)
        for each in fields(self):
            check_bounds(each, getattr(self, each.name))
        if self.resume and self.overwrite:
            raise UserError("--resume goes on with a run and --overwrite deletes it; give one of them.")
        if self.val is not None and self.val_fraction is not None:
            raise UserError("--val names a source of its own and --val-fraction splits one off; give one of them.")

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
        return {"task": self.task, **json.loads(json.dumps(asdict(self), default=str))}

    def differences(self, saved: dict[str, Any]) -> list[tuple[str, Any, Any]]:
        """(option, saved value, value now) of all choices that a resumed run must share and does not."""
        now, saved = self.as_json(), {"task": "text", **saved}
        saved.pop("sequence_parallel", None)  # of older runs, which might change it
        free = {f.name for f in fields(self) if f.metadata.get("may_change")}
        keys = sorted((set(now) | set(saved)) - free)
        return [(flag_of(k), saved.get(k), now.get(k)) for k in keys if saved.get(k) != now.get(k)]


@dataclass(frozen=True)
class TokenSettings(RunSettings):
    """Options of all runs on text."""

    text_field: str = option("text", "The field that holds the text in jsonl and datasets.", "Text")
    tokenizer: str = option(
        "bytes", "bytes, amino-acids, bpe:N (trained on the text, N ids), or a tokenizer's folder.", "Text"
    )


def check_bounds(each: Field, value: Any) -> None:
    """Raises UserError where a number is out of its bounds, or a word is none of those known."""
    rules = {name: x for name in ("least", "most", "above", "below") if (x := each.metadata.get(name)) is not None}
    words = each.metadata.get("one_of")

    def refuse(expected: str, verdict: str = "is not possible") -> NoReturn:
        raise UserError(f"{flag_of(each.name)} {value} {verdict}; expected {expected}.")

    if value is None:
        return
    if words and value not in words:
        refuse(" or ".join(words), "is not known")
    if "above" in rules and not rules["above"] < value < float("inf"):
        refuse(f"a number above {rules['above']}")
    if "least" in rules and not value >= rules["least"]:
        refuse(f"{rules['least']} or more")
    if "below" in rules and not value < rules["below"]:
        refuse(f"a number below {rules['below']}")
    if "most" in rules and value > rules["most"]:
        refuse(f"{rules['most']:,} or less")


def flag_of(name: str) -> str:
    """The name of a field on the command line."""
    others = {
        "sources": "SOURCE",
        "training_arguments": "--set",
        "feature_map_options": "--map-option",
        "start": "--from",
    }
    return others.get(name, "--" + name.replace("_", "-"))
