"""The report of a conversion, layer by layer and head by head: as JSON, and as a page to read."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tarnn._version import __version__

LAYERS = (
    "## Layers\n\nHarm: what converting this layer alone adds to the loss.\n\n"
    "| layer | harm | heads |\n| --: | --: | --- |\n"
)

BEYOND = (
    "**Features were calibrated on texts of {:,} tokens. Queries further from the start see window and sinks alone**, since "
    "beyond that length features do harm; convert on longer texts to use them there."
)


@dataclass
class HeadReport:
    """A key/value head, and the query heads that share it. Errors: |output − teacher's|² / |teacher's|²."""

    mode: str  # features, window, exact
    error_features: float | None  # None: there are none
    error_window: float
    error_wide: float | None  # of a window that is larger by the bytes of the features
    far_share: float  # ρ: the mean share of a query's weight that features give to far keys
    teacher_far_share: float
    far_bias: list[float]  # λ of each query head
    bytes_of: dict[str, int]  # of one sequence, for each mode

    @property
    def error(self) -> float:
        errors = {"features": self.error_features, "window": self.error_window, "exact": 0.0}
        return errors[self.mode] or 0.0

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
    """A conversion's results. softmax, hybrid: the loss before and after, on texts that nothing was calibrated on.

    length: how far features were calibrated. window_alone, wide_alone: the loss with window and sinks alone, and with a
    window of wide_window tokens, which is larger by the bytes of the features; None: not measured.
    """

    options: dict[str, Any]
    texts: int
    check_texts: int
    length: int
    unit: str
    softmax: float
    hybrid: float
    layers: list[LayerReport]
    window_alone: float | None = None
    wide_window: int | None = None
    wide_alone: float | None = None

    @property
    def advice(self) -> str | None:
        """Whether features earn their bytes; None without features."""
        heads = [(x.error_features, x.error_wide) for layer in self.layers for x in layer.heads]
        better = [a < b for a, b in heads if a is not None and b is not None]
        if self.wide_window is None or not better:
            return None
        if any(better):
            return (
                f"features lose less than a window of {self.wide_window:,}, which has as many bytes, in {sum(better)} of "
                f"{len(better)} heads."
            )
        return f"a window of {self.wide_window:,} would lose less in all heads: `--window {self.wide_window} --feature-map none`"

    @property
    def bytes(self) -> int:
        """The bytes of keys, values and sums of one sequence of this length."""
        return sum(head.bytes for layer in self.layers for head in layer.heads)

    @property
    def softmax_bytes(self) -> int:
        return sum(head.bytes_of["exact"] for layer in self.layers for head in layer.heads)

    def save(self, folder: Path) -> list[Path]:
        """Write conversion.json and conversion.md into a folder; return their paths."""
        import torch
        import transformers

        versions = {"tarnn": __version__, "torch": torch.__version__, "transformers": transformers.__version__}
        facts = {**asdict(self), "bytes": self.bytes, "softmax_bytes": self.softmax_bytes, "versions": versions}
        paths = [folder / "conversion.json", folder / "conversion.md"]
        paths[0].write_text(json.dumps(facts, indent=1) + "\n")
        paths[1].write_text(self.page())
        return paths

    def page(self) -> str:
        """The report as Markdown."""
        near = self.options["window"] + self.options["sinks"]
        modes = [head.mode for layer in self.layers for head in layer.heads]
        counts = ", ".join(f"{modes.count(x)} {x}" for x in ("features", "window", "exact"))
        rows = [
            f"| {layer.layer} | {i} | {head.mode} | {number(head.error_features)} | {head.error_window:.4f} | "
            f"{number(head.error_wide)} | {head.far_share:.3f} | {head.teacher_far_share:.3f} |"
            for layer in self.layers
            for i, head in enumerate(layer.heads)
        ]
        harm = [f"| {x.layer} | {x.harm:+.4f} | {', '.join(x.modes)} |" for x in self.layers if x.harm is not None]
        parts = [
            "# What the conversion found",
            f"{self.texts} texts of {self.length:,} tokens calibrated it, {self.check_texts} others measured it. "
            f"Window {self.options['window']}, sinks {self.options['sinks']}: {near:,} keys are exact. "
            f"Key/value heads: {counts}.",
            f"* {self.unit}: {self.softmax:.4f} with softmax attention, {self.hybrid:.4f} converted "
            f"({self.hybrid - self.softmax:+.4f})\n{self.controls()}"
            f"* bytes of keys, values and sums of one such sequence: {self.bytes:,} of {self.softmax_bytes:,}",
            *([BEYOND.format(self.length)] if "features" in modes else []),
            *([self.advice[0].upper() + self.advice[1:]] if self.advice else []),
            *([LAYERS + "\n".join(harm)] if harm else []),
            "## Heads\n\nErrors of a head's output, squared and relative, where far keys are estimated by features, where "
            "window and sinks are alone, and where the window is larger by the bytes of the features. ρ: the share of "
            "a query's weight that lies on far keys, as features have it and in the original.\n\n"
            "| layer | head | chosen | features | window | equal bytes | ρ | ρ, original |\n"
            "| --: | --: | --- | --: | --: | --: | --: | --: |\n" + "\n".join(rows),
        ]
        return "\n\n".join(parts) + "\n"

    def controls(self) -> str:
        """The losses without features, as lines of a list."""
        alone, wide = self.window_alone, self.wide_alone
        lines = {"window and sinks alone": alone, f"a window of {self.wide_window} alone, of equal bytes": wide}
        return "".join(
            f"* {name}: {loss:.4f} ({loss - self.softmax:+.4f})\n" for name, loss in lines.items() if loss is not None
        )


def number(x: float | None) -> str:
    return "–" if x is None else f"{x:.4f}"
