"""Adapters of low rank (Hu et al. 2021, arXiv 2106.09685) on the linear layers of a model, made by peft."""

import json
import warnings
from pathlib import Path
from typing import Any

from torch import nn

from tarnn.data.tensor_file import flush
from tarnn.errors import UserError
from tarnn.extras import needed_for
from tarnn.families.adapter import BASE, CONFIG, WEIGHTS, quick_fingerprint
from tarnn.families.weights import Weights

# model types in which peft refuses adapters on out_proj
WITHOUT_OUTPUTS = ("mamba", "mamba2", "falcon_mamba", "falcon_h1", "nemotron_h")
# names of linear layers of which the weight alone is read (Mamba's), or that not every layer uses (Zamba2's)
NOT_CALLED = (".dt_proj", "_adapter_list.")
FILES = (CONFIG, WEIGHTS)


def adapted_layers(model: Any, rank: int) -> list[str]:
    """Names of the layers that get adapters: linear ones, but for the head, those that are not called, and those no wider than an
    adapter, such as gates.

    UserError where there is none.
    """
    head, kind = model.get_output_embeddings(), model.config.model_type
    names = [
        name
        for name, x in model.named_modules()
        if type(x) is nn.Linear and x is not head and min(x.weight.shape) > rank
        if not any(x in name for x in NOT_CALLED) and not (kind in WITHOUT_OUTPUTS and name.endswith(".out_proj"))
    ]
    if not names:
        raise UserError(
            f"--lora {rank}: no linear layer of this {type(model).__name__} is wider; choose a smaller rank."
        )
    return names


@needed_for("tarnn finetune --lora")
def with_adapters(model: Any, rank: int, alpha: float, name: str) -> Any:
    """Return a model whose own weights are frozen, with adapters that begin as nothing. name: of the base, for readers."""
    from peft import LoraConfig, get_peft_model
    from peft.utils.transformers_weight_conversion import convert_peft_config_for_transformers

    options: dict[str, Any] = {"r": rank, "lora_alpha": alpha, "task_type": "CAUSAL_LM"}
    # in families with experts peft takes names such as gate_proj for those of the experts; such layers stay as they are
    left = LoraConfig(**options, target_modules=adapted_layers(model, rank))
    convert_peft_config_for_transformers(left, model, None)
    config = LoraConfig(**options, target_modules=left.target_modules)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # peft's words on names of transformers that are to go
        adapted = get_peft_model(model, config)
    config.base_model_name_or_path = name
    share(adapted)
    return adapted


def share(model: Any) -> None:
    """Let layers that share a weight share its adapter too, as Zamba's do: then the sum is one weight again."""
    first = dict[int, Any]()
    for x in model.modules():
        if isinstance(getattr(x, "lora_A", None), nn.ModuleDict) and isinstance(x.base_layer, nn.Linear):
            other = first.setdefault(id(x.base_layer.weight), x)
            x.lora_A, x.lora_B = other.lora_A, other.lora_B


def write_base(out: Path, base: Path) -> None:
    """Write into an adapter's folder which weights it belongs to."""
    (out / BASE).write_text(json.dumps({"fingerprint": quick_fingerprint(Weights.read(base))}) + "\n")
    flush(out / BASE)
