"""The model of images as an RNN over their values. `TarnnForImageGeneration` adds `forward`."""

from dataclasses import dataclass
from typing import ClassVar, cast

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from tarnn.models.backbone import Backbone, Recurrent
from tarnn.models.checks import check_choice, check_positive_int
from tarnn.models.config import ModelConfig
from tarnn.models.likelihoods import NUM_VALUES, Categorical, Likelihood, LogisticMixture
from tarnn.models.state import ModelState

START = NUM_VALUES  # the token before an image's first value
VOCABULARY = NUM_VALUES + 1


@dataclass(frozen=True, kw_only=True)
class ImageModelConfig(ModelConfig):
    """The keys of a model of images: those of `ModelConfig`, and

    image_height, image_width, num_channels (1 grey, 3 colour): of every image.
    likelihood: logistic_mixture (PixelCNN++; num_mixtures components) | categorical (256 logits).
    num_classes: 0, or how many classes images are made of on request.
    position: grid (learned embeddings of row, column and channel, added), or one of `ModelConfig`'s, which count
        the values of an image, row by row, from 0 on.

    The vocabulary is fixed: the values 0 to 255, and 256 for the start of an image. A sequence has the length of an
    image.
    """

    positions: ClassVar[tuple[str, ...]] = (*ModelConfig.positions, "grid")

    image_height: int = 28
    image_width: int = 28
    num_channels: int = 1
    likelihood: str = LogisticMixture.name
    num_mixtures: int = 10
    num_classes: int = 0
    position: str = "grid"
    vocab_size: int = VOCABULARY
    tie_word_embeddings: bool = False

    def __post_init__(self) -> None:
        for name in ("image_height", "image_width", "num_mixtures"):
            check_positive_int(name, getattr(self, name))
        if self.num_channels not in (1, 3):
            raise ValueError(f"num_channels must be 1 (grey) or 3 (colour); got {self.num_channels!r}.")
        if type(self.num_classes) is not int or self.num_classes < 0:
            raise ValueError(f"num_classes must be 0 or a positive integer; got {self.num_classes!r}.")
        check_choice("likelihood", self.likelihood, (LogisticMixture.name, Categorical.name))
        self._fill_in(max_position_embeddings=self.sequence_length)
        fixed = {
            "vocab_size": VOCABULARY,
            "tie_word_embeddings": False,
            "causal": True,
            "input_size": None,
            "max_position_embeddings": self.sequence_length,
        }
        for name, value in fixed.items():
            if getattr(self, name) != value:
                raise ValueError(f"{name} of a model of images is {value}, not {getattr(self, name)!r}; leave it out.")
        super().__post_init__()

    @property
    def sequence_length(self) -> int:
        """The values of an image: height × width × channels."""
        return self.image_height * self.image_width * self.num_channels

    def make_likelihood(self) -> Likelihood:
        return Categorical() if self.likelihood == Categorical.name else LogisticMixture(self.num_mixtures)

    def numbers_outside_blocks(self) -> int:
        width = self.hidden_size // 2 if self.position == "sinusoidal_half" else self.hidden_size
        tables = self.num_classes
        if self.position == "grid":
            tables += self.image_height + self.image_width + self.num_channels
        head = (self.hidden_size + 1) * self.make_likelihood().num_parameters
        no_output_layer = super().numbers_outside_blocks() - self.vocab_size * self.hidden_size
        return no_output_layer + tables * width + head


@dataclass(frozen=True, eq=False, repr=False)
class ImageState(ModelState):
    """A `ModelState`, and the images' classes: condition (b, width), their embeddings, or None."""

    condition: Tensor | None = None


