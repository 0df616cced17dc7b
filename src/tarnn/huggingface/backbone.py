"""The backbone as transformers runs it: `forward` with its caches and options, and initial weights."""

import itertools
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only
from transformers import Cache, DynamicCache, PreTrainedModel, initialization as init
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutputWithPast, BaseModelOutputWithPastAndCrossAttentions
from transformers.utils.output_capturing import OutputRecorder, capture_outputs

from tarnn.attention import HeadDecay, SoftmaxAttention, TokenDecay
from tarnn.attention.decay import retention
from tarnn.attention.gated_delta import GatedDeltaAttention
from tarnn.attention.mamba2 import Mamba2Attention
from tarnn.attention.rotary import positions_in
from tarnn.attention.rwkv7 import Rwkv7TimeMixing
from tarnn.feature_maps import FeatureMap, Hedgehog
from tarnn.huggingface.cache import StateLayer
from tarnn.huggingface.config import TarnnConfig
from tarnn.huggingface.convolved_cache import ConvolvedLayer
from tarnn.huggingface.documents import Documents, check_arguments, find_documents
from tarnn.huggingface.folders import check_folder
from tarnn.huggingface.rewind import crop_as_one
from tarnn.huggingface.versions import CACHE, takes_any_name, with_both_names
from tarnn.models.backbone import Backbone
from tarnn.models.block import Block
from tarnn.models.convolution import Convolution
from tarnn.models.inputs import check_inputs, check_length, check_positions, without_padding
from tarnn.models.reversible import can_run, run_reversible
from tarnn.ops import State

_Output = with_both_names(BaseModelOutputWithPast)
_CrossOutput = with_both_names(BaseModelOutputWithPastAndCrossAttentions)


class TarnnBlock(Block, GradientCheckpointingLayer):
    """`Block` with `forward`, with a transformers cache or without."""

    @takes_any_name
    def forward(
        self,
        x: Tensor,
        context: Tensor | None = None,
        *,
        cache=None,
        cu_seqlens: Tensor | None = None,
        cross=None,
        key_mask: Tensor | None = None,
        **options,
    ) -> Tensor:
        """x (b, t, hidden) → the same. `context`: what cross-attention reads, where `cross` does not have it (beside x, so
        that reentrant gradient checkpointing sees it). `cache`: the `StateLayer` of each state, read and written, passed by
        transformers' name so that gradient checkpointing leaves it out; `cu_seqlens`: of documents in all b·t tokens;
        options as in `MultiHeadAttention`."""
        if context is not None:
            cross = {**cross, "context": context}
        if cache is not None:
            return self._with_cache(x, cache, cross, {"key_mask": key_mask, **options})
        masks = {"key_mask": key_mask, "cu_seqlens": cu_seqlens}
        if self.convolution is not None:
            y = self.convolution(self._packed(self._before(x, self.convolution_norm), cu_seqlens), **masks)
            x = self._join(x, y.view_as(x), self.convolution_norm)
        y = self.attention(self._packed(self._before(x, self.attention_norm), cu_seqlens), **masks, **options)
        if "return_weights" in options:
            y, *_ = y
        return self._rest(x, y.view(*x.shape[:2], y.shape[-1]), cross)

    @staticmethod
    def _packed(x: Tensor, cu_seqlens: Tensor | None) -> Tensor:
        """The rows laid end to end, (1, b·t, hidden), where they hold documents."""
        return x if cu_seqlens is None else x.flatten(0, 1)[None]

    def _with_cache(self, x: Tensor, caches: Sequence[StateLayer], cross, options) -> Tensor:
        """Reads and writes this layer's part of a transformers cache."""
        start, before = x, [layer.state_with_room(x.shape[1]) for layer in caches]
        filtered = before[:-1]

        def replay(i: int, state: State, n: int):
            first = lambda y: y[:, :, :n] if y.ndim == 4 else y[:, :n]  # noqa: E731  # a Rotation's time is axis 2
            part, some = tree_map_only(Tensor, first, (start, options))
            states = (*filtered, state) if i == len(filtered) else (state, None)  # a convolution comes before attention
            return self._read(part, *states, **some)[2][i]

        # the cache owns its state, so it is written in place; not where autograd may need the one before
        x, *states = self.prefill(x, *before, cross=cross, inplace=not torch.is_grad_enabled(), **options)
        for i, (layer, state) in enumerate(zip(caches, states, strict=True)):
            layer.set(state, x.shape[1], partial(replay, i))
        return x


