"""The config of a model of images, as transformers saves it."""

from typing import Any, ClassVar

from tarnn.huggingface.config import TarnnConfig
from tarnn.models.images import ImageModelConfig


class TarnnImageConfig(TarnnConfig, record=ImageModelConfig):
    """The choices that make a `TarnnForImageGeneration`. `TarnnImageConfig.paper(...)` is the model of Katharopoulos et
    al. 2020, section 4.2."""

    model_type = "tarnn_image"
    keys_to_ignore_at_inference: ClassVar[list[str]] = []

    sequence_length: ClassVar[Any] = ImageModelConfig.sequence_length
    make_likelihood: ClassVar[Any] = ImageModelConfig.make_likelihood
