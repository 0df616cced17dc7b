"""The trainers of each task: what the loss is, and what held-out data cost."""

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.utils.data import Sampler

from tarnn.data.corpus import Corpus
from tarnn.data.image_batches import ImageBatches, ImageRows, ImageSampler
from tarnn.data.image_batches import collate as collate_images
from tarnn.data.windows import IGNORED, ValidationBatches, Windows, WindowSampler, collate
from tarnn.training.safe_trainer import SafeTrainer


class TextTrainer(SafeTrainer):
    """Trains a causal language model on the windows of a corpus; every validation token but the first counts once."""

    def __init__(self, *, corpus: Corpus, windows: Windows, **kwargs: Any):
        self.windows = windows
        self.bytes_per_id = torch.from_numpy(corpus.bytes_per_id)
        batches = None
        if len(corpus.validation) > 1:
            context = min(windows.context, len(corpus.validation) - 1)
            batches = ValidationBatches(corpus.validation, context, kwargs["args"].eval_batch_size)
        super().__init__(
            batches=batches, train_dataset=windows, data_collator=collate, processing_class=corpus.tokenizer,
            **kwargs,
        )  # fmt: skip

    def sampler(self, num_examples: int, seed: int) -> Sampler[int]:
        return WindowSampler(self.windows, num_examples, seed)

    def batch_loss(self, model: Any, batch: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        """Mean cross-entropy in nats a token."""
        logits = model(input_ids=batch["input_ids"], use_cache=False).logits
        return cross_entropy(logits.float().flatten(0, 1), batch["targets"].flatten()), {"logits": logits}

    def batch_sums(self, model: Any, batch: dict[str, Tensor]) -> Tensor:
        targets = batch["targets"]
        logits = model(input_ids=batch["input_ids"], use_cache=False).logits.float()
        nats = cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORED, reduction="sum")
        counted = targets[targets != IGNORED]
        num_bytes = self.bytes_per_id.to(targets.device)[counted].sum()
        return torch.stack([nats.double(), num_bytes.new_tensor(len(counted)).double(), num_bytes.double()])


class ImageTrainer(SafeTrainer):
    """Trains a model of images; a value (a channel of a pixel) is a token, and a byte."""

    def __init__(self, *, rows: ImageRows, held_out: ImageRows | None, **kwargs: Any):
        batches = None if held_out is None else ImageBatches(held_out, kwargs["args"].eval_batch_size)
        self.num_images = len(rows)
        super().__init__(batches=batches, train_dataset=rows, data_collator=collate_images, **kwargs)

    def sampler(self, num_examples: int, seed: int) -> Sampler[int]:
        return ImageSampler(self.num_images, num_examples, seed)

    def batch_loss(self, model: Any, batch: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        """Mean nats a value."""
        out = model(**batch)
        return out.loss, {"logits": out.parameters}

    def batch_sums(self, model: Any, batch: dict[str, Tensor]) -> Tensor:
        nats, values = model(**batch).nats.double().sum(), batch["pixel_values"].numel()
        return torch.stack([nats, nats.new_tensor(values), nats.new_tensor(values)])