class TarnnPreTrainedModel(PreTrainedModel):
    """Base class that tells transformers the config's class, initial weights, and modules that may not be split."""

    config: TarnnConfig
    config_class: Any = TarnnConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ["TarnnBlock"]  # noqa: RUF012
    _skip_keys_device_placement = [CACHE]  # noqa: RUF012
    _supports_sdpa = True
    _can_compile_fullgraph = True
    _can_record_outputs = {  # noqa: RUF012
        "hidden_states": TarnnBlock,
        "attentions": OutputRecorder(SoftmaxAttention, index=2),
    }

    def __init__(self, config: TarnnConfig):
        super().__init__(config)
        self.build(config.record())
        self.post_init()

    def build(self, config: Any) -> None:
        """Make the layers."""
        raise NotImplementedError

    @property
    def tied(self) -> dict[str, str]:
        """Names of weights that are the same tensor as others, and the names of those; as `Recurrent` has it."""
        return (self._tied_weights_keys or {}) if self.config.tie_word_embeddings else {}

    def tie(self) -> None:
        """Make them one tensor."""
        self.tie_weights()

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path, *args, **kwargs):
        check_folder(pretrained_model_name_or_path)
        return super().from_pretrained(pretrained_model_name_or_path, *args, **kwargs)

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        """Draw weights from Normal(0, initializer_range); those that add to the residual stream 1/√(2·layers) of that (GPT-2)."""
        super()._init_weights(module)
        if getattr(module, "adds_to_residual", False):
            std = self.config.initializer_range / (2 * self.config.num_hidden_layers) ** 0.5
            init.normal_(cast(nn.Linear, module).weight, std=std)
        elif isinstance(module, HeadDecay):
            init.copy_(module.log_decay, retention(len(module.log_decay)))
        elif isinstance(module, TokenDecay):
            init.copy_(module.bias, module.initial_bias(len(module.bias)))
        elif isinstance(module, GatedDeltaAttention | Mamba2Attention | Rwkv7TimeMixing):
            for name, x in module.initial_weights().items():
                init.copy_(module.get_parameter(name), x)
        elif isinstance(module, Convolution | nn.Conv1d):  # as torch has them
            largest = module.weight[0].numel() ** -0.5
            for x in (module.weight, cast(Tensor, module.bias)):
                init.uniform_(x, -largest, largest)
        elif isinstance(module, Hedgehog):
            init.copy_(module.weight, torch.eye(*module.weight.shape[1:]).expand_as(module.weight))
        elif isinstance(module, FeatureMap):  # draws, and what is calibrated
            for name, value in module.initial_buffers().items():
                init.copy_(getattr(module, name), value)


