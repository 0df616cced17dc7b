"""Keys of transformers' own config class: their types, and those that a file may hold but no model here reads."""

import warnings
from typing import Any

import torch
from transformers import GenerationConfig

# What the base class takes besides its fields, or what transformers itself writes into a config.json.
TAKEN = {
    "model_type",
    "torch_dtype",
    "name_or_path",
    "_name_or_path",
    "_commit_hash",
    "output_attentions",
    "auto_map",
    "attn_implementation",
    "experts_implementation",
    "num_labels",
    "quantization_config",
}
# What its older versions wrote, and what tools that write for many models add; none of it changes what ours compute.
_OLD = {
    "pretraining_tp", "tokenizer_class", "is_decoder", "add_cross_attention", "cross_attention_hidden_size",
    "tie_encoder_decoder", "finetuning_task", "task_specific_params", "prefix", "bos_token", "eos_token",
    "pad_token", "unk_token", "sep_token_id", "decoder_start_token_id", "torchscript", "use_bfloat16",
    "tf_legacy_loss", "pruned_heads", "gradient_checkpointing", "use_return_dict", "xla_device",
    "_attn_implementation_autoset", "_flash_attn_2_enabled", "_attn_implementation_internal", "adapters",
    "transformers_weights",
}  # fmt: skip
_STRING, _FLAG, _OBJECT = (str, "a string"), (bool, "true or false"), (dict, "an object")
_TYPES: dict[str, tuple[type | tuple[type, ...], str]] = {
    "architectures": (list, "a list of names"),
    "transformers_version": _STRING,
    "_commit_hash": _STRING,
    "experts_implementation": _STRING,
    "attn_implementation": ((str, dict), "a name"),
    "problem_type": _STRING,
    "auto_map": _OBJECT,
    "id2label": _OBJECT,
    "label2id": _OBJECT,
    "use_cache": _FLAG,
    "output_hidden_states": _FLAG,
    "output_attentions": _FLAG,
    "return_dict": _FLAG,
    "is_encoder_decoder": _FLAG,
    "chunk_size_feed_forward": (int, "a whole number"),
}


def check_base_keys(values: dict[str, Any]) -> None:
    """Raise ValueError, in one sentence, for a value that would fail later inside transformers."""
    for name, value in values.items():
        kind, words = _TYPES.get(name, (object, ""))
        if value is not None and not isinstance(value, kind):
            raise ValueError(f"{name} must be {words} or null; got {value!r}.")
    for name in ("dtype", "torch_dtype"):
        dtype = values.get(name)
        dtype = getattr(torch, dtype, dtype) if isinstance(dtype, str) else dtype
        if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
            raise ValueError(
                f"{name} must be the name of a floating type of torch, such as float32 or bfloat16; got {values[name]!r}."
            )
    number = values.get("num_labels")
    if number is not None and (type(number) is not int or not 1 <= number <= 1_000_000):
        raise ValueError(f"num_labels must be a whole number from 1 to a million; got {number!r}.")
    labels = values.get("id2label")
    if labels is not None and not all(str(key).isdecimal() for key in labels):
        raise ValueError(f"id2label gives labels by their numbers, as in {{0: 'no', 1: 'yes'}}; got {labels!r}.")


def without_old_keys(values: dict[str, Any], known: set[str]) -> dict[str, Any]:
    """Drop keys of a config.json that only transformers uses; warn of them."""
    generation = set(GenerationConfig._get_default_generation_params())
    ignored = sorted(set(values) & (_OLD | generation) - known)
    if ignored:
        warnings.warn(f"the config has {', '.join(ignored)}, which these models don't read; ignored.", stacklevel=3)
    return {key: value for key, value in values.items() if key not in ignored}
