"""What a tarnn encoder–decoder is made of."""

from typing import Any

from tarnn.attention.registry import ATTENTIONS
from tarnn.models.configuration import TarnnConfig, check_pattern, check_positive_int


class TarnnSeq2SeqConfig(TarnnConfig):
    """The choices that make a `TarnnForConditionalGeneration`: those of `TarnnConfig`, which are the decoder's, and

    encoder_layers: blocks of the encoder, which is else like the decoder, sees both sides and has no decay; by default
        num_hidden_layers.
    cross_attention: the kind of the decoder's attention to the encoder: a name, or a list that is repeated over the layers;
        by default that of `attention`.
    decoder_start_token_id: what the decoder begins with; by default pad_token_id.
    """

    model_type = "tarnn_seq2seq"

    encoder_layers: int = None  # type: ignore[assignment]  # num_hidden_layers
    cross_attention: str | list[str] = None  # type: ignore[assignment]  # attention
    decoder_start_token_id: int = None  # type: ignore[assignment]  # pad_token_id
    is_encoder_decoder: bool = True
    pad_token_id: int | None = 0
    position: str = "sinusoidal"

    def __post_init__(self, **kwargs: Any):
        if self.encoder_layers is None:
            self.encoder_layers = self.num_hidden_layers
        if self.cross_attention is None:
            self.cross_attention = self.attention
        if self.decoder_start_token_id is None and self.pad_token_id is not None:
            self.decoder_start_token_id = self.pad_token_id
        check_positive_int("encoder_layers", self.encoder_layers)
        if not self.is_encoder_decoder or not self.causal or self.input_size is not None:
            raise ValueError(
                "an encoder–decoder of tokens has is_encoder_decoder=True, a causal decoder and no input_size; leave them out."
            )
        super().__post_init__(**kwargs)
        check_pattern("cross_attention", self.cross_attention, ATTENTIONS, self.num_hidden_layers)
        for name in ("decoder_start_token_id", "pad_token_id"):
            if (value := getattr(self, name)) is None or not 0 <= value < self.vocab_size:
                raise ValueError(f"{name} must be a token's number, below {self.vocab_size}; got {value!r}.")

    def cross_attention_of(self, layer: int) -> str:
        names = self.cross_attention
        return names if isinstance(names, str) else names[layer % len(names)]

    def num_parameters_estimate(self) -> int:
        from tarnn.models.block import count_in_blocks  # which is made of a config

        shared = self.vocab_size * self.hidden_size  # the encoder has no output layer, or shares its embedding
        encoder = self.encoder().num_parameters_estimate() - shared
        return count_in_blocks(self, self.hidden_size) + self._around_blocks() + encoder

    def encoder(self) -> TarnnConfig:
        """The config of the encoder."""
        shared = {name: getattr(self, name) for name in TarnnConfig.known_keys()}
        depth = {"num_hidden_layers": self.encoder_layers, "causal": False, "decay": "none"}
        return TarnnConfig(**shared | depth)
