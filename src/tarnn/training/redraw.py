"""New random features every so many steps, and maps set to the data: what training does with feature maps."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from transformers import TrainerCallback

from tarnn.attention.calibration import calibrated_layers, calibrating
from tarnn.feature_maps import RandomFeatureMap


def random_maps(module: nn.Module) -> list[RandomFeatureMap]:
    """The maps in `module` that have draws; one whose ω was made a parameter has none: training changes it."""
    maps = (x for x in module.modules() if isinstance(x, RandomFeatureMap))
    return [x for x in maps if not isinstance(x.omega, nn.Parameter)]


class Redraw(TrainerCallback):
    """Before every `every`-th step: new draws for random features, and new calibration where maps take it.

    Draw number n belongs to the steps from n·every on, and is a function of its seed and of n alone. So a run
    that is resumed sees the draws of one that was not interrupted, and all processes of a run see the same. An
    unlucky draw no longer decides a whole training (Choromanski et al. 2021, figures 5 and 15, arXiv 2009.14794).
    Nothing is drawn in evaluation, which is of the model as it would be saved at that step.

    every: 0 keeps the first draw, and calibrates once, before the first step.
    forward: runs the model that it is given on some thousand tokens, the same at every call and on all processes,
        to calibrate with (`tarnn.attention.calibrating`); None: maps stay as they are. It is called without
        gradients and dropout, so a resumed run finds the same parameters.
    """

    def __init__(self, every: int, forward: Callable[[nn.Module], Any] | None = None):
        if every < 0:
            raise ValueError(f"Redraw needs every ≥ 0 steps, 0 for never; got {every}.")
        self.every, self.forward = every, forward

    def on_step_begin(self, args, state, control, **kwargs):
        model = kwargs["model"]
        step = state.global_step
        if step % self.every if self.every else step:
            return
        draw = step // self.every if self.every else 0
        for phi in random_maps(model):
            if int(phi.draw) != draw:
                phi.redraw(draw)
        if self.forward is not None and calibrated_layers(model):
            calibrate(model, self.forward)


@torch.no_grad()
def calibrate(model: nn.Module, forward: Callable[[nn.Module], Any]) -> None:
    """One forward of `model`, as in evaluation, that sets its maps."""
    training = model.training
    model.eval()
    try:
        with calibrating(model):
            forward(model)
    finally:
        model.train(training)
