"""Images: a model of pixels, one after the other; a value (a channel of a pixel) is a token, and a byte."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from tarnn.errors import UserError
from tarnn.log import Log
from tarnn.tasks.base import Sample, Task, Trained, register, sums
from tarnn.tasks.images.readers import Images, check_fit, part_of, parts_of, read_images, size
from tarnn.tasks.settings import NOTHING_HELD_OUT, RunSettings, held_out_count, option

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import TrainingArguments

    from tarnn.data.examples import ImageRows

PICTURE = "sample.png"  # in the folder of a run: images that the model draws
VALIDATION_VALUES = 1 << 18  # held out at most, by default


@dataclass(frozen=True)
class ImageSettings(RunSettings):
    """A run of `tarnn train --task image`. The preset "paper" is trained as the paper's scripts do: RAdam, constant."""

    likelihood: str | None = option(
        None, "logistic_mixture or categorical (default: logistic_mixture).", "Images", key="likelihood"
    )
    mixtures: int | None = option(
        None, "Components of the mixture (default: 10).", "Images", least=1, key="num_mixtures"
    )
    class_conditional: bool = option(
        False, "Learn to make images of a given class.", "Images", flag="--class-conditional"
    )
    optimizer: str | None = option(
        None,
        "adamw or radam (default: adamw; with --preset paper radam, constant).",
        "Images",
        one_of=("adamw", "radam"),
    )
    sample_images: int = option(16, "Images to draw at the end; 0: none.", "Images", least=0, may_change=True)

    def __post_init__(self) -> None:
        if self.optimizer is None:
            object.__setattr__(self, "optimizer", "radam" if self.preset == "paper" else "adamw")
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


