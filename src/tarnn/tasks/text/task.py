"""Text: a causal language model on the tokens of a corpus, and an encoder that guesses hidden tokens from both sides."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from tarnn.data.tokenizers import MASK
from tarnn.errors import UserError
from tarnn.log import Log
from tarnn.tasks.base import Sample, Trained, register, scored, sums
from tarnn.tasks.settings import option
from tarnn.tasks.text.windowed import WindowSettings, WindowTask

if TYPE_CHECKING:
    from torch import Tensor

    from tarnn.data.examples import Batches
    from tarnn.tasks.text.windows import MaskedSampler, Masking, ValidationBatches, WindowSampler

SAMPLE_START = 32  # tokens of held-out text that the sample goes on from
SAMPLE = "sample.txt"  # in the folder of a run: what the model writes


@dataclass(frozen=True)
class TextSettings(WindowSettings):
    """A run of `tarnn train` on text."""

    sample_tokens: int = option(256, "Length of the sample at the end; 0: none.", "Text", least=0, may_change=True)


@register
class TextTask(WindowTask):
    """A byte is the unit of the measure."""

    name, of = "text", "text"
    architecture = "TarnnForCausalLM"
    settings_class = TextSettings
    targets = "targets"
    causal = True

    @classmethod
    def config_type(cls) -> Any:
        from tarnn.huggingface.config import TarnnConfig

        return TarnnConfig

    @classmethod
    def recurrent(cls) -> tuple[Any, Any]:
        from tarnn.models.backbone import TextModel
        from tarnn.models.config import ModelConfig

        return ModelConfig, TextModel

    def sampler(self, num_examples: int, seed: int) -> WindowSampler:
        from tarnn.tasks.text.windows import WindowSampler

        return WindowSampler(self.examples, num_examples, seed)

    def validation(self, batch_size: int) -> ValidationBatches | None:
        from tarnn.tasks.text.windows import ValidationBatches

        if not self.validation_context:
            return None
        return ValidationBatches(self.held_out, self.validation_context, batch_size)

    def loss(self, model: Any, batch: dict[str, Tensor], count: Tensor | None = None) -> Tensor:
        """Mean cross-entropy in nats per token."""
        from torch.nn.functional import cross_entropy

        logits = model(input_ids=batch["input_ids"], use_cache=False).logits
        nats = cross_entropy(
            logits.float().flatten(0, 1), batch["targets"].flatten(), reduction="mean" if count is None else "sum"
        )
        return nats if count is None else nats / count

    def outcome(self, model: Any, batch: dict[str, Tensor]) -> tuple[Tensor, list[Any]]:
        from torch.nn.functional import cross_entropy

        from tarnn.tasks.text.windows import IGNORED

        targets = batch["targets"]
        logits = model(input_ids=batch["input_ids"], use_cache=False).logits.float()
        nats = cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORED, reduction="sum")
        counted = targets[targets != IGNORED]
        return sums(nats, len(counted), self.bytes_per_id.to(targets.device)[counted].sum()), []

    @property
    def has_sample(self) -> bool:
        return self.settings.sample_tokens > 0

    def sample(self, max_seconds: float | None) -> Sample | None:
        """How the best model goes on from the beginning of the held-out text, at temperature 0.8; also in sample.txt.
        Without held-out text from that of the training text."""
        import torch

        from tarnn.tasks.checkpoint import open_model

        settings = self.settings
        if not self.has_sample:
            return None
        model = open_model(settings.out, tasks=(self.name,), whole=True)
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
        about = f"{SAMPLE_START} tokens of the text, and how the model goes on"
        return Sample(settings.out / SAMPLE, text, about)


@dataclass(frozen=True)
class MaskedLMSettings(WindowSettings):
    """A run of `tarnn train --task masked-lm`."""

    mask_probability: float = option(0.15, "The part of the tokens that is to be guessed.", "Text", above=0, most=1)


@register
class MaskedLMTask(WindowTask):
    """Text as `TextTask` reads it; a masked token is the unit of the measure."""

    name, of = "masked-lm", "text"
    architecture, next = "TarnnForMaskedLM", "predict"
    settings_class = MaskedLMSettings
    targets = "labels"
    causal = False
    unit, rates = "bits_per_token", ("accuracy",)

    def __init__(self, settings: MaskedLMSettings, first: bool, saved: dict[str, Any] | None, log: Log):
        from tarnn.tasks.text.windows import MaskedWindows

        super().__init__(settings, first, saved, log)
        self.tokenizer = with_mask(self.tokenizer)
        self.bytes_per_token = 1.0  # the measure is per token
        self.example = masked_example(self.tokenizer, self.corpus.train)
        self.examples = MaskedWindows(self.corpus.train, settings.context, self.masking())

    @staticmethod
    def open_tokenizer(folder: Path, vocab_size: int) -> Any:
        """One to which a mask can be added."""
        from tarnn.data.saved_tokenizer import open_saved_tokenizer

        return open_saved_tokenizer(folder)

    @classmethod
    def to_evaluate(cls, trained: Trained, sources: Sequence[str], log: Log) -> Self:
        task = super().to_evaluate(trained, sources, log)
        task.tokenizer = with_mask(task.tokenizer)
        task.example = masked_example(task.tokenizer, task.held_out)
        return task

    def masking(self) -> Masking:
        from tarnn.tasks.text.windows import Masking

        settings, special = self.settings, frozenset(self.tokenizer.all_special_ids)
        probability = settings.mask_probability
        return Masking(probability, self.tokenizer.mask_token_id, len(self.tokenizer), special, settings.seed)

    def sampler(self, num_examples: int, seed: int) -> MaskedSampler:
        from tarnn.tasks.text.windows import MaskedSampler

        return MaskedSampler(self.examples, num_examples, seed)

    def outcome(self, model: Any, batch: dict[str, Tensor]) -> tuple[Tensor, list[Any]]:
        return scored(model(**batch).logits, batch["labels"]), []

    def validation(self, batch_size: int) -> Batches | None:
        """Windows end to end, each with the same masks at each validation."""
        from tarnn.data.examples import Batches
        from tarnn.tasks.text.windows import MaskedWindows

        context = self.validation_context
        if not context:
            return None
        windows = MaskedWindows(self.held_out, context, self.masking())
        return Batches(windows, batch_size, range(0, len(windows), context))

    @classmethod
    def predict(cls, model: Any, reader: Any, inputs: Iterator[str], top: int) -> Iterator[dict[str, Any]]:
        """The text with its masks filled as "output", and the `top` likeliest tokens for each mask."""
        import torch

        backend = reader.backend_tokenizer
        foreign = getattr(reader, "mask_token", None)  # of a model of transformers
        name, plain = foreign or MASK, foreign is not None
        if (mask := backend.token_to_id(name)) is None:
            raise UserError(
                f"the model's tokenizer has no mask token ({name}), so no text can say where it is to guess. Take the tokenizer "
                "that the model was trained with: its tokenizer_config.json names a mask_token."
            )
        for text in inputs:
            ids = torch.tensor([backend.encode(text).ids], device=model.device)
            places = (ids[0] == mask).nonzero()[:, 0]
            if not len(places):
                raise UserError(f"{text:.60} has no mask; write {name} where the model is to guess.")
            best = model(ids).logits[0, places].float().softmax(-1).topk(min(top, model.config.vocab_size))
            ids[0, places] = best.indices[:, 0]
            guesses = [
                [{"token": reader.decode([i]), "probability": p} for i, p in zip(row.tolist(), shares.tolist())]
                for row, shares in zip(best.indices, best.values)
            ]
            yield {"output": reader.decode(ids[0].tolist(), skip_special_tokens=plain), "masks": guesses}


def masked_example(tokenizer: Any, ids: Any) -> str:
    """A few tokens of a text, and a mask."""
    return str(tokenizer.decode(ids[:16].astype("int64"), skip_special_tokens=True)) + MASK


def with_mask(tokenizer: Any) -> Any:
    """The tokenizer, with a mask as its last id where it has none."""
    if tokenizer.mask_token_id is None:
        tokenizer.add_special_tokens({"mask_token": MASK})
    return tokenizer
