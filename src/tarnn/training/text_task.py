"""Training on text: the corpus, the model for its tokenizer, the sample at the end."""

import math
from typing import Any

from transformers import TrainingArguments

from tarnn.data.corpus import DESCRIPTION, Corpus, Digest, load, prepare
from tarnn.data.sources import read_documents
from tarnn.data.windows import Windows
from tarnn.errors import UserError
from tarnn.models import TarnnForCausalLM
from tarnn.training.folder import DATA
from tarnn.training.model import model_config
from tarnn.training.sample import write_sample
from tarnn.training.settings import TrainSettings
from tarnn.training.trainer import TextTrainer


class TextTask:
    """What `training.run` asks of a task, for text. A token is the unit of progress, a byte that of the measure."""

    name, unit, counted = "text", "bits_per_byte", "tokens"

    def __init__(self, settings: TrainSettings, first: bool, saved: dict[str, Any] | None):
        """Reads and prepares the text; the `first` process does, others find what it has written."""
        self.settings = settings
        self.corpus = ready_corpus(settings, first)
        self.windows = Windows(self.corpus.train, settings.context)
        self.epoch = len(self.corpus.train)
        self.bytes_per_token = self.corpus.bytes_per_token
        self.validates = len(self.corpus.validation) > 1
        self.facts = self.corpus.facts

    @staticmethod
    def check(settings: TrainSettings) -> None:
        """Refuses what can be refused before the text is read."""
        model_config(settings)

    def per_step(self, args: TrainingArguments) -> int:
        """Tokens in an optimizer's step."""
        return (
            args.train_batch_size * args.gradient_accumulation_steps * args.world_size * self.settings.context
        )

    def model(self) -> TarnnForCausalLM:
        return TarnnForCausalLM(model_config(self.settings, self.corpus.tokenizer))

    def trainer(self, **options: Any) -> TextTrainer:
        return TextTrainer(corpus=self.corpus, windows=self.windows, **options)

    def sample(self) -> str:
        """What the trained model writes; also in sample.txt."""
        settings = self.settings
        return write_sample(settings.out, self.corpus.tokenizer, settings.seed, settings.sample_tokens)

    def run_facts(self) -> dict[str, Any]:
        return {"validation_context": min(self.windows.context, max(0, len(self.corpus.validation) - 1))}

    def rows(self) -> dict[str, str]:
        """Lines of the table of settings."""
        settings, trained, held_out = self.settings, self.facts["train"], self.facts["validation"]
        return {
            "text": f"{', '.join(settings.sources)}: {trained['bytes']:,} bytes in {trained['documents']:,} "
            f"documents, {trained['tokens']:,} tokens ({settings.tokenizer})",
            "validation": f"{held_out['bytes']:,} bytes, {settings.val or 'the end of the text'}"
            if held_out["tokens"] > 1
            else "none: the latest model is kept, not the best",
        }

    def step_row(self, per_step: int) -> str:
        return f"{per_step:,} tokens: batch {self.settings.batch_size} × context {self.settings.context}"

    def steps_of(self, epochs: float, per_step: int) -> int:
        return max(1, math.ceil(epochs * self.epoch / per_step))


def ready_corpus(settings: TrainSettings, first: bool) -> Corpus:
    """The text as ids: prepared, or as an interrupted run left it if the sources still say the same.

    The `first` process reads the sources; others find what it has written.
    """
    folder = settings.out / DATA
    documents = read_documents(settings.sources, text_field=settings.text_field)
    held_out = None
    if settings.val is not None:
        held_out = read_documents([settings.val], text_field=settings.text_field)
    if not (folder / DESCRIPTION).exists():
        return prepare(
            documents, folder, tokenizer=settings.tokenizer, validation_fraction=settings.val_fraction,
            validation_documents=held_out,
        )  # fmt: skip
    corpus = load(folder)
    if first and not (
        Digest(documents).hex() == corpus.facts["digest"]
        and (held_out is None or Digest(held_out).hex() == corpus.facts["validation"]["digest"])
    ):
        raise UserError(
            f"the text of {', '.join(settings.sources)} is no longer what the run in {settings.out} began "
            "with; restore it to --resume, or start again with --overwrite."
        )
    return corpus
