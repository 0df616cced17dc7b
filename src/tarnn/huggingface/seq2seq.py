"""The encoder–decoder: an encoder reads the source once, from both sides; a decoder writes the target token by token."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import wraps
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import Cache, DynamicCache, EncoderDecoderCache, GenerationMixin
from transformers.modeling_outputs import BaseModelOutput, Seq2SeqLMOutput, Seq2SeqModelOutput
from transformers.utils import ModelOutput
from transformers.utils.generic import can_return_tuple
from transformers.utils.output_capturing import OutputRecorder

from tarnn.attention import SoftmaxAttention
from tarnn.attention.multihead import MultiHeadAttention
from tarnn.huggingface.backbone import TarnnBlock, TarnnModel, TarnnPreTrainedModel
from tarnn.huggingface.cache import StateLayer
from tarnn.huggingface.head_loss import loss_and_logits, reads_late
from tarnn.huggingface.seq2seq_config import TarnnSeq2SeqConfig
from tarnn.huggingface.versions import for_generate, takes_any_name, with_both_names
from tarnn.models.config import ModelConfig
from tarnn.models.state import ModelState
from tarnn.ops import State


@dataclass(frozen=True, eq=False, repr=False)
class Seq2SeqState(State):
    """The decoder's state: after the target so far, and, layer by layer, after the whole source."""

    target: ModelState
    source: tuple[State, ...]

    @property
    def nbytes(self) -> int:
        return self.target.nbytes + sum(x.nbytes for x in self.source)


_Output = with_both_names(Seq2SeqModelOutput)
_LMOutput = reads_late(with_both_names(Seq2SeqLMOutput))


class TarnnDecoder(TarnnModel):
    """`TarnnModel` whose blocks also attend to an encoder's output, between attention and feed-forward."""

    config: TarnnSeq2SeqConfig
    config_class = TarnnSeq2SeqConfig
    cross = True
    _can_record_outputs = {  # noqa: RUF012
        "hidden_states": TarnnBlock,
        "attentions": OutputRecorder(SoftmaxAttention, index=2, layer_name="attention"),
        "cross_attentions": OutputRecorder(SoftmaxAttention, index=2, layer_name="cross_attention"),
    }


