"""What a tarnn model of images is made of."""

from typing import ClassVar

from tarnn.models.configuration import TarnnConfig, check_choice, check_positive_int
from tarnn.models.likelihoods import NUM_VALUES, Categorical, Likelihood, LogisticMixture

LIKELIHOODS = (LogisticMixture.name, Categorical.name)
START = NUM_VALUES  # the token before an image's first value
VOCABULARY = NUM_VALUES + 1


class TarnnImageConfig(TarnnConfig):
    """The choices that make a `TarnnForImageGeneration`: those of `TarnnConfig`, and

    image_height, image_width, num_channels (1 grey, 3 colour): of every image.
    likelihood: logistic_mixture (PixelCNN++; num_mixtures components) | categorical (256 logits).
    num_classes: 0, or how many classes images are made of on request.
    position: grid (learned embeddings of row, column and channel, added), or one of `TarnnConfig`'s, which count
        the values of an image, row by row, from 0 on.

    The vocabulary is not to be chosen: 256 values, and 256 for the start of an image. Sequences are as long as an
    image has values. `TarnnImageConfig.paper(...)` is the model of Katharopoulos et al. 2020, section 4.2.
    """

    model_type = "tarnn_image"
    keys_to_ignore_at_inference: ClassVar[list[str]] = []
    positions: ClassVar[tuple[str, ...]] = (*TarnnConfig.positions, "grid")

    image_height: int = 28
    image_width: int = 28
    num_channels: int = 1
    likelihood: str = "logistic_mixture"
    num_mixtures: int = 10
    num_classes: int = 0
    position: str = "grid"
    vocab_size: int = VOCABULARY
    tie_word_embeddings: bool = False

    def __post_init__(self, **kwargs):
        self._check_image()
        if self.max_position_embeddings is None:
            self.max_position_embeddings = self.sequence_length
        super().__post_init__(**kwargs)

    @property
    def sequence_length(self) -> int:
        """The values of an image: height × width × channels."""
        return self.image_height * self.image_width * self.num_channels

    def _around_blocks(self) -> int:
        width = self.hidden_size // 2 if self.position == "sinusoidal_half" else self.hidden_size
        tables = self.num_classes + (
            self.image_height + self.image_width + self.num_channels if self.position == "grid" else 0
        )
        head = (self.hidden_size + 1) * self.make_likelihood().num_parameters
        return super()._around_blocks() - self.vocab_size * self.hidden_size + tables * width + head

    def make_likelihood(self) -> Likelihood:
        return Categorical() if self.likelihood == Categorical.name else LogisticMixture(self.num_mixtures)

    def _check_image(self) -> None:
        for name in ("image_height", "image_width", "num_mixtures"):
            check_positive_int(name, getattr(self, name))
        if self.num_channels not in (1, 3):
            raise ValueError(f"num_channels must be 1 (grey) or 3 (colour); got {self.num_channels!r}.")
        if type(self.num_classes) is not int or self.num_classes < 0:
            raise ValueError(f"num_classes must be 0 or a positive integer; got {self.num_classes!r}.")
        check_choice("likelihood", self.likelihood, LIKELIHOODS)
        fixed: dict[str, object] = {
            "vocab_size": VOCABULARY,
            "tie_word_embeddings": False,
            "causal": True,
            "input_size": None,
        }
        fixed["max_position_embeddings"] = self.max_position_embeddings and self.sequence_length
        for name, value in fixed.items():
            if getattr(self, name) != value:
                raise ValueError(f"{name} of a model of images is {value}, not {getattr(self, name)!r}; leave it out.")
