"""Heads on the backbone that generate no text: masked tokens, classes of sequences and of tokens, transcripts."""

from collections.abc import Mapping
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn
from transformers.modeling_outputs import (
    CausalLMOutput,
    MaskedLMOutput,
    SequenceClassifierOutput,
    TokenClassifierOutput,
)
from transformers.utils import ModelOutput
from transformers.utils.generic import can_return_tuple

from tarnn.huggingface.backbone import TarnnModel, TarnnPreTrainedModel
from tarnn.huggingface.config import TarnnConfig
from tarnn.huggingface.documents import Documents, find_documents
from tarnn.huggingface.head_loss import loss_and_logits, reads_late
from tarnn.models.config import ModelConfig
from tarnn.models.convolved_frames import StreamState
from tarnn.models.frames import Frames
from tarnn.models.inputs import can_look, last_tokens

NEVER = -1e4  # a logit, also in float16


class TarnnHead(TarnnPreTrainedModel):
    """`TarnnModel` and a head: a subclass says how to `classify` hidden states, and the `loss` against labels.

    Each token sees both sides if config.causal is False, else the tokens before it.
    """

    output: ClassVar[type[ModelOutput]]

    def build(self, config: ModelConfig) -> None:
        self.main_input_name = "input_ids" if config.input_size is None else "input_features"
        self.model = TarnnModel(self.config)
        self.dropout = nn.Dropout(config.dropout)
        self.build_head(self.config)

    def build_head(self, config: TarnnConfig) -> None:
        """Make the layers after the backbone."""
        raise NotImplementedError

    def classify(self, x: Tensor, mask: Tensor | None, cu_seqlens: Tensor | None) -> Tensor:
        """Compute logits from hidden states x (b, t, hidden); mask (b, t) and documents as in `TarnnModel.forward`."""
        raise NotImplementedError

    def loss(self, logits: Tensor, labels: Tensor, mask: Tensor | None, **options: Any) -> Tensor:
        """Compute the mean loss in nats; options: those of transformers' loss functions."""
        raise NotImplementedError

    def loss_and_logits(
        self,
        x: Tensor,
        labels: Tensor | None,
        mask: Tensor | None,
        cu_seqlens: Tensor | None,
        options: Mapping[str, Any],
    ) -> tuple[Tensor | None, Any]:
        """Compute the loss, None without labels, and logits, from hidden states x (b, t, hidden)."""
        logits = self.classify(x, mask, cu_seqlens)
        return None if labels is None else self.loss(logits, labels, mask, **options), logits

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        input_features: Tensor | None = None,
        **kwargs: Any,
    ) -> Any:
        """Arguments of `TarnnModel.forward`, and:

        labels: what the class's `loss` says. input_features (b, t, config.input_size): frames, in place of tokens; their
            attention_mask is (b, t), 0 where padding ends a row.
        """
        if input_features is not None:
            inputs_embeds, attention_mask = self.frames.read(input_features, attention_mask)
        inputs = inputs_embeds if input_ids is None else input_ids
        documents = Documents(None)
        if inputs is not None:  # else the backbone says what is missing
            documents = find_documents(
                inputs.shape[:2],
                kwargs,
                cu_seqlens=cu_seqlens,
                position_ids=position_ids,
                attention_mask=attention_mask,
            )
        out = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            inputs_embeds=inputs_embeds,
            cu_seqlens=documents,
            use_cache=False,
            **kwargs,
        )
        x = self.dropout(out.last_hidden_state)
        loss, logits = self.loss_and_logits(x, labels, attention_mask, documents.bounds, kwargs)
        return self.output(loss=loss, logits=logits, hidden_states=out.hidden_states, attentions=out.attentions)

    @property
    def frames(self) -> Frames:
        """The layer that reads input_features. Raises ValueError for a model of tokens."""
        if not isinstance(self.model.embed_tokens, Frames):
            raise ValueError(
                "this model reads tokens, input_ids; for input_features its config says how wide they are, input_size."
            )
        return self.model.embed_tokens


class TarnnForMaskedLM(TarnnHead):
    """Logits for the token at each position, from both sides: masked language modelling (Devlin et al. 2019).

    labels: (b, t), the tokens; −100 at positions that were not masked.
    """

    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}  # noqa: RUF012
    output = reads_late(MaskedLMOutput)

    def build_head(self, config: TarnnConfig) -> None:
        if config.causal or config.input_size is not None:
            raise ValueError(
                "a masked language model predicts tokens from both sides: its config has causal=False and no input_size; "
                f"got causal={config.causal} and input_size={config.input_size}."
            )
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)

    def loss_and_logits(
        self,
        x: Tensor,
        labels: Tensor | None,
        mask: Tensor | None,
        cu_seqlens: Tensor | None,
        options: Mapping[str, Any],
    ) -> tuple[Tensor | None, Any]:
        return loss_and_logits(self, x, labels, options)


