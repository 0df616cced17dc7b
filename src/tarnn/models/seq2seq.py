"""The encoder–decoder: a source is read once, by an encoder that sees both sides; its target is made token after token."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import Cache, DynamicCache, EncoderDecoderCache, GenerationMixin
from transformers.modeling_outputs import BaseModelOutput, Seq2SeqLMOutput
from transformers.utils.generic import can_return_tuple

from tarnn.attention.multihead import MultiHeadAttention
from tarnn.models.backbone import TarnnModel, TarnnPreTrainedModel
from tarnn.models.cache import StateLayer
from tarnn.models.seq2seq_configuration import TarnnSeq2SeqConfig
from tarnn.models.state import ModelState
from tarnn.ops import State


@dataclass(frozen=True, eq=False, repr=False)
class Seq2SeqState(State):
    """What the decoder remembers: of the target so far, and of the source, layer by layer, once and for all."""

    target: ModelState
    source: tuple[State, ...]

    @property
    def nbytes(self) -> int:
        return self.target.nbytes + sum(x.nbytes for x in self.source)


class TarnnDecoder(TarnnModel):
    """`TarnnModel` whose blocks also attend to an encoder's output, between attention and feed-forward."""

    config: TarnnSeq2SeqConfig
    config_class = TarnnSeq2SeqConfig
    cross = True