@register
class ImageTask(Task):
    """Progress counts images; the measure is bits per value."""

    name, model_type, of = "image", "tarnn_image", "images"
    architecture, config_class = "TarnnForImageGeneration", "TarnnImageConfig"
    settings_class = ImageSettings
    unit, counted = "bits_per_dim", "images"
    settings: ImageSettings
    held_out: ImageRows | None

    def __init__(self, settings: ImageSettings, first: bool, saved: dict[str, Any] | None, log: Log):
        from tarnn.data.examples import ImageRows

        self.settings = settings
        whole = read_images(settings.sources[0])
        if settings.class_conditional and whole.labels is None:
            raise UserError(f"{whole.source} has no labels; leave --class-conditional out.")
        self.num_classes = whole.num_classes if settings.class_conditional else 0
        self.shape = whole.shape
        self.config()  # refuses before the images are split and hashed
        self.images, held_out = split(whole, settings)
        if held_out is not None:
            if held_out.digest == self.images.digest:
                raise UserError(
                    f"{held_out.source} is what is trained on, so the validation would measure nothing; name other images "
                    "with --val, or leave it out."
                )
            check_fit(held_out, whole.shape, self.num_classes, whole.source)
        self.examples = ImageRows(self.images, self.num_classes > 0)
        self.held_out = None if held_out is None else ImageRows(held_out, self.num_classes > 0)
        self.epoch = len(self.images)
        self.data_facts = {
            "train": facts_of(self.images),
            "validation": None if held_out is None else facts_of(held_out),
        }
        self.refuse_other_data(saved)

    @classmethod
    def to_evaluate(cls, trained: Trained, sources: Sequence[str], log: Log) -> ImageTask:
        from tarnn.data.examples import ImageRows

        task, settings, config = cls.__new__(cls), trained.settings, trained.config
        task.settings = settings
        if len(sources) > 1:
            raise UserError(f"images come from one source at a time; got {len(sources)}: {', '.join(sources)}.")
        if sources:
            images: Images | None = read_images(sources[0], parts=("test", "valid"))
        else:
            trained.held_out(cls.of)
            images = split(read_images(settings.sources[0]), settings)[1]
            trained.refuse_other(cls.of, images and facts_of(images))
        assert images is not None
        check_fit(images, (config.image_height, config.image_width, config.num_channels), config.num_classes)
        task.held_out = ImageRows(images, config.num_classes > 0)
        task.evaluated = f"{images.source}: {len(images):,} images"
        return task

    def config(self) -> Any:
        sizes = dict(zip(("image_height", "image_width", "num_channels"), self.shape))
        return self.make_config(self.settings, num_classes=self.num_classes, **sizes)

    @classmethod
    def config_type(cls) -> Any:
        from tarnn.huggingface.image_config import TarnnImageConfig

        return TarnnImageConfig

    @classmethod
    def recurrent(cls) -> tuple[Any, Any]:
        from tarnn.models.images import ImageModel, ImageModelConfig

        return ImageModelConfig, ImageModel

    def outcome(self, model: Any, batch: dict[str, Tensor]) -> tuple[Tensor, list[float]]:
        """With the bits per dimension of each image."""
        from tarnn.numerics import widest

        each, values = model(**batch).nats, batch["pixel_values"].numel()
        bits = [x * len(each) / (values * math.log(2)) for x in each.tolist()]
        return sums(each.sum(dtype=widest(each.device)), values, values), bits

    def details(self, outcomes: list[Any]) -> dict[str, Any]:
        """standard_error: of the mean bits per dimension, over images."""
        count = len(outcomes)
        if count < 2:
            return {}
        return {"standard_error": statistics.stdev(outcomes) / count**0.5}

    def trainer_options(self, args: TrainingArguments) -> dict[str, Any]:
        if self.settings.optimizer != "radam":
            return {}
        from torch.optim import RAdam

        betas = (args.adam_beta1, args.adam_beta2)
        radam = {"lr": args.learning_rate, "betas": betas, "eps": args.adam_epsilon}
        return {"optimizer_cls_and_kwargs": (RAdam, radam | {"decoupled_weight_decay": True})}

    def sample(self, max_seconds: float | None) -> Sample | None:
        """Images of the best model, of each class in turn, side by side in sample.png."""
        import torch

        from tarnn.decoding.pixels import pixel_sampler
        from tarnn.tasks.images.drawing import LEAST_SIDE, choose_labels, draw, image_grid, write_png
        from tarnn.tasks.images.opening import open_images

        count, file = self.settings.sample_images, self.settings.out / PICTURE
        if not count:
            return None
        model, step, _ = open_images(self.settings.out)
        sample = pixel_sampler(model.likelihood, generator=torch.Generator().manual_seed(self.settings.seed))
        labels = choose_labels((), count, model.config.num_classes)
        images = draw(model, count, count, sample, step=step, labels=labels)
        write_png(file, image_grid(images, least_side=LEAST_SIDE, labels=() if labels is None else labels.tolist()))
        return Sample(file)

    def run_facts(self) -> dict[str, Any]:
        return {"values_per_image": math.prod(self.images.shape)}

    def rows(self) -> dict[str, str]:
        """Lines of the table of settings."""
        classes = f" of {self.num_classes} classes" if self.num_classes else ""
        return {
            "images": f"{self.images.source}: {len(self.images):,} of {size(self.images.shape)}{classes}",
            "validation": NOTHING_HELD_OUT
            if self.held_out is None
            else f"{len(self.held_out):,} images, {self.held_out.images.source}",
        }

    def step_row(self, per_step: int) -> str:
        values = per_step * math.prod(self.images.shape)
        return f"{values:,} values: batch {self.settings.batch_size}"


def split(images: Images, settings: ImageSettings) -> tuple[Images, Images | None]:
    """Split the images: those to train on, and those held out (by the options, else the source's valid part, else some images).

    By default at most 262,144 values are held out, since each validation goes over all of them.
    """
    most = max(1, VALIDATION_VALUES // math.prod(images.shape))
    (source,) = settings.sources
    if settings.val is not None:
        return images, read_images(settings.val, parts=("valid", "test"))
    if settings.val_fraction is None and "valid" in parts_of(source):
        return images, first_of(read_images(f"{part_of(source)[0]}:valid"), most)
    count = held_out_count(len(images), settings.val_fraction, most)
    return images.split(count) if count else (images, None)


def first_of(images: Images, most: int) -> Images:
    if len(images) <= most:
        return images
    return replace(images.take(slice(most)), source=f"the first of {len(images):,} of {images.source}")


def facts_of(images: Images) -> dict[str, Any]:
    return {
        "source": images.source,
        "images": len(images),
        "shape": list(images.shape),
        "classes": images.num_classes,
        "digest": images.digest,
    }
