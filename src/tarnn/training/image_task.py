"""Training on images: the images, those that are held out, the model of their size."""

import math
from typing import Any

import torch
from transformers import TrainingArguments

from tarnn.data.image_batches import ImageRows
from tarnn.data.images import Images, part_of, parts_of, read_images, size
from tarnn.errors import UserError
from tarnn.models import TarnnForImageGeneration
from tarnn.training.model import image_config
from tarnn.training.settings import ImageSettings
from tarnn.training.trainer import ImageTrainer

VALIDATION_FRACTION, VALIDATION_VALUES = 0.1, 1 << 18  # where nothing was asked for: of the images; at most


class ImageTask:
    """What `training.run` asks of a task, for images. An image is the unit of progress, a value that of the measure."""

    name, unit, counted = "images", "bits_per_dim", "images"

    def __init__(self, settings: ImageSettings, first: bool, saved: dict[str, Any] | None):
        self.settings = settings
        (source,) = settings.sources
        whole = read_images(source)
        if settings.class_conditional and whole.labels is None:
            raise UserError(f"{whole.source} has no labels; leave --class-conditional out.")
        self.num_classes = whole.num_classes if settings.class_conditional else 0
        self.config = image_config(settings, whole.shape, self.num_classes)
        self.images, self.held_out = split(whole, settings)
        if self.held_out is not None:
            check_like(self.held_out, whole, self.num_classes)
        self.epoch = len(self.images)
        self.bytes_per_token = 1.0
        self.validates = self.held_out is not None
        self.facts = {
            "train": facts_of(self.images),
            "validation": None if self.held_out is None else facts_of(self.held_out),
        }
        before = (saved or {}).get(self.name)
        if before is not None and before != self.facts:
            raise UserError(
                f"the images of {source} are no longer those that the run in {settings.out} began with; restore "
                "them to --resume, or start again with --overwrite."
            )

    @staticmethod
    def check(settings: ImageSettings) -> None:
        """Refuses what can be refused before the images are read."""
        if settings.config is None:  # which may name the images' size
            image_config(settings, (8, 8, 1))

    def per_step(self, args: TrainingArguments) -> int:
        """Images in an optimizer's step."""
        return args.train_batch_size * args.gradient_accumulation_steps * args.world_size

    def model(self) -> TarnnForImageGeneration:
        return TarnnForImageGeneration(self.config)

    def trainer(self, **options: Any) -> ImageTrainer:
        labelled = self.num_classes > 0
        held_out = None if self.held_out is None else ImageRows(self.held_out, labelled)
        if self.settings.optimizer == "radam":
            args = options["args"]
            betas = (args.adam_beta1, args.adam_beta2)
            radam = {"lr": args.learning_rate, "betas": betas, "eps": args.adam_epsilon}
            options["optimizer_cls_and_kwargs"] = (
                torch.optim.RAdam,
                radam | {"decoupled_weight_decay": True},
            )
        return ImageTrainer(rows=ImageRows(self.images, labelled), held_out=held_out, **options)

    def sample(self) -> str:
        """Images are drawn by the command, after the run."""
        return ""

    def run_facts(self) -> dict[str, Any]:
        return {"values_per_image": math.prod(self.images.shape)}

    def rows(self) -> dict[str, str]:
        """Lines of the table of settings."""
        classes = f" of {self.num_classes} classes" if self.num_classes else ""
        held_out = self.held_out
        return {
            "images": f"{self.images.source}: {len(self.images):,} of {size(self.images.shape)}{classes}",
            "validation": "none: the latest model is kept, not the best"
            if held_out is None
            else f"{len(held_out):,} images, {held_out.source}",
        }

    def step_row(self, per_step: int) -> str:
        values = per_step * math.prod(self.images.shape)
        return f"{values:,} values: batch {self.settings.batch_size}"

    def steps_of(self, epochs: float, per_step: int) -> int:
        return max(1, math.ceil(epochs * self.epoch / per_step))


def split(images: Images, settings: ImageSettings) -> tuple[Images, Images | None]:
    """Images to train on, and those held out: as asked for; else the source's own valid part; else some of its images.

    What was not asked for is at most 262,144 values, since each validation goes over all of them.
    """
    most = max(1, VALIDATION_VALUES // math.prod(images.shape))
    (source,) = settings.sources
    if settings.val is not None:
        return images, read_images(settings.val, parts=("valid", "test"))
    if settings.val_fraction is None and "valid" in parts_of(source):
        return images, first_of(read_images(f"{part_of(source)[0]}:valid"), most)
    fraction = VALIDATION_FRACTION if settings.val_fraction is None else settings.val_fraction
    if not 0 <= fraction < 1:
        raise UserError(
            f"a validation fraction of {fraction} is not a part of the images; expected 0 ≤ fraction < 1."
        )
    wanted = round(fraction * len(images))
    wanted = min(wanted, most) if settings.val_fraction is None else wanted
    if not wanted:
        return images, None
    return images.split(wanted)


def first_of(images: Images, most: int) -> Images:
    if len(images) <= most:
        return images
    return Images(
        images.pixels[:most], None if images.labels is None else images.labels[:most],
        f"the first of {len(images):,} of {images.source}", images.class_names,
    )  # fmt: skip


def check_like(images: Images, others: Images, num_classes: int) -> None:
    """UserError where held-out images are of another size, or lack the classes of those that are trained on."""
    if images.shape != others.shape:
        raise UserError(
            f"{images.source} has images of {size(images.shape)}, and {others.source} of {size(others.shape)}; "
            "expected images of one size to train on and to validate on."
        )
    if num_classes and (images.labels is None or images.num_classes > num_classes):
        what = "no labels" if images.labels is None else f"a label {images.num_classes - 1}"
        raise UserError(
            f"{images.source} has {what}, and {others.source} has {num_classes} classes; leave --class-conditional "
            "out, or validate on images of the same classes."
        )


def facts_of(images: Images) -> dict[str, Any]:
    return {
        "source": images.source,
        "images": len(images),
        "shape": list(images.shape),
        "classes": images.num_classes,
        "digest": images.digest,
    }
