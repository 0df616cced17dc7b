"""The model of images: it predicts a distribution of each value of an image from those before it, row by row."""

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers.utils import ModelOutput
from transformers.utils.generic import can_return_tuple

from tarnn.huggingface.backbone import TarnnModel, TarnnPreTrainedModel
from tarnn.huggingface.image_config import TarnnImageConfig
from tarnn.models.backbone import Backbone
from tarnn.models.images import START, ImageModel


@dataclass
class ImageGenerationOutput(ModelOutput):
    """loss: mean nats per value. nats: (b,), of each whole image. parameters: (b, n, p), of the distribution of
    each of an image's n values (`config.make_likelihood()` knows what they mean)."""

    loss: Tensor | None = None
    nats: Tensor | None = None
    parameters: Tensor | None = None
    hidden_states: tuple[Tensor, ...] | None = None
    attentions: tuple[Tensor, ...] | None = None


class TarnnForImageGeneration(ImageModel, TarnnPreTrainedModel):
    """`TarnnModel` over the values of an image, and a linear layer to the parameters of a distribution.

        P(image) = Π_i P(x_i | x_0 … x_{i−1}, class)        bits a dimension = −log₂ P(image) / n

    An image is a sequence: row by row, in a row pixel by pixel, in a pixel channel by channel, red first: green knows
    red, and blue knows red and green (as in Katharopoulos et al. 2020, section 4.2). Before the first value stands START (256);
    each token's position is that of the value that it predicts. With classes, the class's embedding is added at
    every position, so that no state need remember it.

    Like `TarnnForCausalLM`, it runs in two ways, which agree: `forward` over whole images, for training and likelihoods,
    and `new_state`, `prefill`, `step`, value after value in constant time (see `tarnn.decoding.pixels`).
    """

    config: TarnnImageConfig
    config_class = TarnnImageConfig
    main_input_name = "pixel_values"
    accepts_loss_kwargs = False  # its loss is a mean: images are all of one size

    backbone: ClassVar[type[Backbone]] = TarnnModel

    __init__ = TarnnPreTrainedModel.__init__

    @can_return_tuple
    def forward(
        self,
        pixel_values: Int[Tensor, "b height width channels"],
        class_labels: Int[Tensor, " b"] | None = None,
        **kwargs: Any,
    ) -> ImageGenerationOutput:
        """Compute the likelihood of whole images, pixel_values (b, height, width, channels), integers from 0 to 255.

        class_labels (b,): needed by, and only by, a model with classes. Other arguments as in `TarnnModel.forward`.
        Sums over logarithms are float32 (float64 for float64 weights). Raises ValueError for images of another size or
        type, and labels that don't fit.
        """
        values = self.sequence(pixel_values)
        ids = torch.cat([values.new_full((len(values), 1), START), values[:, :-1]], dim=1)
        positions = torch.arange(ids.shape[1], device=ids.device)[None]
        embedded = self.embed(ids, positions, self.condition(class_labels, len(ids)))
        out = self.model(inputs_embeds=embedded, use_cache=False, **kwargs)
        parameters = self.head(out.last_hidden_state)
        nats = -self.likelihood.log_prob(parameters, values)
        return ImageGenerationOutput(nats.mean(), nats.sum(-1), parameters, out.hidden_states, out.attentions)

    @torch.no_grad()
    def bits_per_dim(
        self, pixel_values: Int[Tensor, "b height width channels"], class_labels: Int[Tensor, " b"] | None = None
    ) -> Float[Tensor, " b"]:
        """Compute −log₂ P(image) / n of each image; a uniform guess among 256 values costs 8."""
        nats = self(pixel_values, class_labels).nats
        return nats / (self.config.sequence_length * math.log(2))
