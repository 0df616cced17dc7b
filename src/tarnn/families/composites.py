"""Models of images and text whose text model is of a family here: it opens alone, and what sees is left."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Int
from torch import Tensor

from tarnn.errors import UserError
from tarnn.families.config import Config
from tarnn.families.weights import Weights

SEEING = ("model.vision_tower.*", "model.multi_modal_projector.*", "model.merger.*")
TEXT, INNER = "model.", "model.language_model."  # names of a text model, and of one in a composite
PLACES = {  # keys of tokens in whose place a composite puts what it sees or hears
    "image_token_id": "an image",
    "image_token_index": "an image",
    "video_token_id": "a video",
    "audio_token_id": "a sound",
}
MINICPM = (
    "downsample_mode",
    "insert_layer_id",
    "merge_kernel_size",
    "merger_times",
    "newline_id",
    "slice_end_id",
    "slice_start_id",
)


class Composite(NamedTuple):
    """text: model_type of the text model. tied: default of `tie_word_embeddings`. keys: that change nothing in texts."""

    text: str
    tied: bool
    keys: tuple[str, ...] = ()


COMPOSITES = {
    "lfm2_vl": Composite("lfm2", tied=True),
    "lfm3_vl": Composite("lfm3", tied=True),
    "minicpm_ocr": Composite("qwen3_5_text", tied=True, keys=MINICPM),
    "minicpmv4_6": Composite("qwen3_5_text", tied=False, keys=MINICPM),
    "minicpmv4_7": Composite("qwen3_5_text", tied=False, keys=MINICPM),
}


def check_text(ids: Tensor | Int[np.ndarray, "..."], fields: Mapping[str, Any]) -> None:
    """Raise UserError for tokens that stand for images or sounds. fields: of the config of the model that is to read them."""
    if not isinstance(fields.get("text_config"), Mapping):
        return
    for key, what in PLACES.items():
        token = fields.get(key)
        if type(token) is int and bool((ids == token).any()):
            raise UserError(
                f"token {token} stands for {what} ({key}), and only the text model of this {fields.get('model_type')!s:.60} was "
                "opened, which reads text alone. Leave it out of the prompt."
            )


def text_of(config: Config, weights: Weights) -> tuple[Config, Weights]:
    """Return config and weights of a composite's text model, under the names that it has by itself."""
    kind = COMPOSITES[config.model_type]
    config.skip(*kind.keys)
    if config.get("text_config") is None:
        config.refuse("text_config", None, "the config of a text model")
    text = config.text(tied=kind.tied, model_type=kind.text)
    text.choice("model_type", kind.text)
    weights.skip_matching(*SEEING)
    return text, weights.renamed(TEXT, INNER)
