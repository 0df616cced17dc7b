"""`tarnn info`: what tarnn runs on here; what a checkpoint holds and costs, beside the same model with softmax."""

import json
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

from typer import Argument, Option

from tarnn.cli.converted import converted_text, describe_converted, is_converted, of_tarnn
from tarnn.cli.formats import LENGTHS, model_page
from tarnn.cli.machine import machine_facts, machine_text
from tarnn.cli.progress import progress
from tarnn.errors import UserError
from tarnn.ops.backends import cpu_kernels

Weights = Literal["float32", "bfloat16", "int8", "int4"]
# keys of a config beside those of the record
SAVED_TOO = ("initializer_range", "use_cache", "bos_token_id", "eos_token_id", "pad_token_id")


def info(
    checkpoint: Annotated[
        Path | None, Argument(help="A checkpoint folder, as `tarnn train --out` writes it, or a file of `tarnn pack`.")
    ] = None,
    lengths: Annotated[
        str | None,
        Option(
            help=f"Numbers of tokens, with commas between them; {','.join(map(str, LENGTHS))}, or an image's, unless given."
        ),
    ] = None,
    weights: Annotated[
        Weights | None, Option(help="Open it with weights kept so, and count these (default: as saved).")
    ] = None,
    as_json: Annotated[bool, Option("--json", help="As JSON, for programs.")] = False,
) -> None:
    """Say what tarnn runs on; of a checkpoint its parameters, layers, bytes of state, and memory at given lengths.

    Without a checkpoint: versions, processor, threads, and which path attention takes on the CPU, and why.

    Memory is what generating one sequence takes: the weights, and the state after so many tokens. Beside it
    stands the same model with softmax in every layer of attention, whose keys and values have to be kept.
    Nothing is run; the weights are read once, to see that all of them are finite, or a packed file's what was written.
    """
    numbers = None if lengths is None else parse_lengths(lengths)
    if checkpoint is None:
        for name, value in (("lengths", lengths), ("weights", weights)):
            if value is not None:
                raise UserError(f"--{name} is about a checkpoint; name one: `tarnn info CHECKPOINT --{name} …`.")
        facts, text = machine_facts(), machine_text
    elif weights is None and is_converted(checkpoint):
        facts, text = describe_converted(checkpoint, numbers), converted_text
    elif weights is None and of_tarnn(checkpoint):
        facts, text = describe(checkpoint, numbers), as_text
    else:
        facts, text = describe_opened(checkpoint, numbers or LENGTHS, weights), opened_text
    print(json.dumps(facts, indent=2) if as_json else text(facts))


def parse_lengths(text: str, option: str = "--lengths") -> list[int]:
    """'1024,4096' → [1024, 4096]; UserError for anything else."""
    try:
        lengths = [int(part) for part in text.split(",")]
    except ValueError:
        lengths = []
    if not lengths or min(lengths) < 1:
        raise UserError(f"{option} takes positive whole numbers with commas between them; got {text!r}.")
    return lengths


def describe(checkpoint: Path, lengths: list[int] | None = None) -> dict[str, Any]:
    """All that the command tells, as JSON has it. Lengths that are not given: usual ones, or that of an image."""
    from tarnn.decoding.weights import check_weights, saved_dtype
    from tarnn.tasks import TASKS
    from tarnn.tasks.checkpoint import open_record, weightless
    from tarnn.weight_files import read_headers

    config, (file, header) = open_record(checkpoint, tuple(TASKS)), read_headers(checkpoint)
    record, saved = config.record(), config.to_dict()
    if not record.causal:
        lengths = []  # it reads whole sequences, from no state
    if lengths is None:
        whole = getattr(record, "sequence_length", None)
        lengths = LENGTHS if whole is None else [whole]
    dtype = saved_dtype(file, header)
    model = weightless(checkpoint, config, header, dtype)
    check_weights(file, header, model)
    weights = bytes_of(model)
    return {
        "checkpoint": str(checkpoint),
        "parameters": sum(x.numel() for x in model.parameters()),
        "dtype": str(dtype).removeprefix("torch."),
        "weight_bytes": weights,
        "config": vars(record) | {name: saved.get(name) for name in SAVED_TOO},
        "layers": [layer_facts(model, i) for i in range(record.num_hidden_layers)],
        "memory": memory_facts(model, weights, lengths),
        "kernel": cpu_kernels(),
        "no_fused_step": why_not_fused(checkpoint, model, len(header)),
    }