class TarnnModel(Backbone, TarnnPreTrainedModel):
    """`Backbone` with `forward`, as transformers runs it."""

    block: ClassVar[type[Block]] = TarnnBlock

    __init__ = TarnnPreTrainedModel.__init__

    @capture_outputs
    @takes_any_name
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        cache: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        cu_seqlens: Tensor | Documents | None = None,
        use_cache: bool | None = None,
        cross: Sequence[Mapping[str, Any]] | None = None,
        **kwargs: Any,
    ) -> BaseModelOutputWithPast | BaseModelOutputWithPastAndCrossAttentions:
        """Compute hidden states (b, t, hidden) from input_ids (b, t) or inputs_embeds (b, t, width).

        attention_mask: (b, t), or (b, past + t) with a cache; 0 = padding, on either side. cu_seqlens:
        int32 (n + 1,), bounds of documents packed into the rows, which don't see each other; transformers' own
        arguments for this work as well (`find_documents`). use_cache: return a cache; by default as the config says,
        but not in training, for packed documents, nor in torch.export, which knows no cache. cross: what each layer's
        cross-attention reads, as `Block` takes it, in a decoder. output_attentions: return the weights of each softmax layer.

        Raises ValueError for an empty input, positions beyond max_position_embeddings, masks and caches that
        don't fit, and output_attentions without softmax layers: linear attention never forms that matrix.
        TypeError: unknown arguments.
        """
        check_arguments(kwargs, self.config.causal)
        past = 0 if cache is None else cache.get_seq_length()
        (b, t), device = check_inputs(input_ids, inputs_embeds, attention_mask, position_ids, past)
        documents = find_documents(
            (b, t),
            kwargs,
            cu_seqlens=cu_seqlens,
            position_ids=position_ids,
            attention_mask=attention_mask,
            cache=cache,
            use_cache=use_cache,
        )
        cu_seqlens = documents.bounds
        if use_cache is None:
            wanted = self.config.use_cache and self.config.causal and not torch.compiler.is_exporting()
            use_cache = wanted and not self.training and cu_seqlens is None
        if not self.config.causal and (use_cache or cache is not None):
            raise ValueError(
                "a model that sees both sides reads whole sequences and has no cache; leave out cache and use_cache."
            )
        if use_cache and cache is None:
            cache = DynamicCache(config=self.config)
        caches = self._layer_caches(cache)
        position_ids = self._positions(position_ids, attention_mask, cu_seqlens, past, (b, t), device)
        key_mask = None if attention_mask is None else attention_mask[:, -t:].bool()
        x = self.embed(input_ids, position_ids, without_padding(inputs_embeds, key_mask))
        if cu_seqlens is not None:  # attention sees the rows laid end to end
            position_ids = position_ids.expand(b, t).reshape(1, b * t)
        with_weights = kwargs.get("output_attentions", self.config.output_attentions)
        if with_weights and not self.has_weights:
            raise ValueError(
                "linear attention never forms its attention matrices, and this model has no softmax layer: "
                "output_attentions is not available."
            )
        layer_options = [
            {"key_mask": key_mask, "cu_seqlens": cu_seqlens, **own} for own in self.layer_options(position_ids, cross)
        ]
        states = kwargs.get("output_hidden_states", self.config.output_hidden_states)
        stores = with_weights or states or cache is not None
        if self.config.reversible and not stores and can_run(self.layers):
            x = run_reversible(self.layers, x, layer_options)
            return _Output(last_hidden_state=self.finish(x))
        for block, held, options in zip(self.layers, caches, layer_options, strict=True):
            context = None
            if with_weights and block.attention.has_weights:
                options["return_weights"] = True
            if cross is not None:
                reads = dict(options["cross"])
                context = reads.pop("context", None)
                if with_weights and cast(Any, block.cross_attention).has_weights:
                    reads["return_weights"] = True
                options["cross"] = reads
            x = block(x, context, **{CACHE: held}, **options)
        output = _Output if cross is None else _CrossOutput
        return output(last_hidden_state=self.finish(x), cache=cache)

    @property
    def has_weights(self) -> bool:
        """Whether some layer has attention weights to return."""
        kinds = (x for block in self.layers for x in (block.attention, block.cross_attention))
        return any(x is not None and x.has_weights for x in kinds)

    def _positions(self, position_ids, attention_mask, cu_seqlens, past: int, shape, device) -> Tensor:
        """Return position_ids, or count them: (b, t) or (1, t), within max_position_embeddings."""
        b, t = shape
        if position_ids is None and attention_mask is None and cu_seqlens is None:
            check_length(self.config, t, past)  # nothing to look up
            return torch.arange(past, past + t, device=device)[None]
        if position_ids is None:
            width = t if cu_seqlens is None else b * t
            position_ids = positions_in(attention_mask, cu_seqlens, past, width, device)
            position_ids = position_ids if cu_seqlens is None else position_ids.view(b, t)
        check_positions(self.config, position_ids, past)
        return position_ids

    def _layer_caches(self, cache: Cache | None) -> Sequence[tuple[StateLayer, ...] | None]:
        if cache is None:
            return [None] * len(self.layers)
        parts = [x.parts for x in cache.layers if isinstance(x, StateLayer | ConvolvedLayer)]
        if any(getattr(x, "record_past", False) for x in itertools.chain(*parts)):
            crop_as_one(cache)
        if len(cache.layers) != len(self.layers) or list(map(len, parts)) != [self.states_per_layer] * len(self.layers):
            raise ValueError(
                "this cache was not made for this model; make one with DynamicCache(config=model.config) or "
                "StaticCache(config=model.config, max_cache_len=…)."
            )
        return parts
