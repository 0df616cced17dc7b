"""What a conversion found, layer by layer and head by head: as JSON, and as a page to read."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tarnn._version import __version__

LAYERS = (
    "## Layers\n\nHarm: what converting this layer alone adds to the loss.\n\n"
    "| layer | harm | heads |\n| --: | --: | --- |\n"
)


@dataclass
class HeadReport:
    """A key/value head, and the query heads that share it. Errors: |output − teacher's|² / |teacher's|²."""

    mode: str  # features, window, exact
    error_features: float
    error_window: float
    error_wide: float  # of a window that is larger by the bytes of the features
    far_share: float  # ρ: the mean share of a query's weight that features give to far keys
    teacher_far_share: float
    far_bias: list[float]  # λ of each query head
    bytes_of: dict[str, int]  # of one sequence, for each mode

    @property
    def error(self) -> float:
        return {"features": self.error_features, "window": self.error_window, "exact": 0.0}[self.mode]

    @property
    def bytes(self) -> int:
        return self.bytes_of[self.mode]


@dataclass
class LayerReport:
    layer: int  # its number in `attention_layers(model)`
    heads: list[HeadReport]
    harm: float | None = None  # to the model's loss, of converting this layer alone

    @property
    def modes(self) -> list[str]:
        return [head.mode for head in self.heads]


@dataclass
class Report:
    """A conversion. softmax, hybrid: the loss before and after, on texts that nothing was calibrated on."""

    options: dict[str, Any]
    texts: int
    check_texts: int
    length: int
    unit: str
    softmax: float
    hybrid: float
    layers: list[LayerReport]

    @property
    def bytes(self) -> int:
        """Keys, values and sums of one sequence of this length."""
        return sum(head.bytes for layer in self.layers for head in layer.heads)

    @property
    def softmax_bytes(self) -> int:
        return sum(head.bytes_of["exact"] for layer in self.layers for head in layer.heads)

    def save(self, folder: Path) -> list[Path]:
        """conversion.json and conversion.md."""
        import torch
        import transformers

        versions = {
            "tarnn": __version__,
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        }
        facts = {
            **asdict(self), "bytes": self.bytes, "softmax_bytes": self.softmax_bytes, "versions": versions,
        }  # fmt: skip
        paths = [folder / "conversion.json", folder / "conversion.md"]
        paths[0].write_text(json.dumps(facts, indent=1) + "\n")
        paths[1].write_text(self.page())
        return paths

    def page(self) -> str:
        """Markdown."""
        near = self.options["window"] + self.options["sinks"]
        modes = [head.mode for layer in self.layers for head in layer.heads]
        counts = ", ".join(f"{modes.count(x)} {x}" for x in ("features", "window", "exact"))
        rows = [
            f"| {layer.layer} | {i} | {head.mode} | {head.error_features:.4f} | {head.error_window:.4f} | "
            f"{head.error_wide:.4f} | {head.far_share:.3f} | {head.teacher_far_share:.3f} |"
            for layer in self.layers
            for i, head in enumerate(layer.heads)
        ]
        harm = [
            f"| {x.layer} | {x.harm:+.4f} | {', '.join(x.modes)} |" for x in self.layers if x.harm is not None
        ]
        parts = [
            "# What the conversion found",
            f"{self.texts} texts of up to {self.length:,} tokens calibrated it, {self.check_texts} others measured it. "
            f"Window {self.options['window']}, sinks {self.options['sinks']}: {near:,} keys are exact. "
            f"Key/value heads: {counts}.",
            f"* {self.unit}: {self.softmax:.4f} with softmax attention, {self.hybrid:.4f} converted "
            f"({self.hybrid - self.softmax:+.4f})\n"
            f"* bytes of keys, values and sums of one such sequence: {self.bytes:,} of {self.softmax_bytes:,}",
            *([LAYERS + "\n".join(harm)] if harm else []),
            "## Heads\n\nErrors of a head's output, squared and relative, where far keys are estimated by features, where "
            "window and sinks are alone, and where the window is larger by the bytes of the features. ρ: the share of "
            "a query's weight that lies on far keys, as features have it and in the original.\n\n"
            "| layer | head | chosen | features | window | equal bytes | ρ | ρ, original |\n"
            "| --: | --: | --- | --: | --: | --: | --: | --: |\n" + "\n".join(rows),
        ]  # fmt: skip
        return "\n\n".join(parts) + "\n"
