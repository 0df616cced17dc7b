"""Open a model of images to draw with it: by the program of its folder, or, where that does not run compiled, in PyTorch."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from tarnn.decoding.choice import fastest_step
from tarnn.decoding.from_program import open_folder
from tarnn.decoding.loop import Step
from tarnn.decoding.opened import Opened
from tarnn.families.config import Config
from tarnn.families.own.text import checked
from tarnn.models.images import ImageModelConfig, ImageState, check_labels
from tarnn.tasks.checkpoint import open_model


class ImageProgram:
    """A model of images as `PixelLoop` takes it, that runs the program of its folder; no module is built."""

    def __init__(self, opened: Opened, config: ImageModelConfig):
        self.opened, self.config, self.likelihood = opened, config, config.make_likelihood()
        self.step, self.prefill, self.device, self.dtype = opened.step, opened.prefill, opened.device, opened.dtype
        program: Any = opened.step
        self._classes: Tensor | None = program.program.instructions[0].weights.get("classes")

    def new_state(self, batch_size: int, class_labels: Int[Tensor, " b"] | None = None) -> ImageState:
        """Make the state before START. Raises ValueError for labels that don't fit the model."""
        state = self.opened.new_state(batch_size, self.config.sequence_length)
        check_labels(class_labels, self.config.num_classes, batch_size)
        condition = None if self._classes is None or class_labels is None else self._classes[class_labels]
        return ImageState(state.layers, state.position, condition)


def open_images(
    folder: Path,
    weights: str | None = None,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | str = "cpu",
    track: Callable[[Any, int], Any] = lambda steps, total: steps,
) -> tuple[Any, Step, str]:
    """Return the model in a folder, its fastest step, and a line about that. Arguments as those of `open_step`.

    Raises UserError for a folder that holds no such model, and Refusal where weights are given and there is no fused step.
    """
    if torch.device(device).type == "cpu":
        try:
            opened = open_folder(folder, weights, dtype=dtype)
        except ValueError:  # the model in PyTorch runs, or says what is wrong
            opened = None
        if opened is not None and opened.weights is not None and opened.dtype.itemsize <= torch.float32.itemsize:
            config = checked(Config.read(folder), ImageModelConfig, "TarnnForImageGeneration")
            return ImageProgram(opened, config), opened.step, "; ".join(opened.about)
    model = open_model(folder, tasks=("image",), dtype=dtype, device=device, track=track)
    chosen = fastest_step(model, weights=weights)
    return model, chosen.step, "; ".join((chosen.name, *chosen.why_not))
