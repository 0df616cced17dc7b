"""Training a converted model: stage 1 its maps and λ, stage 2 its weights; with the Trainer of transformers."""

import copy
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Trainer, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint

from tarnn.conversion.calibration import Layer, Near
from tarnn.conversion.distil import Distillation, MapLosses, TokenLosses
from tarnn.conversion.options import KEY, AttentionOptions, attention_layers, child_of, set_options
from tarnn.conversion.pretrained import Check, choose, rows_of
from tarnn.conversion.report import Report

RATES = {"maps": 1e-2, "lora": 1e-4, "weights": 1e-5}


def finetune(
    model: Any, texts: Sequence[Any] | Tensor, *, train: str = "maps", steps: int = 200, batch_size: int = 1,
    learning_rate: float | None = None, drop_window: bool = False, tokenizer: Any = None, out: Path | None = None,
    resume: bool = False, seed: int = 0, report: Callable[[str], None] = lambda _: None,
) -> Report:  # fmt: skip
    """Trains a model that was converted, on texts of one length (a list of ids, or strings that are long enough).

    train: "maps": feature maps that learn (Hedgehog) and λ of every head that isn't exact, against softmax attention in
        each layer; heads are then chosen anew as `convert` does. "lora": adapters of rank 8 in the attention, merged
        afterwards (needs peft); "weights": all of them. Both by KL to the model's tokens with softmax attention.
    drop_window: in "lora" and "weights" windows shrink to one token with probability 0.9, 0.75, 0.5 in thirds of the steps,
        so that features must do the work (SSD, arXiv 2510.05901).
    out: a folder for the Trainer's checkpoints; with `resume` it goes on from the last one there.

    A quarter of the texts measures the loss before and after. Raises ValueError for a model that was not converted.
    """
    stored = getattr(model.config, KEY, None)
    if not stored:
        raise ValueError(
            "finetune trains converted models; call tarnn.conversion.convert(model, texts) first."
        )
    if train not in RATES:
        raise ValueError(f"train is one of {', '.join(RATES)}; got {train!r}.")
    common = AttentionOptions()._replace(**{k: v for k, v in stored.items() if k != "layers"})
    first = next(x for x in map(child_of, attention_layers(model)) if x is not None)
    near = Near(*(first.options.get(name, getattr(common, name)) for name in Near._fields))
    rows = rows_of(texts, tokenizer, model)
    kept = max(1, len(rows) // 4)
    check = Check(model, rows[-kept:])
    before = check.loss()
    report(f"before: {before:.4f} {check.unit}; {check.softmax:.4f} with softmax attention")
    length = min(row["input_ids"].shape[1] for row in rows)
    data = [{"input_ids": row["input_ids"][0, :length]} for row in rows[: len(rows) - kept] or rows]
    loss = losses(model, train, near, steps, drop_window)
    fit(loss, data, steps, batch_size, learning_rate or RATES[train], out, resume, seed)
    for parameter in model.parameters():
        parameter.requires_grad_(True)
    if train == "lora":
        loss.model.merge_and_unload()
    reports = (
        choose(model, rows[: len(rows) - kept] or rows, gathered(model), near) if train == "maps" else []
    )
    options = {**near._asdict(), "train": train, "steps": steps}
    after = check.loss()
    report(f"after:  {after:.4f} {check.unit}")
    return Report(options, len(data), kept, length, check.unit, before, after, reports)


def losses(model: Any, train: str, near: Near, steps: int, drop_window: bool) -> Distillation:
    """What is trained, and on what."""
    if train == "maps":
        for i, module in enumerate(attention_layers(model)):
            own = child_of(module)
            if own is not None:
                modes = ["exact" if mode == "exact" else "features" for mode in own.modes]
                set_options(model, layers=i, mode=modes)
        return MapLosses(model, near)
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
        for name, module in model.named_modules() if hasattr(module, "is_causal")
        for inner, part in module.named_modules() if isinstance(part, nn.Linear)
    ]  # fmt: skip
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


def fit(
    loss: Distillation, data: list[dict[str, Tensor]], steps: int, batch_size: int, learning_rate: float,
    out: Path | None, resume: bool, seed: int,
) -> None:  # fmt: skip
    """The Trainer's loop: AdamW, gradients clipped at 1, a linear fall after a short rise."""
    folder = None if out is None else str(out / "checkpoints")
    args = TrainingArguments(
        output_dir=folder or "unused", max_steps=steps, per_device_train_batch_size=batch_size, learning_rate=learning_rate,
        warmup_steps=min(10, steps // 10), max_grad_norm=1.0, weight_decay=0.0, logging_steps=max(1, steps // 20),
        save_strategy="no" if folder is None else "steps", save_steps=max(1, steps // 10), save_total_limit=2, seed=seed,
        report_to=[], remove_unused_columns=False, disable_tqdm=not sys.stderr.isatty(),
        use_cpu=next(loss.parameters()).device.type == "cpu",
    )  # fmt: skip
    trainer = Trainer(loss, args, train_dataset=data, data_collator=together)  # type: ignore[arg-type]
    last = get_last_checkpoint(folder) if resume and folder and Path(folder).is_dir() else None
    trainer.train(resume_from_checkpoint=last)


def together(rows: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    return {name: torch.stack([row[name] for row in rows]) for name in rows[0]}
