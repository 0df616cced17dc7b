"""The base of tasks on windows of a text: the prepared text, its windows, a run that goes on from another."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self

from tarnn.data.sources import read_documents
from tarnn.errors import UserError
from tarnn.log import Log
from tarnn.tasks.base import Task, Trained
from tarnn.tasks.settings import MODEL, NOTHING_HELD_OUT, TokenSettings, flag_of, option
from tarnn.tasks.text.corpus import DESCRIPTION, Corpus, Digest, ids_of, load, load_validation, prepare

if TYPE_CHECKING:
    import numpy as np

    from tarnn.tasks.text.windows import Windows

DATA = "data"  # in the folder of a run: the prepared text


@dataclass(frozen=True)
class WindowSettings(TokenSettings):
    """Options of runs that cut a text into sequences of one length."""

    context: int = option(256, "Tokens in a training sequence.", "Text", least=1)
    start: Path | None = option(  # noqa: RUF009
        None, "Go on from the weights of this run, with its shape and tokenizer.", MODEL, flag="--from", metavar="RUN"
    )

    def __post_init__(self) -> None:
        if self.start is not None:
            refuse_other_shape(self)
            object.__setattr__(self, "tokenizer", str(self.start))
        super().__post_init__()


class WindowTask(Task):
    """A token is the unit of progress; every validation token but the first counts once."""

    causal: ClassVar[bool]  # whether the model sees only what came before
    settings: Any
    examples: Windows

    def __init__(self, settings: Any, first: bool, saved: dict[str, Any] | None, log: Log):
        import torch

        from tarnn.tasks.text.windows import Windows

        self.settings: Any = settings
        self.corpus = ready_corpus(settings, first, log)
        self.examples = Windows(self.corpus.train, settings.context)
        self.epoch = len(self.corpus.train)
        self.per_example = settings.context
        self.bytes_per_token = self.corpus.bytes_per_token
        self.bytes_per_id = torch.from_numpy(self.corpus.bytes_per_id)
        self.tokenizer = self.corpus.tokenizer
        self.data_facts = self.corpus.facts
        self.hold_out(self.corpus.validation)

    def hold_out(self, ids: np.ndarray) -> None:
        """Take these ids for validation, in windows of at most the context; none where nothing but separators follows the
        first."""
        self.held_out = ids
        some = len(ids) > 1 and bool(self.bytes_per_id.numpy()[ids[1:]].any())
        self.validation_context = min(self.settings.context, len(ids) - 1) if some else 0

    @classmethod
    def to_evaluate(cls, trained: Trained, sources: Sequence[str], log: Log) -> Self:
        import torch

        from tarnn.data.saved_tokenizer import check_ids
        from tarnn.data.tokenizers import token_bytes

        task = cls.__new__(cls)
        task.settings, task.tokenizer = trained.settings, cls.open_tokenizer(trained.folder, trained.config.vocab_size)
        task.bytes_per_id = torch.tensor([len(x) for x in token_bytes(task.tokenizer)])
        if sources:
            documents = read_documents(sources, text_field=trained.settings.text_field, log=log)
            task.hold_out(ids_of(task.tokenizer, documents))
        else:
            task.hold_out(held_out_ids(trained, cls.of))
        task.evaluated = ", ".join(sources) or f"the text that {trained.folder} held out"
        if not task.validation_context:
            raise UserError(f"{task.evaluated} has fewer than two tokens; expected more text to measure on.")
        check_ids(task.held_out, trained.config.vocab_size)
        task.evaluated += f": {len(task.held_out):,} tokens in windows of {task.validation_context:,}"
        return task

    @staticmethod
    def open_tokenizer(folder: Path, vocab_size: int) -> Any:
        """Open the tokenizer of a trained model that is measured; one of 256 tokens may have none, and reads bytes."""
        from tarnn.decoding.lm import tokenizer_in

        return tokenizer_in(folder, vocab_size)

    @classmethod
    def make_config(cls, settings: Any, tokenizer: Any = None, longest: int | None = None, **of_data: Any) -> Any:
        """Also raises UserError for another causality than the task's, and a context beyond the model's positions."""
        from tarnn.tasks.model import chosen, make_config, vocabulary

        choices = chosen(settings) if settings.start is None else shape_of(settings)
        if choices.setdefault("causal", cls.causal) is not cls.causal:
            raise UserError(
                f"causal is {choices['causal']} in {settings.config or settings.start}, but {cls.causal} for --task {cls.name}."
            )
        of_data |= {} if tokenizer is None else vocabulary(tokenizer)
        config = make_config(cls.classes()[0], settings, choices, of_data, settings.context)
        longest = config.max_position_embeddings
        if longest is not None and settings.context > longest:
            raise UserError(
                f"--context {settings.context} is beyond the {longest} positions of the model "
                "(max_position_embeddings); expected at most as many, or raise that number in --config."
            )
        return config

    def model(self) -> Any:
        if self.settings.start is None:
            return super().model()
        from tarnn.tasks.checkpoint import fill_from

        return fill_from(self.settings.start, super().model())

    def run_facts(self) -> dict[str, Any]:
        return {"validation_context": self.validation_context}

    def rows(self) -> dict[str, str]:
        settings, trained, held_out = self.settings, self.data_facts["train"], self.data_facts["validation"]
        return {
            "text": f"{', '.join(settings.sources)}: {trained['bytes']:,} bytes in {trained['documents']:,} "
            f"documents, {trained['tokens']:,} tokens ({settings.tokenizer})",
            "validation": f"{held_out['bytes']:,} bytes, {settings.val or 'the end of the text'}"
            if held_out["tokens"] > 1
            else NOTHING_HELD_OUT,
        }

    def step_row(self, per_step: int) -> str:
        return f"{per_step:,} tokens: batch {self.settings.batch_size} × context {self.settings.context}"


def refuse_other_shape(settings: WindowSettings) -> None:
    """Raise UserError for options of the model or its tokenizer, which --from brings along."""
    for each in fields(settings):
        of_model = each.metadata.get("heading") == MODEL and each.name not in ("start", "redraw_every", "dropout")
        value = getattr(settings, each.name)
        if (of_model and value not in (None, each.default, {})) or (
            each.name == "tokenizer" and value not in (each.default, str(settings.start))
        ):
            raise UserError(
                f"{flag_of(each.name)} does not go with --from, which goes on with the model and the tokenizer of "
                f"{settings.start}; leave it out."
            )


def shape_of(settings: WindowSettings) -> dict[str, Any]:
    """The config of the model that --from names; UserError where there is none, or one of another task."""
    from tarnn.json_file import read_json
    from tarnn.tasks.base import TASKS, task_of

    assert settings.start is not None
    for name in ("config.json", "model.safetensors"):
        if not (settings.start / name).is_file():
            raise UserError(f"--from {settings.start} holds no checkpoint: it has no {name}. Name the folder of a run.")
    saved, task = read_json(settings.start / "config.json"), TASKS[settings.task]
    if (other := task_of(saved)) is not task:
        what = (
            "model of another task" if other else "model, which `tarnn train` can't train (docs/qwen.md shows what can)"
        )
        raise UserError(
            f"--from {settings.start} holds a {saved.get('model_type')!r:.60} {what}; expected one of --task {settings.task}."
        )
    kept = {name: value for name, value in saved.items() if name in task.classes()[0].known_keys()}
    return kept | ({} if settings.dropout is None else {"dropout": settings.dropout})


def held_out_ids(trained: Trained, of: str) -> np.ndarray:
    """Load the validation text of a run from its folder."""
    trained.held_out(of)
    folder = trained.settings.out / DATA
    if not (folder / DESCRIPTION).exists():
        raise UserError(f"{folder} is gone, where the run kept what it held out. {trained.name_data}")
    return load_validation(folder)


def ready_corpus(settings: WindowSettings, first: bool, log: Log) -> Corpus:
    """Prepare the text as ids, or load what an interrupted run prepared if the sources are still the same.

    The `first` process reads the sources; others find what it has written.
    """
    folder = settings.out / DATA

    def read(sources: Sequence[str]):
        return read_documents(sources, text_field=settings.text_field, log=log)

    held_out = None if settings.val is None else read([settings.val])
    if not (folder / DESCRIPTION).exists():
        return prepare(
            read(settings.sources),
            folder,
            tokenizer=settings.tokenizer,
            validation_fraction=settings.val_fraction,
            validation_documents=held_out,
            log=log,
        )
    corpus = load(folder)
    if first and not (
        Digest(read(settings.sources)).hex() == corpus.facts["digest"]
        and (held_out is None or Digest(held_out).hex() == corpus.facts["validation"]["digest"])
    ):
        raise UserError(
            f"the text of {', '.join(settings.sources)} is no longer what the run in {settings.out} began "
            "with; restore it to --resume, or start again with --overwrite."
        )
    return corpus