def memory_facts(model: Any, weights: int, lengths: list[int]) -> list[dict[str, int]]:
    """Count the bytes of weights and state at these lengths, beside those of the same model with softmax."""
    if not lengths:
        return []
    from tarnn.models.config import softmax_pattern
    from tarnn.models.meta_device import build_on_meta

    record = replace(model.config, attention=softmax_pattern(model.config))
    twin = build_on_meta(type(model), record).to(model.dtype)
    twin_weights = bytes_of(twin)
    return [
        {
            "length": length,
            "state_bytes": (state := state_bytes(model, length)),
            "total_bytes": weights + state,
            "softmax_state_bytes": (cache := state_bytes(twin, length)),
            "softmax_total_bytes": twin_weights + cache,
        }
        for length in lengths
    ]


def bytes_of(model: Any) -> int:
    """Count the bytes of weights and tables."""
    return sum(x.nbytes for x in (*model.parameters(), *model.buffers()))


def why_not_fused(checkpoint: Path, model: Any, num_tensors: int) -> str | None:
    """Say why a checkpoint has no fused step; None where it has. All its weights are read; UserError for one that is not
    finite."""
    from tarnn.decoding.from_program import open_folder
    from tarnn.decoding.weights import read_weights

    why = "it reads whole sequences"
    if model.config.causal:
        try:
            opened = open_folder(checkpoint)
        except ValueError as error:  # it has no program, or weights that are refused again below
            why = str(error)
        else:
            return None if opened.weights else opened.about[-1].removeprefix("no fused step: ")
    report = partial(print, file=sys.stderr, flush=True)
    for _ in progress(read_weights(checkpoint), num_tensors, "tensors of the weights read", report):
        pass
    return why


def describe_opened(checkpoint: Path, lengths: list[int], weights: str | None) -> dict[str, Any]:
    """Collect the facts of a model that is opened to run."""
    from tarnn.decoding.description import facts_of
    from tarnn.decoding.opening import open_step
    from tarnn.decoding.packed_file import check_contents
    from tarnn.decoding.refusal import Refusal

    try:
        opened = open_step(checkpoint, weights, report=partial(print, file=sys.stderr, flush=True))
    except Refusal as error:
        raise UserError(f"--weights is not possible here: {error} Leave --weights out.") from error
    if checkpoint.is_file():
        check_contents(checkpoint)
    return {"checkpoint": str(checkpoint), **facts_of(opened, lengths), "kernel": cpu_kernels()}


def opened_text(facts: dict[str, Any]) -> str:
    """Format the facts of an opened model as a page."""
    limit = facts["max_position_embeddings"]
    rows = {
        "model": facts["architecture"],
        "parameters": f"{facts['parameters']:,} in {facts['dtype']}: {facts['weight_bytes']:,} bytes",
        "in memory": f"{facts['packed_bytes']:,} bytes",
        "vocabulary": f"{facts['vocab_size']:,}",
        "positions": f"at most {limit:,}" if limit else "any length",
        **{f"state {numbers}": kind for numbers, kind in runs(facts["layers"]).items()},
        "state": f"{facts['state_bytes']:,} bytes, and {facts['state_bytes_per_token']:,} bytes per token",
        "CPU kernel": f"{facts['kernel']['path']}: {facts['kernel']['why']}",
        "CPU step": "; ".join(facts["step"]),
    }
    return model_page(facts["checkpoint"], rows, facts["memory"], limit)


