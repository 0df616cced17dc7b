"""The pixel loop: images value after value, with nothing that grows and nothing that is allocated on the way."""

from collections.abc import Iterator

import torch
from jaxtyping import Int, UInt8
from torch import Tensor

from tarnn.decoding.loop import Step, prefill_of
from tarnn.decoding.samplers import Sampler, refuse_nan, sampler
from tarnn.models.images import START, ImageModel
from tarnn.models.likelihoods import Categorical, LogisticMixture


def pixel_sampler(
    likelihood: Categorical | LogisticMixture,
    *,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    generator: torch.Generator | None = None,
) -> Sampler:
    """From the parameters of a distribution (b, p) to a value of each row (b,).

    Plain draws come from the distribution itself. With top_k, top_p or min_p, from its 256 probabilities, as tokens are
    drawn (`samplers.sampler`); temperature then divides their logarithms. Raises ValueError for values out of range.
    """
    draw = sampler(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, generator=generator)
    if top_k == 0 and top_p == 1 and min_p == 0:
        return lambda parameters: likelihood.sample(parameters, generator, temperature)
    return lambda parameters: draw(likelihood.log_probs(parameters))


class PixelLoop:
    """A batch of images in the making.

        loop = PixelLoop(model, batch_size=16, known=half)          # known (b, t): the values that are given
        for count in loop.draw(pixel_sampler(model.likelihood)): ...  # each of the others, from t + 1 on
        loop.images                                                  # uint8 (b, height, width, channels)

    `state` is written in place and has the size that it began with. `step` has the signature of `model.step`, which
    it is by default; `tarnn.decoding.fastest_step` gives a faster one, whose `prefill` reads the known values if it has one.
    Runs without autograd.
    """

    def __init__(
        self,
        model: ImageModel,
        batch_size: int,
        *,
        class_labels: Int[Tensor, " b"] | None = None,
        known: UInt8[Tensor, "b t"] | None = None,
        step: Step | None = None,
    ):
        self.model = model
        self.step: Step = model.step if step is None else step
        self.state = model.new_state(batch_size, class_labels=class_labels)
        length = model.config.sequence_length
        self.filled = 0 if known is None else known.shape[1]
        if known is not None and (len(known) != batch_size or self.filled > length):
            raise ValueError(
                f"known values are ({batch_size}, t) with t up to {length}, the values of an image; got "
                f"{tuple(known.shape)}."
            )
        self.tokens = torch.full((batch_size, length + 1), START, device=model.device)
        if known is not None:
            self.tokens[:, 1 : self.filled + 1] = known

    @torch.no_grad()
    def draw(self, sample: Sampler) -> Iterator[int]:
        """Draws the values that are not known, one per row at a time; yields how many there are then.

        The last one is not read: nothing comes after it. Raises ValueError when the model gives NaN.
        """
        length = self.tokens.shape[1] - 1
        if self.filled == length:
            return
        first = self.filled
        if first:
            prefill = prefill_of(self.step, self.model)
            parameters, self.state = prefill(self.tokens[:, : first + 1], self.state, inplace=True)
        else:
            parameters, self.state = self.step(self.tokens[:, 0], self.state, inplace=True)
        for i in range(first + 1, length + 1):
            token = self.tokens[:, i]
            token.copy_(sample(parameters))
            self.filled = i
            yield i
            if i < length:
                parameters, self.state = self.step(token, self.state, inplace=True)
        refuse_nan(parameters)

    @property
    def images(self) -> UInt8[Tensor, "b height width channels"]:
        """Return the images as far as they are drawn, 0 for values to come."""
        config = self.model.config
        values = self.tokens[:, 1:].masked_fill(self.tokens[:, 1:] == START, 0).to(torch.uint8)
        return values.view(-1, config.image_height, config.image_width, config.num_channels)


def upper_rows(images: Tensor, rows: int) -> Int[Tensor, "b t"]:
    """The values of the first rows of images (b, height, width, channels): what a completion starts from."""
    return images[:, :rows].flatten(1)
