"""The language model: logits for the next token, in parallel for training and as an RNN for generation."""

from functools import wraps
from typing import Any, ClassVar, cast

from torch import Tensor
from transformers import Cache, GenerationMixin
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.utils.generic import can_return_tuple

from tarnn.huggingface.backbone import TarnnModel, TarnnPreTrainedModel
from tarnn.huggingface.documents import Documents, check_arguments, find_documents, without_seams
from tarnn.huggingface.fused_forward import active, enable_by_default
from tarnn.huggingface.head_loss import loss_and_logits, reads_late
from tarnn.huggingface.padded_prompts import padding_before, with_prompts
from tarnn.huggingface.versions import for_generate, takes_any_name, with_both_names
from tarnn.models.backbone import Backbone, TextModel

_Output = reads_late(with_both_names(CausalLMOutputWithPast))


class TarnnForCausalLM(TextModel, TarnnPreTrainedModel, GenerationMixin):
    """`TarnnModel` and a linear layer to the vocabulary.

    Two ways to run it. `forward`, the Hugging Face way, with a transformers cache: for the Trainer,
    `generate` and pipelines. And `new_state`, `prefill`, `step`, with the state as a plain value: for a token
    loop without overhead. Both give the same logits.

        state = model.new_state(batch_size=1)
        logits, state = model.prefill(prompt_ids, state)
        while True:
            logits, state = model.step(logits.argmax(-1), state)
    """

    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}  # noqa: RUF012

    backbone: ClassVar[type[Backbone]] = TarnnModel

    __init__ = TarnnPreTrainedModel.__init__

    @can_return_tuple
    @takes_any_name
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        cache: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        cu_seqlens: Tensor | Documents | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast:
        """Arguments of `TarnnModel.forward`, and:

        labels: (b, t), compared with the logits one place earlier, −100 left out, and where documents are packed,
            each one's first. The loss is in nats: the mean per token, or with num_items_in_batch the sum divided by
            that. With shift_labels (b, t) labels stand where they are predicted, and are taken instead. In training on a
            CPU the loss is computed by blocks of rows (`linear_cross_entropy`), and logits only when they are read.
        logits_to_keep: logits of the last n places only (0: all), or of the places in an index tensor.
        """
        if (fused := active(self)) is not None and not isinstance(logits_to_keep, Tensor):
            check_arguments(kwargs, causal=True)
            extra_inputs = {"inputs_embeds": inputs_embeds, "labels": labels, "cu_seqlens": cu_seqlens, **kwargs}
            logits = fused(input_ids, attention_mask, position_ids, cache, extra_inputs, logits_to_keep)
            if logits is not None:
                return _Output(logits=logits, cache=cache)
        if labels is not None:
            documents = cu_seqlens = find_documents(
                labels.shape,
                kwargs,
                cu_seqlens=cu_seqlens,
                position_ids=position_ids,
                attention_mask=attention_mask,
                cache=cache,
                use_cache=use_cache,
            )
        out = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            cache=cache,
            inputs_embeds=inputs_embeds,
            cu_seqlens=cu_seqlens,
            use_cache=use_cache,
            **kwargs,
        )
        if labels is not None and documents.bounds is not None:
            labels, kwargs = without_seams(labels, documents.bounds, kwargs)
        loss, logits = loss_and_logits(self, out.last_hidden_state, labels, kwargs, logits_to_keep)
        return _Output(
            loss=loss, logits=logits, cache=out.cache, hidden_states=out.hidden_states, attentions=out.attentions
        )

    @wraps(GenerationMixin.generate)  # its arguments and docstring
    def generate(self, *args: Any, **kwargs: Any) -> Any:  # type: ignore[override]
        kwargs = for_generate(kwargs)
        if kwargs.get("assistant_early_exit") is not None:  # which would change the config, and fail after that
            raise ValueError("assistant_early_exit cuts a model in two; pass a smaller one as assistant_model=.")
        moved = padding_before(self, args, kwargs)
        with enable_by_default(self):
            if moved is None:
                return GenerationMixin.generate(cast(Any, self), *args, **kwargs)
            outputs = GenerationMixin.generate(cast(Any, self), **moved[0])
        return outputs if moved[1] is None else with_prompts(outputs, moved[1])
