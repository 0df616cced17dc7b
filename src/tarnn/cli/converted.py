"""The commands' parts for a folder that `tarnn convert` wrote."""

from pathlib import Path
from typing import Any

from tarnn.checkpoint_keys import CONVERTED, MODEL_TYPES
from tarnn.cli.formats import LENGTHS, model_page
from tarnn.errors import UserError
from tarnn.json_file import read_json


def is_converted(folder: Path) -> bool:
    """Whether a folder's config.json is that of a converted model; nothing heavy is imported for it."""
    file = folder / "config.json"
    return file.is_file() and read_json(file).get(CONVERTED) is not None


def of_tarnn(checkpoint: Path) -> bool:
    """Return False for the folder of a model of transformers, converted or not, and for a file, which is a packed model; True
    for all else, a missing one too."""
    if checkpoint.is_file():
        return False
    file = checkpoint / "config.json"
    model_type = read_json(file).get("model_type") if file.is_file() else None
    return model_type is None or model_type in MODEL_TYPES


def predict_converted(checkpoint: Path, texts: Any, top: int, device: Any) -> Any:
    """Predict with a converted classifier or masked model, with results as `tarnn predict` gives them for tarnn's own models."""
    from tarnn.conversion.opening import open_pretrained, tokenizer_of
    from tarnn.data.saved_tokenizer import check_ids
    from tarnn.data.tokenizers import byte_tokenizer
    from tarnn.tasks import TASKS

    model = open_pretrained(checkpoint, converted=True).to(device)
    name = type(model).__name__
    task = {"ForSequenceClassification": "classification", "ForMaskedLM": "masked-lm"}.get(name[name.find("For") :])
    if task is None:
        fits = "tarnn generate` continues" if model.can_generate() else "tarnn show` looks into"
        raise UserError(f"{checkpoint} holds a {name}, which says nothing of a text by itself; `{fits} one.")
    most = getattr(model.config, "max_position_embeddings", None)

    def check(module: Any, args: Any) -> None:
        check_ids(args[0], model.config.vocab_size)
        if most and args[0].shape[1] > most:
            raise UserError(f"an input has {args[0].shape[1]:,} tokens; this model reads {most:,} at most.")

    model.register_forward_pre_hook(check)
    return TASKS[task].predict(model, tokenizer_of(checkpoint, model) or byte_tokenizer(), texts, top)


def describe_converted(checkpoint: Path, lengths: list[int] | None) -> dict[str, Any]:
    """Collect the facts of `tarnn info` about a converted model, as JSON has them."""
    from tarnn.conversion.opening import open_pretrained
    from tarnn.conversion.options import AttentionOptions, converted_layers
    from tarnn.huggingface.why_not_fused import why_not_fused
    from tarnn.ops.backends import cpu_kernels

    model = open_pretrained(checkpoint, converted=True)
    size, layers = next(model.parameters()).element_size(), list[dict[str, Any]]()
    for i, own in converted_layers(model).items():
        options = AttentionOptions()._replace(**own.options)
        layers.append(
            {
                "layer": i,
                "heads": list(own.modes),
                **{name: getattr(options, name) for name in ("window", "sinks", "slots", "feature_map")},
                "features": 0 if own.feature_map is None else own.feature_map.num_features(own.heads.d),
                "calibrated_on": options.far_until,
                "head_dim": own.heads.d,
            }
        )
    weights = sum(x.nbytes for x in (*model.parameters(), *model.buffers()))
    memory = []
    for length in (lengths or LENGTHS) if model.can_generate() else []:
        state = sum(bytes_of(x, length, size) for x in layers)
        softmax = sum(2 * len(x["heads"]) * length * x["head_dim"] * size for x in layers)
        memory.append(
            {
                "length": length,
                "state_bytes": state,
                "total_bytes": weights + state,
                "softmax_state_bytes": softmax,
                "softmax_total_bytes": weights + softmax,
            }
        )
    return {
        "checkpoint": str(checkpoint),
        "converted": type(model).__name__,
        "parameters": sum(x.numel() for x in model.parameters()),
        "dtype": str(model.dtype).removeprefix("torch."),
        "weight_bytes": weights,
        "layers": layers,
        "memory": memory,
        "kernel": cpu_kernels(),
        "no_fused_step": why_not_fused(model),
    }


def bytes_of(layer: dict[str, Any], length: int, size: int) -> int:
    """Keys, values and sums of one sequence of that length in one layer."""
    d, near = layer["head_dim"], layer["window"] + layer["sinks"] + layer["slots"]
    exact = sum(2 * d * size * (length if mode == "exact" else near) for mode in layer["heads"])
    return exact + layer["heads"].count("features") * 4 * layer["features"] * (d + 1)


def converted_text(facts: dict[str, Any]) -> str:
    """Format the facts as a page."""
    rows = {
        "model": f"{facts['converted']}, converted",
        "parameters": f"{facts['parameters']:,} in {facts['dtype']}: {facts['weight_bytes']:,} bytes",
    }
    for x in facts["layers"]:
        counts = ", ".join(f"{x['heads'].count(m)} {m}" for m in ("features", "window", "exact") if m in x["heads"])
        about = f"window {x['window']}, {x['sinks']} sinks, {x['slots']} slots; heads: {counts}"
        if "features" in x["heads"]:
            about += f"; {x['features']} features each" + (
                f", calibrated on {x['calibrated_on']:,} tokens" if x["calibrated_on"] else ""
            )
        rows[f"layer {x['layer']}"] = about
    rows["CPU kernel"] = f"{facts['kernel']['path']}: {facts['kernel']['why']}"
    rows["CPU step"] = "fused" if facts["no_fused_step"] is None else f"not fused: {facts['no_fused_step']}"
    return model_page(facts["checkpoint"], rows, facts["memory"])
