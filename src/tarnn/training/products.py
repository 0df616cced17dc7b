"""Who computes the float32 products of a run: chosen once, recorded in its checkpoints, and taken again when it is resumed."""

from torch import nn
from transformers import TrainingArguments

from tarnn.matmul import Choice, Shape, choose, gains_from_bfloat16, shapes_of
from tarnn.tasks import RunSettings
from tarnn.tasks.base import Trainable
from tarnn.training.checkpoints import latest, read_state
from tarnn.training.folder import CHECKPOINTS

USUAL_LENGTH = 256  # tokens of an example, where examples differ in length
BF16_UNUSED = "this processor multiplies bfloat16, which --bf16 would use: a step is faster, with less exact products"


def choose_products(settings: RunSettings, args: TrainingArguments, task: Trainable, model: nn.Module) -> Choice:
    """Choose the precision of float32 products: that of the checkpoint to go on from, else what suits their shapes."""
    checkpoint = latest(settings.out / CHECKPOINTS) if settings.resume else None
    recorded = read_state(checkpoint).matmul_precision if checkpoint else None
    return choose(product_shapes(args, task, model), args.device, recorded)


def remarks(
    settings: RunSettings, args: TrainingArguments, task: Trainable, model: nn.Module, products: Choice
) -> list[str]:
    """Lines for the user: a choice that is not the recorded one, and instructions that are not used."""
    unused = not settings.bf16 and args.device.type == "cpu" and gains_from_bfloat16(product_shapes(args, task, model))
    return [line for line in (products.note, BF16_UNUSED if unused else "") if line]


def product_shapes(args: TrainingArguments, task: Trainable, model: nn.Module) -> tuple[Shape, ...]:
    """The shapes of a batch's products with the model's weights."""
    length = getattr(getattr(model, "config", None), "sequence_length", USUAL_LENGTH)
    length = task.per_example if task.counted == "tokens" else length
    return shapes_of(model, args.train_batch_size * length)