class ImageModel(Recurrent):
    """`Backbone` over the values of an image, and a linear layer to the parameters of a distribution."""

    backbone: ClassVar[type[Backbone]] = Backbone

    def build(self, config: ImageModelConfig) -> None:
        self.model = self.backbone(self.config)
        self.likelihood = config.make_likelihood()
        width = cast(nn.Embedding, self.model.embed_tokens).embedding_dim
        self.grid = config.position == "grid"
        if self.grid:
            self.embed_rows = nn.Embedding(config.image_height, width)
            self.embed_columns = nn.Embedding(config.image_width, width)
            self.embed_channels = nn.Embedding(config.num_channels, width)
        self.embed_classes = nn.Embedding(config.num_classes, width) if config.num_classes else None
        self.head = nn.Linear(config.hidden_size, self.likelihood.num_parameters)

    @torch.no_grad()
    def new_state(
        self,
        batch_size: int,
        capacity: int | None = None,
        class_labels: Int[Tensor, " b"] | None = None,
        cache_dtype: torch.dtype | None = None,
    ) -> ImageState:
        """Make the state before START. Softmax layers allocate `capacity` tokens, by default a whole image; `cache_dtype`
        as in `Backbone.new_states`."""
        capacity = self.config.sequence_length if capacity is None else capacity
        layers = self.model.new_states(batch_size, capacity, cache_dtype)
        position = torch.zeros(batch_size, dtype=torch.int64, device=self.device)
        return ImageState(layers, position, self.condition(class_labels, batch_size))

    @torch.no_grad()
    def prefill(
        self, input_ids: Int[Tensor, "b t"], state: ImageState, *, inplace: bool = False
    ) -> tuple[Float[Tensor, "b p"], ImageState]:
        """Read START and the values so far, (b, t), in one or several pieces: (parameters of the next value's
        distribution, float32; new state). `inplace` lets the given state's memory be used for the new one."""
        positions = state.position[:, None] + torch.arange(input_ids.shape[1], device=input_ids.device)
        embedded = self.embed(input_ids, positions.clamp(max=self.config.sequence_length - 1), state.condition)
        x, after = self.model.prefill(input_ids, state, inputs_embeds=embedded, inplace=inplace)
        return self.head(x[:, -1]).float(), ImageState(after.layers, after.position, state.condition)

    @torch.no_grad()
    def step(
        self, token_ids: Int[Tensor, " b"], state: ImageState, *, inplace: bool = False
    ) -> tuple[Float[Tensor, "b p"], ImageState]:
        """Read one value per row (b,), START first: (parameters of the next one's distribution, float32; the state after
        it). `inplace` writes into the given state. Shapes never change, so it can be compiled (but for softmax
        layers, whose caches fill up)."""
        positions = state.position[:, None].clamp(max=self.config.sequence_length - 1)
        embedded = self.embed(token_ids[:, None], positions, state.condition)
        x, after = self.model.step(token_ids, state, inputs_embeds=embedded, inplace=inplace)
        return self.head(x).float(), ImageState(after.layers, after.position, state.condition)

    def embed(
        self, ids: Int[Tensor, "b t"], positions: Int[Tensor, "#b t"], condition: Float[Tensor, "b width"] | None
    ) -> Float[Tensor, "b t width"]:
        """Add the embeddings of tokens, of the positions that they predict (in `grid` models), and of the class."""
        x = self.model.embed_tokens(ids)
        if self.grid:
            pixels = positions // self.config.num_channels
            x = x + self.embed_rows(pixels // self.config.image_width)
            x = x + self.embed_columns(pixels % self.config.image_width)
            x = x + self.embed_channels(positions % self.config.num_channels)
        return x if condition is None else x + condition[:, None]

    def condition(self, class_labels: Tensor | None, batch_size: int) -> Tensor | None:
        """Return the classes' embeddings, (b, width); None for a model without classes."""
        check_labels(class_labels, self.config.num_classes, batch_size)
        return None if self.embed_classes is None else self.embed_classes(class_labels)

    def sequence(self, pixel_values: Tensor) -> Int[Tensor, "b n"]:
        """Flatten images (b, height, width, channels) to sequences of their values, int64."""
        config = self.config
        shape = (config.image_height, config.image_width, config.num_channels)
        if pixel_values.ndim != 4 or pixel_values.shape[1:] != shape or not len(pixel_values):
            raise ValueError(
                f"this model's images are (b, {', '.join(map(str, shape))}): batch, height, width, channels; got "
                f"{tuple(pixel_values.shape)}."
            )
        if pixel_values.is_floating_point() or pixel_values.dtype == torch.bool:
            raise ValueError(f"pixel_values are integers from 0 to 255, best as uint8; got {pixel_values.dtype}.")
        if pixel_values.dtype != torch.uint8 and not torch.compiler.is_compiling():
            low, high = int(pixel_values.min()), int(pixel_values.max())
            if low < 0 or high > 255:
                raise ValueError(f"pixel_values must be from 0 to 255; got {low if low < 0 else high}.")
        return pixel_values.flatten(1).long()


def check_labels(class_labels: Tensor | None, num_classes: int, batch_size: int) -> None:
    """Raise ValueError unless these are the classes of a batch of images, or, for a model without classes, None."""
    if not num_classes:
        if class_labels is not None:
            raise ValueError("this model knows no classes (num_classes = 0); leave class_labels out.")
        return
    if class_labels is None or class_labels.shape != (batch_size,):
        got = "none" if class_labels is None else f"shape {tuple(class_labels.shape)}"
        raise ValueError(
            f"this model makes images of {num_classes} classes: it needs class_labels ({batch_size},); got {got}."
        )
    # on another device reading them would wait for it, and the embedding refuses them itself
    if class_labels.is_cpu and not torch.compiler.is_compiling() and len(class_labels):
        low, high = int(class_labels.min()), int(class_labels.max())
        if low < 0 or high >= num_classes:
            raise ValueError(f"class_labels must be from 0 to {num_classes - 1}; got {low if low < 0 else high}.")