class TarnnSeq2SeqModel(TarnnPreTrainedModel):
    """Encoder and decoder with cross-attention, which share one embedding where the config ties them."""

    config: TarnnSeq2SeqConfig
    config_class = TarnnSeq2SeqConfig
    _tied_weights_keys = {"encoder.embed_tokens.weight": "decoder.embed_tokens.weight"}  # noqa: RUF012

    def build(self, config: ModelConfig) -> None:
        self.encoder = TarnnModel(self.config.encoder())
        self.decoder = TarnnDecoder(self.config)
        if config.tie_word_embeddings:  # one module: FSDP2 refuses a weight that two groups of modules own
            self.encoder.embed_tokens = self.decoder.embed_tokens

    def get_encoder(self, modality: str | None = None) -> nn.Module:
        return self.encoder

    def get_input_embeddings(self) -> nn.Module:
        return self.decoder.embed_tokens

    def set_input_embeddings(self, value: nn.Module) -> None:
        self.encoder.embed_tokens = self.decoder.embed_tokens = value

    @can_return_tuple
    @takes_any_name
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        decoder_input_ids: Tensor | None = None,
        decoder_attention_mask: Tensor | None = None,
        decoder_inputs_embeds: Tensor | None = None,
        encoder_outputs: BaseModelOutput | tuple | None = None,
        cache: Cache | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        **kwargs: Any,
    ) -> Any:
        """Compute the decoder's hidden states (b, t, hidden), or with an output layer logits (b, t, vocab).

        The source is input_ids (b, s), inputs_embeds (b, s, width) or encoder_outputs; the target so far is
        decoder_input_ids (b, t) or decoder_inputs_embeds.

        labels (b, t), for a model with an output layer: the tokens to predict, −100 left out; without decoder_input_ids and
        decoder_inputs_embeds the decoder reads them one position later. The loss is in nats, the mean per token.

        attention_mask (b, s), decoder_attention_mask (b, t): 0 = padding. output_attentions: the weights of softmax layers,
        None for encoder or decoder without any. Raises ValueError for a model without softmax layers.
        """
        if decoder_input_ids is None and decoder_inputs_embeds is None:
            if labels is None:
                raise ValueError("an encoder–decoder needs decoder_input_ids, or labels to make them from.")
            decoder_input_ids = self.prepare_decoder_input_ids_from_labels(labels)
        if use_cache is None:
            wanted = self.config.use_cache and not torch.compiler.is_exporting()
            use_cache = wanted and not self.training and labels is None
        if use_cache and cache is None:
            cache = self._new_cache()
        weights = kwargs.pop("output_attentions", self.config.output_attentions)
        states = kwargs.get("output_hidden_states", self.config.output_hidden_states)
        read = isinstance(cache, EncoderDecoderCache) and cache.is_updated.get(0, False)
        if encoder_outputs is None and not read:
            encoder_outputs = self.encoder(
                input_ids=input_ids,
                attention_mask=attention_mask,
                inputs_embeds=inputs_embeds,
                use_cache=False,
                output_hidden_states=states,
                output_attentions=weights and self.encoder.has_weights,
            )
        elif isinstance(encoder_outputs, tuple):
            encoder_outputs = BaseModelOutput(*encoder_outputs)
        source = None if encoder_outputs is None else encoder_outputs[0]
        own, cross = self._crosses(source, attention_mask, cache)
        out = self.decoder(
            input_ids=decoder_input_ids,
            inputs_embeds=decoder_inputs_embeds,
            attention_mask=decoder_attention_mask,
            cache=own,
            use_cache=use_cache,
            cross=cross,
            output_attentions=weights and (self.decoder.has_weights or not self.encoder.has_weights),
            **kwargs,
        )
        return self.output(
            out.last_hidden_state,
            labels,
            kwargs,
            cache=cache,
            decoder_hidden_states=out.hidden_states,
            decoder_attentions=out.attentions,
            cross_attentions=out.cross_attentions,
            encoder_last_hidden_state=source,
            encoder_hidden_states=getattr(encoder_outputs, "hidden_states", None),
            encoder_attentions=getattr(encoder_outputs, "attentions", None),
        )

    def output(self, x: Tensor, labels: Tensor | None, options: dict[str, Any], **rest: Any) -> ModelOutput:
        """Make what `forward` returns from the decoder's hidden states. options: of the loss."""
        if labels is not None:
            raise TypeError(f"{type(self).__name__} has no output layer, so it takes no labels.")
        return _Output(last_hidden_state=cast(Any, x), **rest)

    def prepare_decoder_input_ids_from_labels(self, labels: Tensor) -> Tensor:
        """Shift labels one position to the right, after the start token."""
        shifted = labels.roll(1, dims=-1)
        shifted = shifted.masked_fill(shifted < 0, cast(int, self.config.pad_token_id))
        return shifted.index_fill(1, torch.zeros(1, dtype=torch.long, device=labels.device), self.start_id)

    @property
    def start_id(self) -> int:
        return self.config.decoder_start_token_id

    def _new_cache(self) -> EncoderDecoderCache:
        return EncoderDecoderCache(DynamicCache(config=self.config), DynamicCache(config=self.config))

    def _crosses(
        self, source: Tensor | None, mask: Tensor | None, cache: Cache | None
    ) -> tuple[Cache | None, list[dict[str, Any]]]:
        """Return the decoder's own cache, and what each layer's cross-attention reads: the source itself, or, with a
        cache, the state after it, which the first call leaves there."""
        if cache is None:
            assert source is not None
            key_mask = None if mask is None else mask.bool()
            return None, [{"context": source, "key_mask": key_mask}] * len(self.decoder.layers)
        if not isinstance(cache, EncoderDecoderCache):
            raise ValueError("the cache of an encoder–decoder is an EncoderDecoderCache; leave cache out.")
        if not cache.is_updated.get(0, False):
            assert source is not None
            states = [StateLayer() for _ in self.decoder.layers]
            for layer, state in zip(states, self._read(source, mask)):
                layer.set(state, source.shape[1], self._never)
            cache.cross_attention_cache.layers = cast(Any, states)
            cache.is_updated = dict.fromkeys(range(len(states)), True)
        layers: Any = cache.cross_attention_cache.layers
        return cache.self_attention_cache, [{"state": layer.state} for layer in layers]

    @staticmethod
    def _never(state: State, n: int) -> State:
        raise NotImplementedError("a source is never read in part.")

    def _read(self, source: Tensor, mask: Tensor | None) -> Iterator[State]:
        """Yield each layer's state of cross-attention after the encoder's output (b, s, hidden)."""
        no_queries = source.new_zeros(len(source), 0, source.shape[-1])
        key_mask = None if mask is None else mask.bool()
        for block in self.decoder.layers:
            attention = cast(MultiHeadAttention, block.cross_attention)
            yield attention(no_queries, source, key_mask=key_mask, return_state=True)[1]


