"""Training a converted model: stage 1 its maps and λ, stage 2 its weights. How: `distil_trainer.py`."""

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from tarnn.conversion.calibration import Layer, Near
from tarnn.conversion.convert import Check, Row, check_length, choose, gather, rows_of
from tarnn.conversion.distil import Distillation, MapLosses, TokenLosses
from tarnn.conversion.distil_trainer import distil
from tarnn.conversion.layer import LayerAttention
from tarnn.conversion.options import KEY, AttentionOptions, attention_layers, child_of, options_in, set_options
from tarnn.conversion.report import Report
from tarnn.extras import needed_for

RATES = {"maps": 1e-2, "lora": 1e-4, "weights": 1e-5}


def finetune(
    model: Any,
    texts: Sequence[Any] | Tensor,
    *,
    train: str = "maps",
    steps: int = 200,
    batch_size: int = 1,
    learning_rate: float | None = None,
    drop_window: bool = False,
    tokenizer: Any = None,
    out: Path | None = None,
    resume: bool = False,
    seed: int = 0,
    report: Callable[[str], None] = lambda _: None,
) -> Report:
    """Trains a model that was converted, on texts of one length (a list of ids, or strings that are long enough).

    train: "maps": feature maps that learn (Hedgehog) and λ of every head that isn't exact, against softmax attention in
        each layer; heads are then chosen anew as `convert` does. "lora": adapters of rank 8 in the attention, merged
        afterwards (needs peft); "weights": all of them. Both by KL to the model's tokens with softmax attention.
    drop_window: in "lora" and "weights" windows shrink to one token with probability 0.9, 0.75, 0.5 in thirds of the steps,
        so that features must do the work (SSD, arXiv 2510.05901).
    out: a folder for checkpoints and log.jsonl; with `resume` it goes on from the last complete checkpoint there.

    A quarter of the texts measures the loss before and after. Raises ValueError for a model that was not converted, for
    options out of range and for texts no longer than window + sinks, before any work; UserError for a loss that is not
    finite, and after Ctrl-C or SIGTERM, once it has saved, InterruptedRun.
    """
    check_training(train, steps, batch_size, learning_rate)
    stored = getattr(model.config, KEY, None)
    if not stored:
        raise ValueError("finetune trains converted models; call tarnn.conversion.convert(model, texts) first.")
    near = near_of(model)
    if train == "maps" and all(options_in(stored, i).get("feature_map") is None for i, _ in own_layers(model)):
        raise ValueError(
            'this model was converted without features, so it has no maps to train; --train weights (train="weights") trains it.'
        )
    rows = rows_of(texts, tokenizer, model)
    check_length(min(row["input_ids"].shape[1] for row in rows), near)
    kept = max(1, len(rows) // 4)
    check = Check(model, rows[-kept:])
    before = check.loss()
    report(f"before: {before:.4f} {check.unit}; {check.softmax:.4f} with softmax attention")
    length = min(row["input_ids"].shape[1] for row in rows)
    data = [{"input_ids": row["input_ids"][0, :length]} for row in rows[: len(rows) - kept] or rows]
    loss = losses(model, train, near, steps, drop_window, rows[: len(rows) - kept] or rows)
    distil(loss, data, steps, batch_size, learning_rate or RATES[train], out, resume, seed)
    for parameter in model.parameters():
        parameter.requires_grad_(True)
    if train == "lora":
        loss.model.merge_and_unload()
    reports = choose(model, rows[: len(rows) - kept] or rows, gathered(model), near, length) if train == "maps" else []
    options = {**near._asdict(), "train": train, "steps": steps}
    after = check.loss()
    report(f"after:  {after:.4f} {check.unit}")
    return Report(options, len(data), kept, length, check.unit, before, after, reports)


def check_training(train: str, steps: int, batch_size: int, learning_rate: float | None) -> None:
    """ValueError for options that are out of range, whatever the model."""
    if train not in RATES:
        raise ValueError(f"train is one of {', '.join(RATES)}; got {train!r}.")
    for name, value in {"steps": steps, "batch_size": batch_size}.items():
        if type(value) is not int or value < 1:
            raise ValueError(f"{name} must be a whole number, 1 or more; got {value!r}.")
    if learning_rate is not None and not (0 < learning_rate < math.inf):
        raise ValueError(f"learning_rate must be a number above 0; got {learning_rate}.")


def own_layers(model: Any) -> list[tuple[int, LayerAttention]]:
    """The layers that were converted, with their numbers."""
    return [(i, x) for i, x in enumerate(map(child_of, attention_layers(model))) if x is not None]


def near_of(model: Any) -> Near:
    """What is exact in the layers of a converted model."""
    options = options_in(getattr(model.config, KEY), own_layers(model)[0][0])
    return Near(*(options.get(name, getattr(AttentionOptions(), name)) for name in Near._fields))


def losses(model: Any, train: str, near: Near, steps: int, drop_window: bool, rows: list[Row]) -> Distillation:
    """What is trained, and on what. Heads without features get them, and their layer is calibrated anew on the rows."""
    if train == "maps":
        lacking = [(i, x) for i, x in own_layers(model) if "window" in x.modes]
        if lacking:
            first = lacking[0][0]
            described = options_in(getattr(model.config, KEY), first)["feature_map"]
            if isinstance(described, Mapping) and described.get("seed") == first:  # each layer's number, unless given
                described = {name: x for name, x in described.items() if name != "seed"}
            layers = gather(model, rows, described, near)
        for i, own in lacking:
            modes = ["exact" if mode == "exact" else "features" for mode in own.modes]
            set_options(model, layers=i, mode=modes, feature_map=layers[i].feature_map, far_bias=layers[i].bias)
        return MapLosses(model, near)
    if train == "weights":
        original = copy.deepcopy(model)
        original.set_attn_implementation("sdpa")
        names = [name for name, x in model.named_parameters() if x.is_floating_point()]
        return TokenLosses(model, names, original, steps, drop_window)
    with needed_for("training adapters"):
        from peft import LoraConfig, get_peft_model
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


def gathered(model: Any) -> dict[int, Layer]:
    """Layers with the maps and λ that they have."""
    found = {}
    for i, module in enumerate(attention_layers(model)):
        own = child_of(module)
        if own is not None and "exact" not in own.modes:
            heads = (*own.heads, own.heads.d)
            found[i] = Layer(feature_map=own.feature_map, bias=own.far_bias.detach().clone(), heads=heads)
    return found
