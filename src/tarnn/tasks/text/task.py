"""Text: a causal language model on the tokens of a corpus."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from tarnn.data.sources import read_documents
from tarnn.errors import UserError
from tarnn.tasks.base import Report, Task, Trained, facts_of_held_out, name_data, register
from tarnn.tasks.settings import MODEL, RunSettings, flag_of, option
from tarnn.tasks.text.corpus import DESCRIPTION, Corpus, Digest, ids_of, load, prepare

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor

    from tarnn.tasks.text.windows import ValidationBatches, WindowSampler

SAMPLE_START = 32  # tokens of held-out text that the sample goes on from
DATA, SAMPLE = "data", "sample.txt"  # in the folder of a run: the prepared text, and what the model writes


@dataclass(frozen=True)
class TokenSettings(RunSettings):
    """What runs on text have in common."""

    text_field: str = option("text", "The field that holds the text in jsonl and datasets.", "Text")
    tokenizer: str = option(
        "bytes", "bytes, amino-acids, bpe:N (trained on the text, N ids), or a tokenizer's folder.", "Text"
    )


@dataclass(frozen=True)
class WindowSettings(TokenSettings):
    """The same where a text is cut into sequences of one length."""

    context: int = option(256, "Tokens in a training sequence.", "Text", least=1)
    start: Path | None = option(  # noqa: RUF009
        None, "Go on from the weights of this run, with its shape and tokenizer.", MODEL, flag="--from", metavar="RUN"
    )

    def __post_init__(self) -> None:
        if self.start is not None:
            refuse_other_shape(self)
            object.__setattr__(self, "tokenizer", str(self.start))
        super().__post_init__()


@dataclass(frozen=True)
class TextSettings(WindowSettings):
    """A run of `tarnn train` on text."""

    sample_tokens: int = option(256, "Length of the sample at the end; 0: none.", "Text", least=0, may_change=True)


@register
class TextTask(Task):
    """A token is the unit of progress, a byte that of the measure; every validation token but the first counts once."""

    name, model_type, of = "text", "tarnn", "text"
    architecture = "TarnnForCausalLM"
    settings_class: ClassVar[type[RunSettings]] = TextSettings
    examples: Any  # Windows

    def __init__(self, settings: Any, first: bool, saved: dict[str, Any] | None, report: Report):
        import torch

        from tarnn.tasks.text.windows import Windows

        self.settings: Any = settings
        self.corpus = ready_corpus(settings, first, report)
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
    def to_evaluate(cls, trained: Trained, sources: Sequence[str], report: Report) -> TextTask:
        import torch

        from tarnn.data.saved_tokenizer import check_ids, open_saved_tokenizer
        from tarnn.data.tokenizers import token_bytes

        task = cls.__new__(cls)
        task.settings, task.tokenizer = trained.settings, open_saved_tokenizer(trained.folder)
        task.bytes_per_id = torch.tensor([len(x) for x in token_bytes(task.tokenizer)])
        if sources:
            documents = read_documents(sources, text_field=trained.settings.text_field, report=report)
            task.hold_out(ids_of(task.tokenizer, documents))
        else:
            task.hold_out(held_out_ids(trained, cls))
        task.evaluated = ", ".join(sources) or f"the text that {trained.folder} held out"
        if not task.validation_context:
            raise UserError(f"{task.evaluated} has fewer than two tokens; expected more text to measure on.")
        check_ids(task.held_out, trained.config.vocab_size)
        task.evaluated += f": {len(task.held_out):,} tokens in windows of {task.validation_context:,}"
        return task

    @staticmethod
    def classes() -> tuple[Any, Any]:
        from tarnn.models import TarnnConfig, TarnnForCausalLM

        return TarnnConfig, TarnnForCausalLM

    @classmethod
    def recurrent(cls) -> tuple[Any, Any]:
        from tarnn.huggingface.config import TarnnConfig
        from tarnn.models.backbone import TextModel

        return TarnnConfig, TextModel

    @staticmethod
    def check(settings: WindowSettings) -> None:
        text_config(settings)

    def config(self) -> Any:
        return text_config(self.settings, self.tokenizer)

    def model(self) -> Any:
        if self.settings.start is None:
            return super().model()
        return self.classes()[1].from_pretrained(
            self.settings.start, config=self.config(), dtype="float32", local_files_only=True, use_safetensors=True
        )

    def sampler(self, num_examples: int, seed: int) -> WindowSampler:
        from tarnn.tasks.text.windows import WindowSampler

        return WindowSampler(self.examples, num_examples, seed)

    @staticmethod
    def collate(rows: Any) -> dict[str, Tensor]:
        from tarnn.tasks.text.windows import collate

        return collate(rows)

    def validation(self, batch_size: int) -> ValidationBatches | None:
        from tarnn.tasks.text.windows import ValidationBatches

        if not self.validation_context:
            return None
        return ValidationBatches(self.held_out, self.validation_context, batch_size)

    def loss(self, model: Any, batch: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        """Mean cross-entropy in nats per token."""
        from torch.nn.functional import cross_entropy

        logits = model(input_ids=batch["input_ids"], use_cache=False).logits
        return cross_entropy(logits.float().flatten(0, 1), batch["targets"].flatten()), {"logits": logits}

    def sums(self, model: Any, batch: dict[str, Tensor]) -> Tensor:
        import torch
        from torch.nn.functional import cross_entropy

        from tarnn.numerics import widest
        from tarnn.tasks.text.windows import IGNORED

        targets = batch["targets"]
        logits = model(input_ids=batch["input_ids"], use_cache=False).logits.float()
        nats = cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORED, reduction="sum")
        counted = targets[targets != IGNORED]
        num_bytes = self.bytes_per_id.to(targets.device)[counted].sum()
        nats = nats.to(widest(nats.device))
        return torch.stack([nats, nats.new_tensor(len(counted)), num_bytes.to(nats.dtype)])

    @property
    def has_sample(self) -> bool:
        return self.settings.sample_tokens > 0

    def sample(self, max_seconds: float | None) -> str:
        """How the model in the run's folder goes on from the beginning of the held-out text, at temperature 0.8; also in
        sample.txt. Without held-out text from that of the training text."""
        import torch

        settings = self.settings
        model = self.classes()[1].from_pretrained(settings.out).eval()
        longest = model.config.max_position_embeddings or settings.sample_tokens + SAMPLE_START
        before = self.held_out if len(self.held_out) else self.corpus.train
        start = torch.from_numpy(before[: min(SAMPLE_START, longest - 1)].astype("int64"))[None]
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(settings.seed)
            ids = model.generate(
                start,
                attention_mask=torch.ones_like(start),
                do_sample=True,
                temperature=0.8,
                top_k=0,
                max_new_tokens=min(settings.sample_tokens, longest - start.shape[1]),
                max_time=max_seconds,
            )
        text = str(self.tokenizer.decode(ids[0], skip_special_tokens=True))
        (settings.out / SAMPLE).write_text(text, encoding="utf-8")
        return text

    def run_facts(self) -> dict[str, Any]:
        return {"validation_context": self.validation_context}

    def rows(self) -> dict[str, str]:
        settings, trained, held_out = self.settings, self.data_facts["train"], self.data_facts["validation"]
        return {
            "text": f"{', '.join(settings.sources)}: {trained['bytes']:,} bytes in {trained['documents']:,} "
            f"documents, {trained['tokens']:,} tokens ({settings.tokenizer})",
            "validation": f"{held_out['bytes']:,} bytes, {settings.val or 'the end of the text'}"
            if held_out["tokens"] > 1
            else "none: the latest model is kept, not the best",
        }

    def step_row(self, per_step: int) -> str:
        return f"{per_step:,} tokens: batch {self.settings.batch_size} × context {self.settings.context}"


def text_config(settings: WindowSettings, tokenizer: Any = None, causal: bool = True) -> Any:
    """The config that the settings ask for, with the tokenizer's vocabulary. Without one, all else is checked.

    Raises UserError for whatever the config refuses, and for a context beyond the positions that the model has.
    """
    from tarnn.tasks.model import chosen, make_config

    choices = chosen(settings) if settings.start is None else shape_of(settings)
    if choices.setdefault("causal", causal) is not causal:
        raise UserError(
            f"causal is {choices['causal']} in {settings.config or settings.start}, but {causal} for --task {settings.task}."
        )
    if choices.get("position") == "learned":
        choices.setdefault("max_position_embeddings", settings.context)
    if tokenizer is not None:
        size, end = len(tokenizer), tokenizer.eos_token_id
        if choices.get("vocab_size", size) != size:
            raise UserError(
                f"vocab_size is {choices['vocab_size']} in {settings.config or settings.start}, but the tokenizer has {size} "
                "ids; leave it out."
            )
        choices |= {"vocab_size": size, "bos_token_id": end, "eos_token_id": end, "pad_token_id": end}
    config = make_config(TextTask.classes()[0], settings, choices)
    longest = config.max_position_embeddings
    if longest is not None and settings.context > longest:
        raise UserError(
            f"--context {settings.context} is beyond the {longest} positions of the model "
            "(max_position_embeddings); expected at most as many, or raise that number in --config."
        )
    return config


def refuse_other_shape(settings: WindowSettings) -> None:
    """UserError for options of the model or its tokenizer, which --from brings along."""
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
    if task_of(saved) is not task:
        raise UserError(
            f"--from {settings.start} holds a {saved.get('model_type')!r:.60} model of another task; expected one of --task "
            f"{settings.task}."
        )
    kept = {name: value for name, value in saved.items() if name in task.classes()[0].known_keys()}
    return kept | ({} if settings.dropout is None else {"dropout": settings.dropout})


def held_out_ids(trained: Trained, task: type[Task]) -> np.ndarray:
    """The validation text of a run, as its folder keeps it."""
    facts_of_held_out(trained, task)
    folder = trained.settings.out / DATA
    if not (folder / DESCRIPTION).exists():
        raise UserError(f"{folder} is gone, where the run kept what it held out. {name_data(trained)}")
    return load(folder).validation


def ready_corpus(settings: WindowSettings, first: bool, report: Report) -> Corpus:
    """The text as ids: prepared, or as an interrupted run left it if the sources still say the same.

    The `first` process reads the sources; others find what it has written.
    """
    folder = settings.out / DATA

    def read(sources: Sequence[str]):
        return read_documents(sources, text_field=settings.text_field, report=report)

    held_out = None if settings.val is None else read([settings.val])
    if not (folder / DESCRIPTION).exists():
        return prepare(
            read(settings.sources),
            folder,
            tokenizer=settings.tokenizer,
            validation_fraction=settings.val_fraction,
            validation_documents=held_out,
            report=report,
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
