"""Text: a causal language model on the tokens of a corpus."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tarnn.tasks.base import Sample, register, sums
from tarnn.tasks.settings import option
from tarnn.tasks.text.windowed import WindowSettings, WindowTask

if TYPE_CHECKING:
    from torch import Tensor

    from tarnn.tasks.text.windows import ValidationBatches, WindowSampler

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
    def recurrent(cls) -> tuple[Any, Any]:
        from tarnn.huggingface.config import TarnnConfig
        from tarnn.models.backbone import TextModel

        return TarnnConfig, TextModel

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
