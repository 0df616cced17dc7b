"""Adapters in PEFT's format, added to the weights of a folder as these are read: W + scale · B A (Hu et al., arXiv 2106.09685).

scale is lora_alpha / r, or lora_alpha / √r where the adapter has `use_rslora`. The sum is taken in float32 and rounded once.
"""

import hashlib
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tarnn.errors import UserError
from tarnn.families.adapter_places import place_of
from tarnn.families.weights import Weights, files_source
from tarnn.json_file import read_json

CONFIG, WEIGHTS, BASE = "adapter_config.json", "adapter_model.safetensors", "tarnn_base.json"
WRAPPED = "base_model.model."  # how names of modules begin in an adapter's file
GLANCED = 512  # numbers of a tensor, at its beginning, middle and end, that tell weights from others
PARTS = (".lora_A.weight", ".lora_B.weight")
PLAIN = {  # keys that change what an adapter computes, with the values that `Adapter` knows
    "bias": ("none",),
    "fan_in_fan_out": (False,),
    "use_dora": (False,),
    "lora_bias": (False,),
    "use_qalora": (False,),
    "modules_to_save": (None, []),
    "target_parameters": (None, []),
    "trainable_token_indices": (None, []),
    "layer_replication": (None,),
    "alora_invocation_tokens": (None,),
    "arrow_config": (None,),
    "use_bdlora": (None, False),
    "megatron_config": (None,),
}
ANOTHER = "It was made for another model. Give the folder that it was trained on."


class Factors(NamedTuple):
    """An adapter of one weight (out, in): scale · b a."""

    a: Tensor  # (r, in)
    b: Tensor  # (out, r)
    scale: float


def is_adapter(folder: Path) -> bool:
    """Whether a folder holds an adapter of PEFT."""
    return (folder / CONFIG).is_file()


def with_adapter(weights: Weights, folder: Path, fingerprint: str | None = None) -> Weights:
    """Return the weights with an adapter added to them, each as it is read.

    fingerprint: `quick_fingerprint` of the base. Raises UserError for a folder without an adapter, one of another kind than LoRA
    on linear layers, and one of another base: its fingerprint (where tarnn wrote the adapter), names or shapes differ.
    """
    made_for = read_json(folder / BASE).get("fingerprint") if (folder / BASE).is_file() else None
    if None not in (made_for, fingerprint) and made_for != fingerprint:
        raise UserError(f"{folder} is an adapter of other weights than those of {weights.place}. {ANOTHER}")
    factors = read_adapter(folder)
    homes = dict[str, list[tuple[int, Factors]]]()
    for name, x in factors.items():
        place = place_of(name, weights)
        if place is None:
            raise UserError(f"{folder} adapts {name}, which {weights.place} does not have. {ANOTHER}")
        shape, there = (len(x.b), x.a.shape[1]), (place.rows, *weights.shape(place.name)[1:])
        if shape != there:
            raise UserError(
                f"{folder} adapts {place.name} of shape {shape}, which has shape {there} in {weights.place}. {ANOTHER}"
            )
        others = dict(homes.setdefault(place.name, []))
        if place.first not in others:
            homes[place.name].append((place.first, x))
        elif not same(x, others[place.first]):
            raise UserError(
                f"{folder} has several adapters for {place.name}, which layers of {weights.place} share; expected one. "
                "`tarnn finetune` trains one."
            )

    def add(name: str, weight: Tensor) -> Tensor:
        whole = weight.to(torch.float32, copy=True)
        for first, x in homes[name]:
            whole[first : first + len(x.b)].addmm_(x.b.float(), x.a.float(), alpha=x.scale)
        return whole.to(weight.dtype)

    return weights.changed([*homes], add)


def same(x: Factors, y: Factors) -> bool:
    """Return True if two adapters have the same numbers."""
    return torch.equal(x.a, y.a) and torch.equal(x.b, y.b)