class TarnnForConditionalGeneration(TarnnPreTrainedModel, GenerationMixin):
    """Encoder, decoder with cross-attention, and a linear layer to the vocabulary, which all share one embedding.

    Self- and cross-attention are linear or softmax by their names in the config. What linear cross-attention needs of
    the source is S = Σ_j φ(k_j) v_jᵀ and z = Σ_j φ(k_j) per layer and head: computed once, and a step never looks at
    the source again. With softmax it is the keys and values of the whole source.

    Two ways to run it, which agree: `forward` with a transformers cache (Trainer, `generate`, beams), and `read`, `step`
    with the state as a plain value:

        state = model.read(source_ids)
        token = model.start(len(source_ids))
        while True:
            logits, state = model.step(token, state)
            token = logits.argmax(-1)
    """

    config: TarnnSeq2SeqConfig
    config_class = TarnnSeq2SeqConfig
    base_model_prefix = ""
    _tied_weights_keys = {  # noqa: RUF012
        "lm_head.weight": "decoder.embed_tokens.weight", "encoder.embed_tokens.weight": "decoder.embed_tokens.weight",
    }  # fmt: skip

    def __init__(self, config: TarnnSeq2SeqConfig):
        super().__init__(config)
        self.encoder = TarnnModel(config.encoder())
        self.decoder = TarnnDecoder(config)
        if config.tie_word_embeddings:  # one module: FSDP2 refuses a weight that two groups of modules own
            self.encoder.embed_tokens = self.decoder.embed_tokens
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    @property
    def tied(self) -> dict[str, str]:
        """Weights that are others of the model as well, by name; as `Recurrent` has it."""
        return self._tied_weights_keys if self.config.tie_word_embeddings else {}

    def tie(self) -> None:
        """Makes them one."""
        self.tie_weights()

    def get_encoder(self, modality: str | None = None) -> nn.Module:
        return self.encoder

    def get_input_embeddings(self) -> nn.Module:
        return self.decoder.embed_tokens

    def set_input_embeddings(self, value: nn.Module) -> None:
        self.encoder.embed_tokens = self.decoder.embed_tokens = value

    def prepare_decoder_input_ids_from_labels(self, labels: Tensor) -> Tensor:
        """Labels one place later, after the start token."""
        shifted = labels.roll(1, dims=-1)
        shifted = shifted.masked_fill(shifted < 0, cast(int, self.config.pad_token_id))
        return shifted.index_fill(1, torch.zeros(1, dtype=torch.long, device=labels.device), self.start_id)

    @property
    def start_id(self) -> int:
        return self.config.decoder_start_token_id

    @can_return_tuple
    def forward(
        self, input_ids: Tensor | None = None, attention_mask: Tensor | None = None, inputs_embeds: Tensor | None = None,
        decoder_input_ids: Tensor | None = None, decoder_attention_mask: Tensor | None = None,
        encoder_outputs: BaseModelOutput | None = None, past_key_values: Cache | None = None,
        labels: Tensor | None = None, use_cache: bool | None = None, **kwargs: Any,
    ) -> Seq2SeqLMOutput:  # fmt: skip
        """input_ids (b, s), the source, or encoder_outputs; decoder_input_ids (b, t) → logits (b, t, vocab).

        attention_mask (b, s), decoder_attention_mask (b, t): 0 = padding. labels (b, t): the tokens to be made, −100
        left out; without decoder_input_ids they are read one place later. The loss is in nats, the mean per token.
        """
        if decoder_input_ids is None:
            if labels is None:
                raise ValueError("an encoder–decoder needs decoder_input_ids, or labels to make them of.")
            decoder_input_ids = self.prepare_decoder_input_ids_from_labels(labels)
        if use_cache is None:
            use_cache = self.config.use_cache and not self.training and labels is None
        if use_cache and past_key_values is None:
            past_key_values = self._new_cache()
        read = isinstance(past_key_values, EncoderDecoderCache) and past_key_values.is_updated.get(0, False)
        if encoder_outputs is None and not read:
            encoder_outputs = self.encoder(
                input_ids=input_ids,
                attention_mask=attention_mask,
                inputs_embeds=inputs_embeds,
                use_cache=False,
            )
        source = None if encoder_outputs is None else encoder_outputs[0]
        own, cross = self._crosses(source, attention_mask, past_key_values)
        out = self.decoder(
            input_ids=decoder_input_ids, attention_mask=decoder_attention_mask, past_key_values=own,
            use_cache=use_cache, cross=cross, **kwargs,
        )  # fmt: skip
        logits = self.lm_head(out.last_hidden_state)
        loss = None
        if labels is not None:
            loss = self.loss_function(
                logits, labels, vocab_size=self.config.vocab_size, **{**kwargs, "shift_labels": labels}
            )
        return Seq2SeqLMOutput(
            loss=loss, logits=logits, past_key_values=cast(Any, past_key_values), decoder_hidden_states=out.hidden_states,
            encoder_last_hidden_state=source,
        )  # fmt: skip

    def _new_cache(self) -> EncoderDecoderCache:
        return EncoderDecoderCache(DynamicCache(config=self.config), DynamicCache(config=self.config))

    def _crosses(
        self, source: Tensor | None, mask: Tensor | None, cache: Cache | None
    ) -> tuple[Cache | None, list[dict[str, Any]]]:
        """(the decoder's own cache, what each layer's cross-attention reads): the source itself, or, with a cache, the
        state that it left there, which is made when it is first read."""
        if cache is None:
            assert source is not None
            key_mask = None if mask is None else mask.bool()
            return None, [{"context": source, "key_mask": key_mask}] * len(self.decoder.layers)
        if not isinstance(cache, EncoderDecoderCache):
            raise ValueError(
                "the cache of an encoder–decoder is an EncoderDecoderCache; leave past_key_values out."
            )
        if not cache.is_updated.get(0, False):
            assert source is not None
            made = [StateLayer() for _ in self.decoder.layers]
            for layer, state in zip(made, self._read(source, mask)):
                layer.write(state, source.shape[1], self._never)
            cache.cross_attention_cache.layers = cast(Any, made)
            cache.is_updated = dict.fromkeys(range(len(made)), True)
        left: Any = cache.cross_attention_cache.layers
        return cache.self_attention_cache, [{"state": layer.state} for layer in left]

    @staticmethod
    def _never(n: int) -> State:
        raise NotImplementedError("a source is never read in part.")

    def _read(self, source: Tensor, mask: Tensor | None) -> Iterator[State]:
        """What each layer's cross-attention keeps of the encoder's output (b, s, hidden)."""
        nothing = source.new_zeros(len(source), 0, source.shape[-1])  # no query yet
        key_mask = None if mask is None else mask.bool()
        for block in self.decoder.layers:
            attention = cast(MultiHeadAttention, block.cross_attention)
            yield attention(nothing, source, key_mask=key_mask, return_state=True)[1]

    # as an RNN

    def start(self, batch_size: int) -> Tensor:
        """The token that a target begins with, (b,)."""
        return torch.full((batch_size,), self.start_id, device=self.device)

    @torch.no_grad()
    def read(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, capacity: int | None = None
    ) -> Seq2SeqState:
        """The state after the source (b, s) and before the target, for whose softmax layers `capacity` makes room."""
        source = self.encoder(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
        return Seq2SeqState(
            self.decoder.new_state(len(input_ids), capacity), tuple(self._read(source, attention_mask))
        )

    @torch.no_grad()
    def step(
        self, token_ids: Tensor, state: Seq2SeqState, *, inplace: bool = False
    ) -> tuple[Tensor, Seq2SeqState]:
        """One token per row (b,): (logits (b, vocab) float32, the state after it). As in `TarnnForCausalLM.step`."""
        cross = [{"state": x} for x in state.source]
        x, target = self.decoder.step(token_ids, state.target, inplace=inplace, cross=cross)
        return self.lm_head(x).float(), Seq2SeqState(target, state.source)
