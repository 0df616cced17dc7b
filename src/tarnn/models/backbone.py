"""The backbone: embedding, blocks, final norm. A model is this and a head on top of it."""

from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import Cache, DynamicCache, PreTrainedModel
from transformers import initialization as init
from transformers.modeling_outputs import BaseModelOutputWithPast
from transformers.utils.output_capturing import OutputRecorder, capture_outputs

from tarnn.attention import HeadDecay, SoftmaxAttention, TokenDecay
from tarnn.attention.decay import retention
from tarnn.attention.rotary import Rotation
from tarnn.feature_maps import FeatureMap, Hedgehog
from tarnn.models.block import TarnnBlock, make_norm
from tarnn.models.cache import StateLayer
from tarnn.models.configuration import TarnnConfig
from tarnn.models.documents import find_documents
from tarnn.models.folders import check_folder
from tarnn.models.inputs import check_arguments, check_inputs, check_length, check_positions
from tarnn.models.positions import SinusoidalPositions, positions_in
from tarnn.models.state import ModelState
from tarnn.ops import State


class TarnnPreTrainedModel(PreTrainedModel):
    """What transformers must know: the config's class, how weights start, what may not be split."""

    config: TarnnConfig
    config_class = TarnnConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ["TarnnBlock"]  # noqa: RUF012
    _skip_keys_device_placement = ["past_key_values"]  # noqa: RUF012
    _supports_sdpa = True
    _can_compile_fullgraph = True
    _can_record_outputs = {  # noqa: RUF012
        "hidden_states": TarnnBlock,
        "attentions": OutputRecorder(SoftmaxAttention, index=2),
    }

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path, *args, **kwargs):
        check_folder(pretrained_model_name_or_path)
        return super().from_pretrained(pretrained_model_name_or_path, *args, **kwargs)

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        """Normal(0, initializer_range); what adds to the residual stream 1/√(2·layers) of that (GPT-2)."""
        super()._init_weights(module)
        if getattr(module, "adds_to_residual", False):
            std = self.config.initializer_range / (2 * self.config.num_hidden_layers) ** 0.5
            init.normal_(cast(nn.Linear, module).weight, std=std)
        elif isinstance(module, HeadDecay):
            init.copy_(module.log_decay, retention(len(module.log_decay)))
        elif isinstance(module, TokenDecay):
            init.copy_(module.bias, module.initial_bias(len(module.bias)))
        elif isinstance(module, Hedgehog):
            init.copy_(module.weight, torch.eye(*module.weight.shape[1:]).expand_as(module.weight))
        elif isinstance(module, FeatureMap):  # draws, and what is calibrated
            for name, value in module.initial_buffers().items():
                init.copy_(getattr(module, name), value)


