"""Rotary positions as a config gives them: `rope_parameters` of transformers 5, `rope_theta` and `rope_scaling` of 4."""

import math
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from tarnn.errors import UserError
from tarnn.families.config import REQUIRED, Config

TYPES = ("default", "linear", "llama3", "proportional")
OF_IMAGES = ("mrope_section", "mrope_interleaved")  # in a text all axes have one position: rotation as usual


@dataclass(frozen=True)
class Rope:
    """Rotation of the first `rotary_dim` channels of a head by position · theta^(−2i / rotary_dim), i < rotary_dim / 2.

    type: "default"; "linear" divides the angles by `factor`; "llama3" divides those with wavelengths above
    original_length / low_freq_factor, keeps those below original_length / high_freq_factor, and interpolates between;
    "proportional" rotates the first share of all pairs, divides their angles, and keeps the others as they are.
    """

    theta: float
    rotary_dim: int
    type: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_length: int = 8192
    share: float = 1.0

    def frequencies(self) -> Float[Tensor, " f"]:
        """Compute the angles per position in float32, in the order of transformers: the same bits."""
        exponents = torch.arange(0, self.rotary_dim, 2).float() / self.rotary_dim
        frequencies = 1.0 / self.theta**exponents
        if self.type == "proportional":
            frequencies[int(self.share * self.rotary_dim // 2) :] = 0
        if self.type in ("linear", "proportional"):
            return frequencies / self.factor
        return self._stretched(frequencies) if self.type == "llama3" else frequencies

    def _stretched(self, frequencies: Float[Tensor, " f"]) -> Float[Tensor, " f"]:
        wavelengths = 2 * math.pi / frequencies
        longest, shortest = self.original_length / self.low_freq_factor, self.original_length / self.high_freq_factor
        share = (self.original_length / wavelengths - self.low_freq_factor) / (
            self.high_freq_factor - self.low_freq_factor
        )
        between = (1 - share) * frequencies / self.factor + share * frequencies
        stretched = torch.where(wavelengths > longest, frequencies / self.factor, between)
        return torch.where(wavelengths < shortest, frequencies, stretched)


def rope_of(
    config: Config,
    head_dim: int,
    *,
    theta: float = 10_000.0,
    partial: float = 1.0,
    kind: str = "default",
    layer_type: str | None = None,
) -> Rope:
    """Read the rotation of heads of `head_dim` channels. theta, partial, kind: the family's defaults.

    layer_type: whose rotation, where `rope_parameters` has one for each kind of layers. Raises UserError for types that
    depend on the length of the text or scale attention ("dynamic", "yarn", "longrope"), and for keys that are not known.
    """
    key = "rope_parameters" if config.get("rope_parameters") is not None else "rope_scaling"
    given = config.inner(key)
    if layer_type is not None and layer_type in given:
        given = given.inner(layer_type)
    given.skip(*OF_IMAGES, "type")
    kind = given.get("rope_type", given.get("type", kind))
    if kind == "mrope":  # Qwen2-VL's name
        kind = "default"
    if kind not in TYPES:
        raise UserError(
            f"{given.place}: rotary positions of type {kind!r:.40} are not handled; expected {', '.join(TYPES)}. Long contexts "
            "stretched this way are optional in most folders: delete the key for the original length."
        )
    theta = _either(config, given, "rope_theta", theta)
    partial = _either(config, given, "partial_rotary_factor", partial, most=1.0)
    numbers: dict[str, float] = {}
    if kind == "default":
        given.skip("factor")
    else:
        numbers["factor"] = given.number("factor", 1.0 if kind == "proportional" else REQUIRED, least=1.0)
    if kind == "llama3":
        numbers["low_freq_factor"] = given.number("low_freq_factor", least=1e-6)
        numbers["high_freq_factor"] = given.number("high_freq_factor", least=numbers["low_freq_factor"] + 1e-6)
    if kind == "proportional":
        numbers["share"], partial = partial, 1.0
    length = given.size("original_max_position_embeddings", config.size("max_position_embeddings", 8192))
    rotary_dim = int(head_dim * partial)
    if rotary_dim < 2 or rotary_dim % 2:
        raise UserError(
            f"{given.place}: {rotary_dim} of {head_dim} channels would be rotated; expected an even number, 2 or more."
        )
    return Rope(theta, rotary_dim, kind, original_length=length, **numbers)


def _either(config: Config, given: Config, key: str, default: float, most: float = 1e30) -> float:
    """Return a number that stands among the rotary parameters or beside them. Raises UserError where the two differ."""
    beside = config.number(key, None, least=1e-6, most=most)
    inside = given.number(key, None, least=1e-6, most=most)
    if None not in (beside, inside) and beside != inside:
        config.refuse(key, beside, f"{inside!r}, as in {given.place.rpartition(', ')[2]},")
    return next((x for x in (inside, beside) if x is not None), default)
