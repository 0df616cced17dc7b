"""Train a converted model: stage 1 its maps and λ, stage 2 its weights. The loop is `distil_trainer.py`."""

import copy
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from tarnn.conversion.calibration import ExactKeys, HeadSizes, LayerStatistics, calibrate
from tarnn.conversion.choice import choose
from tarnn.conversion.convert import check_length
from tarnn.conversion.distil import Distillation, MapLosses, TokenLosses
from tarnn.conversion.distil_trainer import distil
from tarnn.conversion.held_out_loss import HeldOutLoss
from tarnn.conversion.options import (
    KEY,
    AttentionOptions,
    check_whole_number,
    converted_layers,
    options_in,
    set_options,
)
from tarnn.conversion.report import Report
from tarnn.conversion.rows import Row, length_of, rows_of
from tarnn.log import Log, silent

RATES = {"maps": 1e-2, "lora": 1e-4, "weights": 1e-5}


def finetune(
    model: PreTrainedModel,
    texts: Sequence[Any] | Tensor,
    *,
    train: str = "maps",
    steps: int = 200,
    batch_size: int = 1,
    learning_rate: float | None = None,
    drop_window: bool = False,
    tokenizer: PreTrainedTokenizerBase | None = None,
    out: Path | None = None,
    resume: bool = False,
    seed: int = 0,
    report: Log = silent,
) -> Report:
    """Train a model that was converted, on texts of one length (a list of ids, or strings that are long enough).

    train: "maps": feature maps that learn (Hedgehog) and λ of every head that isn't exact, against softmax attention in
        each layer; heads are then chosen again as `convert` does. "lora": adapters of rank 8 in the attention, merged
        afterwards (needs peft); "weights": all of them. Both by KL to the model's tokens with softmax attention.
    drop_window: in "lora" and "weights" windows shrink to one token with probability 0.9, 0.75, 0.5 in thirds of the steps,
        so that features must do the work (SSD, arXiv 2510.05901).
    out: a folder for checkpoints and log.jsonl; with `resume` it continues from the last complete checkpoint there.

    A quarter of the texts measures the loss before and after. Raises ValueError for a model that was not converted, for
    options out of range and for texts no longer than window + sinks, before any work; UserError for a loss that is not
    finite, and after Ctrl-C or SIGTERM, once it has saved, InterruptedRun.
    """
    check_training(train, steps, batch_size, learning_rate)
    if not getattr(model.config, KEY, None):
        raise ValueError("finetune trains converted models; call tarnn.conversion.convert(model, texts) first.")
    keys = exact_keys(model)
    if train == "maps" and all(layer_options(model, i).feature_map is None for i in converted_layers(model)):
        raise ValueError(
            'this model was converted without features, so it has no maps to train; --train weights (train="weights") trains it.'
        )
    rows = rows_of(texts, tokenizer, model)
    length = min(map(length_of, rows))
    check_length(length, keys)
    num_held_out = max(1, len(rows) // 4)
    held_out, rows = HeldOutLoss(model, rows[-num_held_out:]), rows[:-num_held_out] or rows
    before = held_out.loss()
    report(f"before: {before:.4f} {held_out.unit}; {held_out.softmax:.4f} with softmax attention")
    losses = distillation(model, train, keys, steps, drop_window, rows)
    examples = [{"input_ids": row["input_ids"][0, :length]} for row in rows]
    distil(losses, examples, steps, batch_size, learning_rate or RATES[train], out, resume, seed)
    for parameter in model.parameters():
        parameter.requires_grad_(True)
    if train == "lora":
        losses.model.merge_and_unload()
    layers = choose(model, rows, trained_layers(model), keys, length) if train == "maps" else []
    after = held_out.loss()
    report(f"after:  {after:.4f} {held_out.unit}")
    options = {**keys._asdict(), "train": train, "steps": steps}
    return Report(options, len(rows), num_held_out, length, held_out.unit, before, after, layers)


def check_training(train: str, steps: int, batch_size: int, learning_rate: float | None) -> None:
    """Raise ValueError for options that are out of range for any model."""
    if train not in RATES:
        raise ValueError(f"train is one of {', '.join(RATES)}; got {train!r}.")
    check_whole_number("steps", steps, 1)
    check_whole_number("batch_size", batch_size, 1)
    if learning_rate is not None and not (0 < learning_rate < math.inf):
        raise ValueError(f"learning_rate must be a number above 0; got {learning_rate}.")


def layer_options(model: PreTrainedModel, layer: int) -> AttentionOptions:
    """The options of a converted layer, as the config has them."""
    return AttentionOptions()._replace(**options_in(getattr(model.config, KEY), layer))


def exact_keys(model: PreTrainedModel) -> ExactKeys:
    """Which keys are exact in a converted model: those of its first layer."""
    options = layer_options(model, min(converted_layers(model)))
    return ExactKeys(options.window, options.sinks, options.slots)


def distillation(
    model: PreTrainedModel, train: str, keys: ExactKeys, steps: int, drop_window: bool, rows: Sequence[Row]
) -> Distillation:
    """Choose the parameters to train, and their loss."""
    if train == "maps":
        add_features(model, keys, rows)
        return MapLosses(model, keys)
    if train == "weights":
        original = copy.deepcopy(model)
        original.set_attn_implementation("sdpa")
        names = [name for name, x in model.named_parameters() if x.is_floating_point()]
        return TokenLosses(model, names, original, steps, drop_window)
    try:
        from peft import LoraConfig, get_peft_model
    except ImportError as error:
        raise ValueError('training adapters needs peft: pip install "tarnn[lora]".') from error
    targets = [
        f"{name}.{inner}"
        for name, module in model.named_modules()
        if hasattr(module, "is_causal")
        for inner, part in module.named_modules()
        if isinstance(part, nn.Linear)
    ]
    adapted = get_peft_model(model, LoraConfig(r=8, lora_alpha=16, target_modules=targets))
    names = [name for name, _ in adapted.named_parameters() if "lora_" in name]
    return TokenLosses(adapted, names, None, steps, drop_window)


def add_features(model: PreTrainedModel, keys: ExactKeys, rows: Sequence[Row]) -> None:
    """Give features to heads that have none and are not exact; their layers are calibrated again on the rows."""
    lacking = {i: own for i, own in converted_layers(model).items() if "window" in own.modes}
    if not lacking:
        return
    first = min(lacking)
    description: Any = layer_options(model, first).feature_map
    if isinstance(description, Mapping) and description.get("seed") == first:  # each layer's number, unless given
        description = {name: x for name, x in description.items() if name != "seed"}
    layers = calibrate(model, rows, description, keys)
    for i, own in lacking.items():
        modes = ["exact" if mode == "exact" else "features" for mode in own.modes]
        set_options(model, layers=i, mode=modes, feature_map=layers[i].feature_map, far_bias=layers[i].bias)


def trained_layers(model: PreTrainedModel) -> dict[int, LayerStatistics]:
    """Layers without exact heads, with the maps and λ that they have."""
    return {
        i: LayerStatistics(HeadSizes(*own.heads, own.heads.d), own.feature_map, own.far_bias.detach().clone())
        for i, own in converted_layers(model).items()
        if "exact" not in own.modes
    }