class TarnnForConditionalGeneration(TarnnSeq2SeqModel, GenerationMixin):
    """Encoder, decoder with cross-attention, and a linear layer to the vocabulary, which all share one embedding.

    Self- and cross-attention are linear or softmax by their names in the config. Linear cross-attention needs of the
    source only S = Σ_j φ(k_j) v_jᵀ and z = Σ_j φ(k_j) per layer and head: computed once; a step never reads the
    source again. Softmax needs the keys and values of the whole source.

    It runs in two ways, which agree: `forward` with a transformers cache (Trainer, `generate`, beams), and `read`, `step`
    with the state as a plain value:

        state = model.read(source_ids)
        token = model.start(len(source_ids))
        while True:
            logits, state = model.step(token, state)
            token = logits.argmax(-1)
    """

    _tied_weights_keys = {  # noqa: RUF012
        "lm_head.weight": "decoder.embed_tokens.weight",
        **TarnnSeq2SeqModel._tied_weights_keys,
    }

    def build(self, config: ModelConfig) -> None:
        super().build(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)

    def output(self, x: Tensor, labels: Tensor | None, options: dict[str, Any], **rest: Any) -> ModelOutput:
        loss, logits = loss_and_logits(self, x, labels, options | {"shift_labels": labels})
        return _LMOutput(loss=loss, logits=logits, **rest)

    @wraps(GenerationMixin.generate)  # its arguments and docstring; the Seq2SeqTrainer hands the labels on, too
    def generate(self, *args: Any, labels: Tensor | None = None, **kwargs: Any) -> Any:  # type: ignore[override]
        return GenerationMixin.generate(cast(Any, self), *args, **for_generate(kwargs))

    # as an RNN

    def start(self, batch_size: int) -> Tensor:
        """The token that a target begins with, (b,)."""
        return torch.full((batch_size,), self.start_id, device=self.device)

    @torch.no_grad()
    def read(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, capacity: int | None = None
    ) -> Seq2SeqState:
        """Return the state after the source (b, s) and before the target, of which softmax layers allocate `capacity` tokens."""
        source = self.encoder(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
        return Seq2SeqState(self.decoder.new_state(len(input_ids), capacity), tuple(self._read(source, attention_mask)))

    @torch.no_grad()
    def step(self, token_ids: Tensor, state: Seq2SeqState, *, inplace: bool = False) -> tuple[Tensor, Seq2SeqState]:
        """Read one token per row (b,): (logits (b, vocab) float32, the state after it). As in `TarnnForCausalLM.step`."""
        cross = [{"state": x} for x in state.source]
        x, target = self.decoder.step(token_ids, state.target, inplace=inplace, cross=cross)
        return self.lm_head(x).float(), Seq2SeqState(target, state.source)