def state_bytes(model: Any, length: int) -> int:
    """Count the bytes of state of one sequence of that length."""
    return sum(state.nbytes for x in model.model.layers for state in x.new_states(1, capacity=length))


def layer_facts(model: Any, i: int) -> dict[str, Any]:
    """One layer: its kind of attention, its map, and the state that it keeps for a sequence."""
    from tarnn.feature_maps import RandomFeatureMap

    block, kind = model.model.layers[i], model.config.attention_of(i)
    attention, facts = block.attention, {"layer": i, "attention": kind}
    if block.convolution is not None:
        facts["convolution_state_bytes"] = block.convolution.new_state(1).nbytes
    if kind == "linear":
        facts |= {"feature_map": model.config.feature_map_of(i), "features": attention.num_features}
        facts |= {"random": True} if isinstance(attention.feature_map.inner, RandomFeatureMap) else {}
    state = attention.new_state(1, capacity=1)
    return facts | {"state_bytes_per_token" if state.grows else "state_bytes": state.nbytes}


def as_text(facts: dict[str, Any]) -> str:
    """Format the facts as a page."""
    config = facts["config"]
    limit = config["max_position_embeddings"]
    rows = {
        **image_rows(config),
        "parameters": f"{facts['parameters']:,} in {facts['dtype']}: {facts['weight_bytes']:,} bytes",
        "shape": f"{len(facts['layers'])} layers, hidden {config['hidden_size']}, "
        f"{config['num_attention_heads']} heads of {config['head_dim']}, vocabulary {config['vocab_size']:,}",
        **({"map options": json.dumps(options)} if (options := config["feature_map_options"]) else {}),
        "positions": config["position"] + (f", at most {limit:,}" if limit else ", any length"),
        **{f"layer {numbers}": kind for numbers, kind in runs(facts["layers"]).items()},
        "CPU kernel": f"{facts['kernel']['path']}: {facts['kernel']['why']}",
        "CPU step": "fused" if facts["no_fused_step"] is None else f"not fused: {facts['no_fused_step']}",
    }
    return model_page(facts["checkpoint"], rows, facts["memory"], limit)


def image_rows(config: dict[str, Any]) -> dict[str, str]:
    """Return the rows about a model's images; none for a model of text."""
    if "image_height" not in config:
        return {}
    classes = f", {config['num_classes']} classes" if config["num_classes"] else ""
    likelihood = config["likelihood"].replace("_", " ")
    if config["likelihood"] == "logistic_mixture":
        likelihood += f" of {config['num_mixtures']}"
    shape = f"{config['image_height']} × {config['image_width']}, {config['num_channels']} channels"
    return {"images": f"{shape}{classes}; {likelihood}"}


def runs(layers: list[dict[str, Any]]) -> dict[str, str]:
    """Layers by number, neighbours of one kind together: {"0–2": "linear, …", "3": "softmax, …"}."""
    groups: list[tuple[int, int, str]] = []
    for layer in layers:
        kind = kind_of(layer)
        if groups and groups[-1][2] == kind:
            groups[-1] = (groups[-1][0], layer["layer"], kind)
        else:
            groups.append((layer["layer"], layer["layer"], kind))
    return {str(a) if a == b else f"{a}–{b}": kind for a, b, kind in groups}


def kind_of(layer: dict[str, Any]) -> str:
    if "convolution_state_bytes" in layer:
        size = layer["convolution_state_bytes"]
        others = {name: x for name, x in layer.items() if name != "convolution_state_bytes"}
        return f"convolution, state {size:,} bytes; {kind_of(others)}"
    if "feature_map" in layer:
        kind = "random features" if layer.get("random") else "features"
        features = f"{layer['feature_map']}, {layer['features']} {kind} per head"
        return f"linear, {features}, state {layer['state_bytes']:,} bytes"
    if "state_bytes_per_token" in layer:
        return f"{layer['attention']}, cache {layer['state_bytes_per_token']:,} bytes per token"
    return f"{layer['attention']}, state {layer['state_bytes']:,} bytes" if layer["state_bytes"] else layer["attention"]