class TarnnForSequenceClassification(TarnnHead):
    """Logits (b, num_labels) for whole sequences: of the mean over tokens, or, causal, of the last token.

    labels: (b,) classes, (b, num_labels) zeros and ones where a sequence may have several, or numbers where num_labels
    is 1. Each packed document has one row of logits and one label.
    """

    output = SequenceClassifierOutput

    def build_head(self, config: TarnnConfig) -> None:
        self.classifier = nn.Linear(config.hidden_size, cast(int, config.num_labels))

    def classify(self, x: Tensor, mask: Tensor | None, cu_seqlens: Tensor | None) -> Tensor:
        if cu_seqlens is not None:
            return self.classifier(self._of_documents(x.flatten(0, 1), cu_seqlens.long()))
        if self.config.causal:
            return self.classifier(last_tokens(x, mask))
        if mask is None:
            return self.classifier(x.mean(1))
        kept = mask[..., None].to(x.dtype)
        return self.classifier((x * kept).sum(1) / kept.sum(1).clamp_min(1))

    def _of_documents(self, x: Tensor, bounds: Tensor) -> Tensor:
        """Select or average the tokens (t, hidden) of all documents: (documents, hidden)."""
        lengths, place = bounds.diff(), torch.arange(len(x), device=x.device)
        document = torch.searchsorted(bounds[1:], place, right=True)
        if self.config.causal:
            x = x.masked_fill((place + 1 != bounds[1:][document])[:, None], 0.0)
        sums = x.new_zeros(len(lengths), x.shape[-1]).index_add(0, document, x)
        return sums if self.config.causal else sums / lengths.clamp_min(1)[:, None].to(x.dtype)

    def loss(self, logits: Tensor, labels: Tensor, mask: Tensor | None, **options: Any) -> Tensor:
        return self.loss_function(labels=labels, pooled_logits=logits, config=self.config, **options)


class TarnnForTokenClassification(TarnnHead):
    """Logits (b, t, num_labels) for each token. labels: (b, t) classes, −100 for a token that has none."""

    output = TokenClassifierOutput

    def build_head(self, config: TarnnConfig) -> None:
        self.classifier = nn.Linear(config.hidden_size, cast(int, config.num_labels))

    def classify(self, x: Tensor, mask: Tensor | None, cu_seqlens: Tensor | None) -> Tensor:
        return self.classifier(x)

    def loss(self, logits: Tensor, labels: Tensor, mask: Tensor | None, **options: Any) -> Tensor:
        return self.loss_function(logits, labels, self.config, **options)


class TarnnForCTC(TarnnHead):
    """Logits (b, positions, vocab_size) whose most likely path, without repeats and blanks, is the transcript.

    Connectionist temporal classification (Graves et al. 2006). The blank is config.pad_token_id. With config.input_size
    it reads `input_features`, else `input_ids`. labels: (b, n) tokens, −100 (or blanks) if a row has fewer. The loss
    is the mean over rows of nats per label. At padding the blank is certain, so a padded row decodes, for example in a pipeline,
    to the same text as the row alone.
    """

    output = CausalLMOutput
    accepts_loss_kwargs = False

    def build_head(self, config: TarnnConfig) -> None:
        if config.pad_token_id is None:
            raise ValueError("CTC needs a blank: give the config pad_token_id=, the number of that token.")
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size)

    def classify(self, x: Tensor, mask: Tensor | None, cu_seqlens: Tensor | None) -> Tensor:
        if cu_seqlens is not None:
            raise ValueError("CTC aligns each row with its own labels and takes no packed documents; pad rows.")
        logits = self.lm_head(x)
        if mask is None:
            return logits
        blank = logits.new_full(logits.shape[-1:], NEVER)
        blank[cast(int, self.config.pad_token_id)] = 0.0
        return torch.where(mask.bool()[..., None], logits, blank)

    def loss(self, logits: Tensor, labels: Tensor, mask: Tensor | None, **options: Any) -> Tensor:
        lengths = logits.new_full((len(logits),), logits.shape[1]).long() if mask is None else mask.sum(-1)
        if can_look(labels):
            self._check_lengths(labels, lengths)
        return self.loss_function(logits, labels, logit_lengths=lengths, blank_token_id=self.config.pad_token_id)

    def _check_lengths(self, labels: Tensor, lengths: Tensor) -> None:
        """Raise ValueError for rows too short for their labels (one position each, and a blank between equal ones)."""
        real = (labels >= 0) & (labels != self.config.pad_token_id)
        needed = real.sum(-1) + ((labels[:, 1:] == labels[:, :-1]) & real[:, 1:]).sum(-1)
        short = needed.to(lengths.device) > lengths
        if short.any():
            row = int(short.nonzero()[0])
            raise ValueError(
                f"row {row} has {int(lengths[row])} positions for {int(needed[row])} labels (blanks between equal ones "
                "counted): no path spells them, the loss is infinite. Leave the row out, or lower subsampling."
            )

    def new_state(self, batch_size: int, capacity: int | None = None) -> StreamState:
        """Make the state before a stream, as `Backbone.new_state`."""
        state = self.model.new_state(batch_size, capacity)
        return StreamState(state.layers, state.position, self.frames.new_state(batch_size))

    @torch.no_grad()
    def prefill(
        self, input_features: Tensor, state: StreamState, *, inplace: bool = False
    ) -> tuple[Tensor, StreamState]:
        """Read frames (b, t, input_size) on top of a state (`new_state`): (logits (b, positions, vocab), the state after them).

        For causal models. The state has constant size; a stream may come in pieces, each a multiple of config.subsampling
        frames. `inplace`: as in `TarnnForCausalLM.prefill`.
        """
        embedded, frames = self.frames.prefill(input_features, state.frames)
        x, after = self.model.prefill(None, state, inputs_embeds=embedded, inplace=inplace)
        return self.lm_head(x).float(), StreamState(after.layers, after.position, frames)
