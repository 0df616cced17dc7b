"""The config of an encoder–decoder, as transformers saves it."""

from typing import Any

from tarnn.huggingface.config import TarnnConfig
from tarnn.models.config import FILLED_IN, Seq2SeqModelConfig
from tarnn.models.size import count_numbers


class TarnnSeq2SeqConfig(TarnnConfig, record=Seq2SeqModelConfig):
    """The choices that make a `TarnnForConditionalGeneration`: those of `TarnnConfig`, which are the decoder's, and

    decoder_start_token_id: what the decoder begins with; by default pad_token_id.
    """

    model_type = "tarnn_seq2seq"

    decoder_start_token_id: int = FILLED_IN  # pad_token_id
    is_encoder_decoder: bool = True
    pad_token_id: int | None = 0

    def __post_init__(self, **kwargs: Any):
        if self.decoder_start_token_id is None and self.pad_token_id is not None:
            self.decoder_start_token_id = self.pad_token_id
        if not self.is_encoder_decoder:
            raise ValueError("an encoder–decoder has is_encoder_decoder=True; leave it out.")
        super().__post_init__(**kwargs)
        for name in ("decoder_start_token_id", "pad_token_id"):
            if (value := getattr(self, name)) is None or not 0 <= value < self.vocab_size:
                raise ValueError(f"{name} must be a token's number, below {self.vocab_size}; got {value!r}.")

    def num_parameters_estimate(self) -> int:
        shared = self.vocab_size * self.hidden_size  # the encoder has no output layer, or shares its embedding
        decoder = count_numbers(self.record(), context_size=self.hidden_size)
        return decoder + self.encoder().num_parameters_estimate() - shared

    def encoder(self) -> TarnnConfig:
        """The config of the encoder."""
        shared = {name: getattr(self, name) for name in TarnnConfig.known_keys()}
        return TarnnConfig(**shared | {"num_hidden_layers": self.encoder_layers, "causal": False, "decay": "none"})
