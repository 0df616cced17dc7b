"""Converted models: softmax layers in which some keys are estimated by features, or not seen (`tarnn convert` writes them).

The config of such a folder has the options of all layers under `tarnn_attention`, and under "layers" in it those of single ones.
The tensors stand beside the layer's projections: `self_attn.tarnn.far_bias`, `self_attn.tarnn.feature_map.…`.
"""

from collections.abc import Mapping, Sequence
from typing import Any, cast

from tarnn.checkpoint_keys import CONVERTED
from tarnn.errors import UserError
from tarnn.families.config import Config
from tarnn.families.maps import map_of, numbers_of
from tarnn.families.weights import Weights
from tarnn.feature_maps import FeatureMap
from tarnn.feature_maps.statistics import FittedMap
from tarnn.program.hybrid import REACHES, hybrid
from tarnn.program.instructions import Program
from tarnn.program.recording import ProgramError, Register

# by implementation: window and sinks, unless options say them
NEAR = {"tarnn_hybrid": (256, 4), "tarnn_linear": (1, 0)}
LONGEST = 2**31 - 1


class Converted:
    """The attention of each layer that had softmax, one after the other. kind: a name of `NEAR`."""

    def __init__(self, stored: Mapping[str, Any], kind: str, place: str):
        self.common = {name: x for name, x in stored.items() if name != "layers"}
        self.layers, self.kind, self.place, self.number = stored.get("layers", {}), kind, place, 0

    @classmethod
    def of(cls, config: Config) -> "Converted | None":
        """Read what a config says; None for a model that has not been converted. Raises UserError for what is not possible."""
        stored, mark = config.get(CONVERTED), config.get("quantization_config")
        if stored is None and mark is None:
            return None
        kind = mark.get("attention") if isinstance(mark, Mapping) else None
        layers = stored.get("layers", {}) if isinstance(stored, Mapping) else None
        if not isinstance(kind, str) or kind not in NEAR or not isinstance(layers, Mapping):
            raise UserError(
                f"{config.place}: a converted model has {CONVERTED}, its options, and in quantization_config its attention, "
                f"{' or '.join(NEAR)}; got {stored!r:.60} and {mark!r:.60}. Convert it again."
            )
        count = config.size("num_hidden_layers")
        for name, options in layers.items():
            if not name.isdecimal() or int(name) >= count or not isinstance(options, Mapping):
                config.refuse(f"{CONVERTED}, layers", layers, f"objects under layers from 0 to {count - 1}")
        return cls(stored, kind, f"{config.place}, {CONVERTED}")

    def attend(self, q: Register, k: Register, v: Register, w: Weights, scale: float) -> Register:
        """Write the attention of the next layer. w: the tensors that it has besides its projections."""
        options = Config({**self.common, **self.layers.get(str(self.number), {})}, self.place)
        self.number += 1
        window, sinks = (
            options.size(name, default, least=least, most=LONGEST)
            for name, default, least in zip(("window", "sinks"), NEAR[self.kind], (1, 0), strict=True)
        )
        far_until = options.size("far_until", None, least=0, most=LONGEST)
        options.choice("slots", 0)
        options.skip("far_bias")  # where training began
        reach, far_bias = self._reach(options, k.heads), w.get("far_bias", (q.heads,))
        phi = self._feature_map(options, reach.count("features"), k.width, w.under("feature_map."))
        options.check_all_taken()
        far: dict[str, Any] = {}
        if phi is None:
            reach = ["window" if x == "features" else x for x in reach]
        else:
            far = {side: numbers_of(phi, k.width, side) for side in ("queries", "keys")}
            far |= {"far_bias": far_bias, "far_until": far_until, "log_features": phi.log_features}
        if scale != (usual := q.width**-0.5):  # maps estimate e^(q·k/√d)
            q = q * (scale / usual)
        try:
            return hybrid(q, k, v, reach=reach, scale=usual, window=window, sinks=sinks, **far)
        except ProgramError as error:
            raise UserError(f"{self.place}: {error}") from error

    def _reach(self, options: Config, num_heads: int) -> list[str]:
        """Return how far each key head sees."""
        mode = options.get("mode", "features")
        reach = [mode] * num_heads if isinstance(mode, str) else mode
        if not isinstance(reach, list) or len(reach) != num_heads or not all(x in REACHES for x in reach):
            options.refuse("mode", mode, f"{' or '.join(REACHES)}, or a list of {num_heads} of them,")
        return reach

    def _feature_map(self, options: Config, num_heads: int, width: int, w: Weights) -> FeatureMap | None:
        """Make the map of the heads that reach features; None: there are none, or their far keys have no weight."""
        none = "feature_map" in options and options.get("feature_map") is None
        described = options.get("feature_map", "favor")
        if none or not num_heads:
            return None
        named = {"name": described} if isinstance(described, str) else described
        if not isinstance(named, Mapping) or not isinstance(named.get("name"), str):
            options.refuse("feature_map", described, "a name, or an object with a name and options")
        own = {key: x for key, x in named.items() if key != "name"}
        try:
            phi = map_of(named["name"], own, {"head_dim": width, "num_heads": num_heads}, w)
            phi.check_positive(width)
            if isinstance(phi, FittedMap) and phi.fit == "call":
                raise ValueError(
                    f"{named['name']} with fit='call' is fitted to both sides, which a language model does not see."
                )
        except (ValueError, TypeError) as error:
            raise error if isinstance(error, UserError) else UserError(f"{self.place}: {error}") from error
        return phi


def about_converted(program: Program) -> str:
    """Say how far the attention of a converted model's program reaches."""
    layers = [x.numbers for x in program.instructions if x.kind == "hybrid"]
    heads = [REACHES[kind] for x in layers for kind in cast(Sequence[int], x["reach"])]
    counts = ", ".join(f"{heads.count(x)} {x}" for x in ("features", "window", "exact"))
    ends = [cast(int, x["far_until"]) for x in layers if cast(int, x["far_until"]) >= 0]
    beyond = f"; features calibrated on {min(ends):,} tokens, window and sinks alone beyond" if ends else ""
    return f"converted, key/value heads: {counts}{beyond}"
