"""Masked text: an encoder that guesses hidden tokens from both sides."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

from tarnn.data.tokenizers import MASK
from tarnn.errors import UserError
from tarnn.log import Log
from tarnn.tasks.base import Trained, register, scored
from tarnn.tasks.settings import option
from tarnn.tasks.text.windowed import WindowSettings, WindowTask

if TYPE_CHECKING:
    from torch import Tensor

    from tarnn.data.examples import Batches
    from tarnn.tasks.text.windows import MaskedSampler, Masking


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
