"""What a run resolved to: for the eye before it starts, and for settings.json."""

import platform
from typing import Any

import torch
import transformers
from transformers import TrainingArguments

from tarnn._version import __version__
from tarnn.data.corpus import Corpus
from tarnn.data.windows import Windows
from tarnn.models import TarnnForCausalLM
from tarnn.training.settings import TrainSettings


def describe(
    args: TrainingArguments, corpus: Corpus, windows: Windows, model: TarnnForCausalLM
) -> dict[str, Any]:
    """Model, text, length and versions, as JSON."""
    batch = args.train_batch_size * args.gradient_accumulation_steps * args.world_size
    return {
        "model": model.config.to_diff_dict(),
        "text": corpus.facts,
        "run": {
            "parameters": model.num_parameters(),
            "device": str(args.device),
            "processes": args.world_size,
            "threads": torch.get_num_threads(),
            "tokens_per_step": batch * windows.context,
            "max_steps": args.max_steps,
            "validation_context": min(windows.context, max(0, len(corpus.validation) - 1)),
        },
        "versions": {
            "tarnn": __version__,
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "python": platform.python_version(),
        },
    }


def table(settings: TrainSettings, facts: dict[str, Any]) -> str:
    """The resolved settings, a line a topic."""
    text, run, model = facts["text"], facts["run"], facts["model"]
    layers = model.get("num_hidden_layers")
    kinds = {key: model[key] for key in ("attention", "feature_map", "decay", "position") if key in model}
    length = [f"{settings.epochs:g} epochs"] if settings.epochs else []
    length += [f"{settings.max_minutes:g} minutes"] if settings.max_minutes else []
    length += [f"{run['max_steps']:,} steps"] if run["max_steps"] < 10**9 else []
    trained, held_out = text["train"], text["validation"]
    rows = {
        "text": f"{', '.join(settings.sources)}: {trained['bytes']:,} bytes in {trained['documents']:,} "
        f"documents, {trained['tokens']:,} tokens ({settings.tokenizer})",
        "validation": f"{held_out['bytes']:,} bytes, {settings.val or 'the end of the text'}"
        if held_out["tokens"] > 1
        else "none: the latest model is kept, not the best",
        "model": f"{run['parameters']:,} parameters: {layers} layers, hidden {model.get('hidden_size')}, "
        f"{model.get('num_attention_heads')} heads"
        + "".join(f", {key} {value}" for key, value in kinds.items()),
        "step": f"{run['tokens_per_step']:,} tokens: batch {settings.batch_size} × context {settings.context}"
        + (f" × {settings.accumulate} accumulated" if settings.accumulate > 1 else "")
        + (f" × {run['processes']} processes" if run["processes"] > 1 else ""),
        "length": " or ".join(length),
        "learning rate": f"{settings.learning_rate:g}, "
        + ("following the clock" if settings.max_minutes else "cosine") + ", 2 % warm-up",
        "device": f"{run['device']}, {run['threads']} threads" + (", bf16" if settings.bf16 else ""),
        "out": f"{settings.out} (seed {settings.seed})",
    }  # fmt: skip
    rows |= {f"set {key}": repr(value) for key, value in settings.training_arguments.items()}
    return "\n".join(f"{name:>14}  {value}" for name, value in rows.items())
