"""The model of images: a distribution over each value of an image, given those before it, row by row."""

import math
from dataclasses import dataclass
from typing import Any, cast

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers.utils import ModelOutput
from transformers.utils.generic import can_return_tuple

from tarnn.models.backbone import TarnnModel, TarnnPreTrainedModel
from tarnn.models.image_configuration import START, TarnnImageConfig
from tarnn.models.state import ModelState


@dataclass
class ImageGenerationOutput(ModelOutput):
    """loss: nats a value, the mean. nats: (b,), of each whole image. parameters: (b, n, p), of the distribution of
    each of an image's n values (`config.make_likelihood()` knows what they mean)."""

    loss: Tensor | None = None
    nats: Tensor | None = None
    parameters: Tensor | None = None
    hidden_states: tuple[Tensor, ...] | None = None
    attentions: tuple[Tensor, ...] | None = None


@dataclass(frozen=True, eq=False, repr=False)
class ImageState(ModelState):
    """A `ModelState`, and what is to be drawn: condition (b, width), the classes' embeddings, or None."""

    condition: Tensor | None = None


class TarnnForImageGeneration(TarnnPreTrainedModel):
    """`TarnnModel` over the values of an image, and a linear layer to the parameters of a distribution.

        P(image) = Π_i P(x_i | x_0 … x_{i−1}, class)        bits a dimension = −log₂ P(image) / n

    An image is a sequence: row by row, in a row pixel by pixel, in a pixel channel by channel, red first: green knows
    red, and blue knows red and green (as in Katharopoulos et al. 2020, section 4.2). Before the first value stands START (256);
    each token's place is that of the value that it is to predict. With classes, the class's embedding is added at
    every place, so that no state need remember it.

    As `TarnnForCausalLM`, it runs two ways which agree: `forward` over whole images, for training and likelihoods,
    and `new_state`, `prefill`, `step`, value after value in constant time (see `tarnn.generation.pixels`).
    """

    config: TarnnImageConfig
    config_class = TarnnImageConfig
    main_input_name = "pixel_values"
    accepts_loss_kwargs = False  # its loss is a mean: images are all of one size

    def __init__(self, config: TarnnImageConfig):
        super().__init__(config)
        self.model = TarnnModel(config)
        self.likelihood = config.make_likelihood()
        width = cast(nn.Embedding, self.model.embed_tokens).embedding_dim
        self.grid = config.position == "grid"
        if self.grid:
            self.embed_rows = nn.Embedding(config.image_height, width)
            self.embed_columns = nn.Embedding(config.image_width, width)
            self.embed_channels = nn.Embedding(config.num_channels, width)
        self.embed_classes = nn.Embedding(config.num_classes, width) if config.num_classes else None
        self.head = nn.Linear(config.hidden_size, self.likelihood.num_parameters)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        pixel_values: Int[Tensor, "b height width channels"],
        class_labels: Int[Tensor, " b"] | None = None,
        **kwargs: Any,
    ) -> ImageGenerationOutput:
        """The likelihood of whole images, pixel_values (b, height, width, channels), integers from 0 to 255.

        class_labels (b,): needed by, and only by, a model with classes. Other arguments as in `TarnnModel.forward`.
        Sums over logarithms are float32 (float64 for float64 weights). Raises ValueError for images of another size or
        type, and labels that don't fit.
        """
        values = self.sequence(pixel_values)
        ids = torch.cat([values.new_full((len(values), 1), START), values[:, :-1]], dim=1)
        places = torch.arange(ids.shape[1], device=ids.device)[None]
        embedded = self.embed(ids, places, self.condition(class_labels, len(ids)))
        out = self.model(inputs_embeds=embedded, use_cache=False, **kwargs)
        parameters = self.head(out.last_hidden_state)
        nats = -self.likelihood.log_prob(parameters, values)
        return ImageGenerationOutput(nats.mean(), nats.sum(-1), parameters, out.hidden_states, out.attentions)

    @torch.no_grad()
    def bits_per_dim(
        self,
        pixel_values: Int[Tensor, "b height width channels"],
        class_labels: Int[Tensor, " b"] | None = None,
    ) -> Float[Tensor, " b"]:
        """−log₂ P(image) / n of each image; a random guess among 256 values costs 8."""
        nats = self(pixel_values, class_labels).nats
        return nats / (self.config.sequence_length * math.log(2))

    @torch.no_grad()
    def new_state(
        self,
        batch_size: int,
        capacity: int | None = None,
        class_labels: Int[Tensor, " b"] | None = None,
    ) -> ImageState:
        """The state before START. Softmax layers make room for `capacity` tokens, by default a whole image."""
        capacity = self.config.sequence_length if capacity is None else capacity
        layers = self.model.new_states(batch_size, capacity)
        position = torch.zeros(batch_size, dtype=torch.int64, device=self.device)
        return ImageState(layers, position, self.condition(class_labels, batch_size))

    @torch.no_grad()
    def prefill(
        self, input_ids: Int[Tensor, "b t"], state: ImageState, *, inplace: bool = False
    ) -> tuple[Float[Tensor, "b p"], ImageState]:
        """Reads START and the values so far, (b, t), in one or several pieces: (parameters of the next value's
        distribution, float32; new state). `inplace` lets the given state's memory be used for the new one."""
        places = state.position[:, None] + torch.arange(input_ids.shape[1], device=input_ids.device)
        embedded = self.embed(input_ids, places.clamp(max=self.config.sequence_length - 1), state.condition)
        x, after = self.model.prefill(input_ids, state, inputs_embeds=embedded, inplace=inplace)
        return self.head(x[:, -1]).float(), ImageState(after.layers, after.position, state.condition)

    @torch.no_grad()
    def step(
        self, token_ids: Int[Tensor, " b"], state: ImageState, *, inplace: bool = False
    ) -> tuple[Float[Tensor, "b p"], ImageState]:
        """One value per row (b,), START first: (parameters of the next one's distribution, float32; the state after
        it). `inplace` writes into the given state. Shapes never change, so it can be compiled (but for softmax
        layers, whose caches fill up)."""
        places = state.position[:, None].clamp(max=self.config.sequence_length - 1)
        embedded = self.embed(token_ids[:, None], places, state.condition)
        x, after = self.model.step(token_ids, state, inputs_embeds=embedded, inplace=inplace)
        return self.head(x).float(), ImageState(after.layers, after.position, state.condition)

    def embed(
        self, ids: Int[Tensor, "b t"], places: Int[Tensor, "#b t"], condition: Float[Tensor, "b width"] | None
    ) -> Float[Tensor, "b t width"]:
        """Tokens, the places of the values that they predict (of `grid` models), and the class."""
        x = self.model.embed_tokens(ids)
        if self.grid:
            pixels = places // self.config.num_channels
            x = x + self.embed_rows(pixels // self.config.image_width)
            x = x + self.embed_columns(pixels % self.config.image_width)
            x = x + self.embed_channels(places % self.config.num_channels)
        return x if condition is None else x + condition[:, None]

    def condition(self, class_labels: Tensor | None, batch_size: int) -> Tensor | None:
        """The classes' embeddings, (b, width); None for a model without classes."""
        num_classes = self.config.num_classes
        if self.embed_classes is None:
            if class_labels is not None:
                raise ValueError("this model knows no classes (num_classes = 0); leave class_labels out.")
            return None
        if class_labels is None or class_labels.shape != (batch_size,):
            got = "none" if class_labels is None else f"shape {tuple(class_labels.shape)}"
            raise ValueError(
                f"this model makes images of {num_classes} classes: it needs class_labels ({batch_size},); got {got}."
            )
        if not torch.compiler.is_compiling() and len(class_labels):
            low, high = int(class_labels.min()), int(class_labels.max())
            if low < 0 or high >= num_classes:
                raise ValueError(
                    f"class_labels must be from 0 to {num_classes - 1}; got {low if low < 0 else high}."
                )
        return self.embed_classes(class_labels)

    def sequence(self, pixel_values: Tensor) -> Int[Tensor, "b n"]:
        """Images (b, height, width, channels) as sequences of their values, int64."""
        config = self.config
        shape = (config.image_height, config.image_width, config.num_channels)
        if pixel_values.ndim != 4 or pixel_values.shape[1:] != shape or not len(pixel_values):
            raise ValueError(
                f"this model's images are (b, {', '.join(map(str, shape))}): batch, height, width, channels; got "
                f"{tuple(pixel_values.shape)}."
            )
        if pixel_values.is_floating_point() or pixel_values.dtype == torch.bool:
            raise ValueError(
                f"pixel_values are integers from 0 to 255, best as uint8; got {pixel_values.dtype}."
            )
        if pixel_values.dtype != torch.uint8 and not torch.compiler.is_compiling():
            low, high = int(pixel_values.min()), int(pixel_values.max())
            if low < 0 or high > 255:
                raise ValueError(f"pixel_values must be from 0 to 255; got {low if low < 0 else high}.")
        return pixel_values.flatten(1).long()
