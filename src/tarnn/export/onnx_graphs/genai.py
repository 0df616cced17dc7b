"""genai_config.json: how onnxruntime-genai drives a graph. Its kinds of models say which states a layer may have."""

from collections import defaultdict
from collections.abc import Collection
from pathlib import Path
from typing import Any

from tarnn.families.config import Config
from tarnn.families.generation import read_generation
from tarnn.program.instructions import Program

LENGTH = 2**20  # tokens, where the model has no limit
KEYS, FILTER, RECURRENT = frozenset("kv"), frozenset({"conv"}), frozenset({"conv", "recurrent"})
# genai's model: the states that each of its layers has
TYPES = {"llama": {KEYS}, "lfm2": {KEYS, FILTER}, "qwen3_5_text": {KEYS, RECURRENT}}
LAYERS = {KEYS: "full_attention", FILTER: "conv", RECURRENT: "linear_attention"}
NAMES = {  # of inputs and outputs
    "key": ("past_key_values.%d.key", "present.%d.key"),
    "value": ("past_key_values.%d.value", "present.%d.value"),
    "conv": ("past.%d.conv", "present.%d.conv"),
    "recurrent": ("past.%d.recurrent", "present.%d.recurrent"),
}


def states_of(program: Program) -> list[frozenset[str]]:
    """Return what each part of the state has, in genai's words."""
    found = defaultdict[int, set[str]](set)
    for x in program.instructions:
        names = {"softmax": {"k", "v"} if len(x.inputs) == 3 else {"k"}, "filter": {"conv"}}.get(x.kind, {"recurrent"})
        names = {"recurrent", "sum"} if "denominator" in x.numbers else names
        for i in x.states:
            if 0 not in program.states[i].shape or program.states[i].grows is not None:
                found[program.states[i].layer] |= names
    return [frozenset(found[i]) for i in range(len(program.layers))]


def kind_of(program: Program) -> str | None:
    """Return genai's model that has layers like the program's; None: it has none."""
    states = set(states_of(program))
    return next((name for name, known in TYPES.items() if states <= known), None)


def unfit(program: Program) -> str:
    """Return why genai can't run a program; "" if it can."""
    if kind_of(program) is not None:
        return ""
    parts = sorted({" and ".join(sorted(x)) or "no state" for x in states_of(program)})
    return f"its layers have keys and values, a filter, or a filter and a recurrence; these have {', '.join(parts)}"


def genai_config(source: Path, program: Program, inputs: Collection[str], file: str) -> dict[str, Any]:
    """Return the config of a graph. inputs: the names of its inputs; file: its name."""
    config, size = Config.read(source), program.num_outputs
    text = config.text()
    generation = read_generation(source, text, size)
    ends, positions = sorted(generation.end_ids), program.limit or text.size("max_position_embeddings", None) or LENGTH
    first = ends[0] if ends else 0
    used = {
        name: both for name, both in NAMES.items() if any(both[0] % i in inputs for i in range(len(program.layers)))
    }
    keys = next((x.shape for x in program.states if x.grows is not None), (1, 0, 1))
    begin = text.get("bos_token_id")
    return {
        "model": {
            "type": kind_of(program),
            "vocab_size": size,
            "context_length": positions,
            "bos_token_id": first if begin is None else begin,
            "eos_token_id": ends or first,
            "pad_token_id": first if generation.pad_id is None else generation.pad_id,
            "decoder": {
                "filename": file,
                "session_options": {"provider_options": []},
                "hidden_size": program.instructions[0].outputs[0].size,
                "num_hidden_layers": len(program.layers),
                "num_attention_heads": keys[0],
                "num_key_value_heads": keys[0],
                "head_size": keys[2],
                "layer_types": [LAYERS[x] for x in states_of(program)],
                "inputs": {name: name for name in ("input_ids", "position_ids") if name in inputs}
                | {f"past_{name}_names": before for name, (before, _) in used.items()},
                "outputs": {"logits": "logits"} | {f"present_{name}_names": after for name, (_, after) in used.items()},
            },
        },
        "search": {"max_length": positions, "do_sample": False, "past_present_share_buffer": False},
    }
