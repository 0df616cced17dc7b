"""Where a folder has the weight of a module of transformers: adapters name modules, and some families name weights otherwise."""

import re
from typing import NamedTuple

from tarnn.families.composites import INNER, TEXT
from tarnn.families.weights import Weights

RENAMED = (  # parts of names, in transformers' modules and in folders
    (r"^model\.", "backbone."),  # Nemotron-H
    (r"\.g_proj\.", ".gate_proj."),  # LFM3
    (r"\.forget_gate\.", "."),  # Kimi Linear, Ling
    (r"\.mlp\.", ".block_sparse_moe."),  # Kimi Linear
    (r"\.self_attn\.o_proj\.", ".self_attn.dense."),  # Ling
    (r"\.self_attn\.", ".attention."),  # Ling
)
SHARED = re.compile(r"(.*layers\.)(\d+)(\.shared_transf(?:ormer)?\..*)")  # Zamba's layers that several layers share
LAYERS = 1000
# of the delta rule's projections, which folders of Lara-mini have as one weight
PARTS_OF_DELTA = ("qkv", "z", "b", "a")


class Place(NamedTuple):
    """The rows of a folder's weight that a module has."""

    name: str
    first: int
    rows: int


def place_of(module: str, weights: Weights) -> Place | None:
    """Return where a folder has the weight of a module; None: nowhere."""
    names = [f"{module}.weight"]
    if module.startswith(TEXT):  # the text model within one of images
        names.append(f"{INNER}{names[0].removeprefix(TEXT)}")
    for live, saved in RENAMED:
        names += [re.sub(live, saved, name) for name in names]
    found = next((name for name in (*names, shared(names[0], weights)) if name in weights), None)
    return part_of_delta(module, weights) if found is None else Place(found, 0, weights.shape(found)[0])


def shared(name: str, weights: Weights) -> str:
    """Return the name of a shared weight: folders have it at the first layer that uses it, and layers take turns."""
    match = SHARED.fullmatch(name)
    if match is None:
        return name
    before, layer, after = match.groups()
    users = [i for i in range(LAYERS) if f"{before}{i}.linear.weight" in weights]
    held = [i for i in users if f"{before}{i}{after}" in weights]
    if not held or int(layer) not in users:
        return name
    return f"{before}{held[users.index(int(layer)) % len(held)]}{after}"


def part_of_delta(module: str, weights: Weights) -> Place | None:
    """Return the rows of a projection for the delta rule in a folder that has all of them as one."""
    layer, _, part = module.partition("in_proj_")
    name, heads, filters = f"{layer}in_proj.weight", f"{layer}A_log", f"{layer}conv1d.weight"
    if part not in PARTS_OF_DELTA or any(x not in weights for x in (name, heads, filters)):
        return None
    rows, values, channels = (weights.shape(x)[0] for x in (name, heads, filters))
    sizes, at = (channels, rows - channels - 2 * values, values, values), PARTS_OF_DELTA.index(part)
    return Place(name, sum(sizes[:at]), sizes[at])