def quick_fingerprint(weights: Weights) -> str:
    """SHA-256 over names, types and shapes of a folder's tensors, and some numbers of each: its files need not be read whole."""
    digest = hashlib.sha256()
    for name in sorted(weights):
        x = weights.glance(name).flatten()
        some = torch.cat([x[at : at + GLANCED] for at in (0, len(x) // 2, max(0, len(x) - GLANCED))]).contiguous()
        digest.update(f"{name} {weights.dtype(name)} {weights.shape(name)}".encode())
        digest.update(some.view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def read_adapter(folder: Path) -> dict[str, Factors]:
    """Read an adapter: its factors by the names of modules. Raises UserError, in one sentence."""
    if not is_adapter(folder):
        raise UserError(f"{folder} holds no adapter: there is no {CONFIG} in it. `tarnn finetune` writes one.")
    fields = read_json(folder / CONFIG)
    check_plain(folder, fields)
    if not (folder / WEIGHTS).is_file():
        raise UserError(f"{folder} lacks {WEIGHTS}, which holds an adapter's numbers. Copy it from its origin.")
    tensors = Weights(files_source(str(folder), [folder / WEIGHTS])[0])
    names = {part: {x.removesuffix(part) for x in tensors if x.endswith(part)} for part in PARTS}
    modules, *others = names.values()
    strange = [x for x in tensors if not x.startswith(WRAPPED) or not x.endswith(PARTS)]
    if strange or not modules or others != [modules]:
        what = f"; {strange[0]} is none" if strange else ""
        raise UserError(f"{folder / WEIGHTS}: expected pairs of lora_A.weight and lora_B.weight{what}. {ANOTHER}")
    return {x.removeprefix(WRAPPED): factors_of(x, tensors, fields, folder) for x in sorted(modules)}


def factors_of(module: str, tensors: Weights, fields: Mapping[str, Any], folder: Path) -> Factors:
    """Read the factors of one module."""
    a, b = (tensors[f"{module}{part}"] for part in PARTS)
    if a.ndim != 2 or b.ndim != 2 or len(a) != b.shape[1] or not len(a):
        raise UserError(
            f"{folder / WEIGHTS} has lora_A of shape {tuple(a.shape)} and lora_B of shape {tuple(b.shape)} for {module}; "
            "expected (r, in) and (out, r)."
        )
    if not (a.isfinite().all() and b.isfinite().all()):
        raise UserError(f"{folder / WEIGHTS} holds NaN or an infinity for {module}: the training diverged.")
    alpha = next((x for end, x in own_alphas(fields, folder).items() if f".{module}".endswith(f".{end}")), None)
    alpha = fields.get("lora_alpha") if alpha is None else alpha
    if isinstance(alpha, bool) or not isinstance(alpha, int | float) or not math.isfinite(alpha):
        raise UserError(f"{folder / CONFIG}: lora_alpha must be a number; got {alpha!r:.60}.")
    rank = len(a)
    return Factors(a, b, alpha / (math.sqrt(rank) if fields.get("use_rslora") else rank))


def own_alphas(fields: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """Return alphas of some modules by ends of their names; UserError for patterns, which PEFT allows there."""
    alphas = fields.get("alpha_pattern") or {}
    if not isinstance(alphas, dict) or any(set(name) & set("*+?()[]{}|^$\\") for name in alphas):
        raise UserError(f"{folder / CONFIG}: alpha_pattern must give a number to names of modules; got {alphas!r:.80}.")
    return alphas


def check_plain(folder: Path, fields: Mapping[str, Any]) -> None:
    """Raise UserError for an adapter that computes anything but scale · B A."""
    if fields.get("peft_type") != "LORA":
        raise UserError(f"{folder} holds an adapter of type {fields.get('peft_type')!r:.60}; expected LORA.")
    for key, known in PLAIN.items():
        if key in fields and fields[key] not in known:
            raise UserError(
                f"{folder / CONFIG}: {key} is {fields[key]!r:.60}, which is not added to weights here; expected {known[0]!r}. "
                "Where peft is installed, merge_and_unload() and save_pretrained write the merged model."
            )