class TarnnModel(TarnnPreTrainedModel):
    """Token and position embeddings, `num_hidden_layers` blocks, a final norm (none after post-norm blocks).

    causal: each place sees those before it, as language models do; False: all places see all others (an encoder, which
    has no cache and no state). By default as the config's class says.

    Sinusoidal positions have amplitude 1, so embeddings are scaled by √hidden beside them (Vaswani et al.
    2017, section 3.4).
    """

    def __init__(self, config: TarnnConfig, causal: bool | None = None):
        super().__init__(config)
        self.causal = config.causal if causal is None else causal
        sinusoidal = config.position.startswith("sinusoidal")
        width = config.hidden_size // 2 if config.position == "sinusoidal_half" else config.hidden_size
        self.embed_tokens = nn.Embedding(config.vocab_size, width)
        self.embed_positions: nn.Module | None = None
        if sinusoidal:
            self.embed_positions = SinusoidalPositions(width)
        elif config.position == "learned":
            self.embed_positions = nn.Embedding(cast(int, config.max_position_embeddings), width)
        self.embed_scale = config.hidden_size**0.5 if sinusoidal else 1.0
        self.dropout = nn.Dropout(config.dropout)
        blocks = [TarnnBlock(config, i, causal=self.causal) for i in range(config.num_hidden_layers)]
        self.layers = cast(list[TarnnBlock], nn.ModuleList(blocks))
        self.norm = make_norm(config) if config.norm_position == "pre" else nn.Identity()
        self.gradient_checkpointing = False
        self.post_init()

    @capture_outputs
    def forward(
        self, input_ids: Tensor | None = None, attention_mask: Tensor | None = None, position_ids: Tensor | None = None,
        past_key_values: Cache | None = None, inputs_embeds: Tensor | None = None, cu_seqlens: Tensor | None = None,
        use_cache: bool | None = None, **kwargs: Any,
    ) -> BaseModelOutputWithPast:  # fmt: skip
        """input_ids (b, t), or inputs_embeds (b, t, width) → hidden states (b, t, hidden).

        attention_mask: (b, t), or (b, past + t) with a cache; 0 = padding, on whichever side. cu_seqlens:
        int32 (n + 1,), bounds of documents packed into the rows, which don't see each other; transformers' ways
        to say so do as well (`find_documents`). use_cache: hand on a cache; by default as the config says,
        but not in training nor for packed documents. output_attentions: the weights of each softmax layer.

        Raises ValueError for an empty input, positions beyond max_position_embeddings, masks and caches that
        don't fit, and output_attentions without softmax layers: linear attention never forms that matrix.
        TypeError: unknown arguments.
        """
        check_arguments(kwargs)
        past = 0 if past_key_values is None else past_key_values.get_seq_length()
        (b, t), device = check_inputs(input_ids, inputs_embeds, attention_mask, position_ids, past)
        cu_seqlens = find_documents(
            (b, t), cu_seqlens=cu_seqlens, position_ids=position_ids, attention_mask=attention_mask,
            past_key_values=past_key_values, use_cache=use_cache, arguments=kwargs,
        )  # fmt: skip
        if use_cache is None:
            use_cache = self.config.use_cache and self.causal and not self.training and cu_seqlens is None
        if not self.causal and (use_cache or past_key_values is not None):
            raise ValueError(
                "a model that sees both sides reads whole sequences and has no cache; leave out past_key_values and "
                "use_cache."
            )
        if use_cache and past_key_values is None:
            past_key_values = DynamicCache(config=self.config)
        caches = self._layer_caches(past_key_values)
        position_ids = self._positions(position_ids, attention_mask, cu_seqlens, past, (b, t), device)
        key_mask = None if attention_mask is None else attention_mask[:, -t:].bool()
        x = self.embed(input_ids, position_ids, inputs_embeds)
        if cu_seqlens is not None:  # attention sees the rows laid end to end
            position_ids = position_ids.expand(b, t).reshape(1, b * t)
        watched = self._watched(kwargs.get("output_attentions", self.config.output_attentions))
        for block, cache, place, options in zip(
            self.layers, caches, self.places(position_ids), watched, strict=True
        ):
            options |= {"key_mask": key_mask, "cu_seqlens": cu_seqlens}
            x = block(x, past_key_values=cache, **place, **options)
        return BaseModelOutputWithPast(last_hidden_state=self.norm(x), past_key_values=past_key_values)

    def prefill(
        self, input_ids: Tensor, state: ModelState, attention_mask: Tensor | None = None,
        inputs_embeds: Tensor | None = None, *, inplace: bool = False,
    ) -> tuple[Tensor, ModelState]:  # fmt: skip
        """input_ids (b, t) on top of a state → (hidden states (b, t, hidden), the state after them).

        inputs_embeds (b, t, width): their embeddings, where they are not just those of the ids. The given state
        stays as it was; `inplace` lets its memory be used for the new one.
        """
        (_, t), device = check_inputs(input_ids, attention_mask=attention_mask)
        positions = state.position[:, None] + positions_in(attention_mask, None, 0, t, device)
        if self.config.max_position_embeddings is not None:
            check_positions(self.config, positions, past=int(state.position.max()))
        key_mask = None if attention_mask is None else attention_mask.bool()
        x, layers = self.embed(input_ids, positions, inputs_embeds), []
        for block, layer, place in zip(self.layers, state.layers, self.places(positions), strict=True):
            x, layer = block.prefill(x, layer, key_mask=key_mask, inplace=inplace, **place)
            layers.append(layer)
        seen = t if key_mask is None else key_mask.sum(-1)
        return self.norm(x), ModelState(tuple(layers), state.position + seen)

    def step(
        self, token_ids: Tensor, state: ModelState, inputs_embeds: Tensor | None = None, *, inplace: bool = False
    ) -> tuple[Tensor, ModelState]:  # fmt: skip
        """One token per row, (b,) → ((b, hidden), the state after it). inputs_embeds (b, 1, width): as in `prefill`.

        `inplace` writes into the given state's tensors, position included, and allocates nothing.
        """
        if self.config.max_position_embeddings is not None and not torch.compiler.is_compiling():
            check_length(self.config, 1, int(state.position.max()))
        positions = state.position[:, None]
        x, layers = self.embed(token_ids[:, None], positions, inputs_embeds), []
        for block, layer, place in zip(self.layers, state.layers, self.places(positions), strict=True):
            x, layer = block.step(x, layer, inplace=inplace, **place)
            layers.append(layer)
        position = state.position.add_(1) if inplace else state.position + 1
        return self.norm(x)[:, 0], ModelState(tuple(layers), position)

    def new_states(self, batch_size: int, capacity: int | None = None) -> tuple[State, ...]:
        """Each layer's state before the first token. `capacity`: how many tokens softmax layers make room for."""
        new = (x.attention.new_state for x in self.layers)
        return tuple(make(batch_size, capacity=capacity, dtype=self.dtype) for make in new)

    def embed(
        self, input_ids: Tensor | None, positions: Tensor, inputs_embeds: Tensor | None = None
    ) -> Tensor:
        """What enters the first block, (b, t, hidden)."""
        x = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        if self.embed_positions is not None:
            place = self.embed_positions(positions).to(x.dtype)
            x = x if self.embed_scale == 1 else x * self.embed_scale
            half = self.config.position == "sinusoidal_half"
            x = torch.cat([x, place.expand(*x.shape[:2], -1)], dim=-1) if half else x + place
        return self.dropout(x)

    def places(self, positions: Tensor) -> list[dict[str, Any]]:
        """Where the tokens are, as each layer's attention takes it; layers of one width share a rotation."""
        made: dict[int, Rotation] = {}
        places: list[dict[str, Any]] = []
        for block in self.layers:
            place: dict[str, Any] = {"positions": positions}
            if (rotary := block.attention.rotary) is not None:
                if rotary.dim not in made:
                    made[rotary.dim] = rotary.rotation(positions, self.dtype)
                place["rotation"] = made[rotary.dim]
            places.append(place)
        return places

    def _watched(self, output_attentions: bool | None) -> list[dict[str, Any]]:
        """The option that makes a layer hand out its weights, where it has any and they are asked for."""
        asked = [bool(output_attentions) and block.attention.has_weights for block in self.layers]
        if output_attentions and not any(asked):
            raise ValueError(
                "linear attention never forms its attention matrices, and this model has no softmax layer: "
                "output_attentions can't be had."
            )
        return [{"return_weights": True} if one else {} for one in asked]

    def _positions(self, position_ids, attention_mask, cu_seqlens, past: int, shape, device) -> Tensor:
        """As given, or counted; (b, t) or (1, t), and within max_position_embeddings."""
        b, t = shape
        if position_ids is None and attention_mask is None and cu_seqlens is None:
            check_length(self.config, t, past)  # nothing to look up
            return torch.arange(past, past + t, device=device)[None]
        if position_ids is None:
            width = t if cu_seqlens is None else b * t
            position_ids = positions_in(attention_mask, cu_seqlens, past, width, device).view(-1, t)
        check_positions(self.config, position_ids, past)
        return position_ids

    def _layer_caches(self, cache: Cache | None) -> list[StateLayer | None]:
        if cache is None:
            return [None] * len(self.layers)
        if len(cache.layers) != len(self.layers) or not all(isinstance(x, StateLayer) for x in cache.layers):
            raise ValueError(
                "this cache was not made for this model; make one with DynamicCache(config=model.config) or "
                "StaticCache(config=model.config, max_cache_len=…)."
            )
        return cast(list[StateLayer | None], cache.layers)
