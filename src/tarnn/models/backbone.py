"""The backbone: embedding, blocks of attention and feed-forward, final norm. Heads are built on top of it."""

import torch
from torch import Tensor, nn
from torch.nn.functional import silu
from transformers import Cache, DynamicCache, PreTrainedModel
from transformers import initialization as init
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutputWithPast
from transformers.utils.generic import can_return_tuple

from tarnn.attention import TokenDecay
from tarnn.attention.rotary import Turns
from tarnn.models.cache import StateLayer
from tarnn.models.choices import make_attention
from tarnn.models.configuration import TarnnConfig
from tarnn.models.positions import SinusoidalPositions, positions_in
from tarnn.models.state import ModelState


class SwiGlu(nn.Module):
    """W₃ (silu(W₁ x) ⊙ W₂ x) (Shazeer 2020, arXiv 2002.05202)."""

    def __init__(self, config: TarnnConfig):
        super().__init__()
        hidden, inner = config.hidden_size, config.intermediate_size
        self.gate_proj = nn.Linear(hidden, inner, bias=config.bias)
        self.up_proj = nn.Linear(hidden, inner, bias=config.bias)
        self.down_proj = nn.Linear(inner, hidden, bias=config.bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(silu(self.gate_proj(x)) * self.up_proj(x))


class GeluMlp(nn.Module):
    """W₂ gelu(W₁ x)."""

    def __init__(self, config: TarnnConfig):
        super().__init__()
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=config.bias)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=config.bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(nn.functional.gelu(self.up_proj(x)))


def make_norm(config: TarnnConfig) -> nn.Module:
    kind = nn.RMSNorm if config.norm == "rms" else nn.LayerNorm
    return kind(config.hidden_size, eps=config.norm_eps)


class TarnnBlock(GradientCheckpointingLayer):
    """Attention, then feed-forward, each added to what came in: x + f(norm x) (pre) or norm(x + f(x)) (post)."""

    def __init__(self, config: TarnnConfig, layer: int):
        super().__init__()
        self.pre_norm = config.norm_position == "pre"
        self.attention = make_attention(config, layer)
        self.attention_norm = make_norm(config)
        self.mlp = SwiGlu(config) if config.mlp == "swiglu" else GeluMlp(config)
        self.mlp_norm = make_norm(config)
        self.dropout = nn.Dropout(config.dropout)

    def forward(
        self, x: Tensor, key_mask=None, cu_seqlens=None, positions=None, past_key_values=None
    ) -> Tensor:
        """x (b, t, hidden) → (b, t, hidden). `past_key_values` is this layer's `StateLayer`, or None."""
        options = {"key_mask": key_mask, "cu_seqlens": cu_seqlens, "positions": positions}
        if past_key_values is None:
            y = self.attention(self._before(x), **options)
            return self._feed_forward(self._add(x, y, self.attention_norm))
        x, state = self.prefill(x, past_key_values.take(self.attention, x), **options)
        past_key_values.write(state, x.shape[1])
        return x

    def prefill(self, x: Tensor, state, **options):
        """Many tokens on top of a state: (x, the state after them)."""
        y, state = self.attention(self._before(x), state=state, return_state=True, **options)
        return self._feed_forward(self._add(x, y, self.attention_norm)), state

    def step(self, x: Tensor, state, positions=None) -> Tensor:
        """One token, x (b, 1, hidden); writes into `state`."""
        y, _ = self.attention.step(self._before(x), state, positions=positions, inplace=True)
        return self._feed_forward(self._add(x, y, self.attention_norm))

    def _before(self, x: Tensor) -> Tensor:
        return self.attention_norm(x) if self.pre_norm else x

    def _feed_forward(self, x: Tensor) -> Tensor:
        return self._add(x, self.mlp(self.mlp_norm(x) if self.pre_norm else x), self.mlp_norm)

    def _add(self, x: Tensor, y: Tensor, norm: nn.Module) -> Tensor:
        x = x + self.dropout(y)
        return x if self.pre_norm else norm(x)


class TarnnPreTrainedModel(PreTrainedModel):
    """What transformers must know: config class, initialisation, what may be split, tied or skipped."""

    config_class = TarnnConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ("TarnnBlock",)
    _skip_keys_device_placement = ("past_key_values",)

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        """Normal(0, initializer_range); what is added to the residual stream starts 1/√(2·layers) as large."""
        super()._init_weights(module)
        if isinstance(module, TarnnBlock):
            std = self.config.initializer_range / (2 * self.config.num_hidden_layers) ** 0.5
            init.normal_(module.attention.o_proj.weight, std=std)
            init.normal_(module.mlp.down_proj.weight, std=std)
        elif isinstance(module, TokenDecay):
            init.copy_(module.gate.bias, module.start())


class TarnnModel(TarnnPreTrainedModel):
    """Embedding, `num_hidden_layers` blocks, final norm (none after post-norm blocks)."""

    def __init__(self, config: TarnnConfig):
        super().__init__(config)
        half = config.position == "sinusoidal_half"
        self.embed_tokens = nn.Embedding(
            config.vocab_size, config.hidden_size // 2 if half else config.hidden_size
        )
        self.embed_positions: nn.Module | None = None
        if config.position.startswith("sinusoidal"):
            self.embed_positions = SinusoidalPositions(
                config.hidden_size // 2 if half else config.hidden_size
            )
        elif config.position == "learned":
            self.embed_positions = nn.Embedding(config.max_position_embeddings, config.hidden_size)
        self.dropout = nn.Dropout(config.dropout)
        self.layers = nn.ModuleList(TarnnBlock(config, i) for i in range(config.num_hidden_layers))
        self.norm = make_norm(config) if config.norm_position == "pre" else nn.Identity()
        self.gradient_checkpointing = False
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        use_cache: bool | None = None,
        output_hidden_states: bool | None = None,
        output_attentions: bool | None = None,
    ) -> BaseModelOutputWithPast:
        """input_ids (b, t), or inputs_embeds (b, t, hidden) → hidden states (b, t, hidden).

        attention_mask: (b, t), or (b, past + t) with a cache; 0 = padding, on whichever side. cu_seqlens: int32
        (n + 1,), sequences packed into one row. use_cache: hand on a cache; by default as the config says, and
        never while training. Raises ValueError for lengths of 0 or beyond max_position_embeddings, for masks
        and caches that don't fit, and for output_attentions: linear attention never forms that matrix.
        """
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("give either input_ids or inputs_embeds, not both and not neither.")
        if output_attentions:
            raise ValueError("attention matrices are never formed here; output_attentions can't be had.")
        if use_cache is None:
            use_cache = self.config.use_cache and not self.training
        if use_cache and past_key_values is None:
            past_key_values = DynamicCache(config=self.config)
        given = input_ids if inputs_embeds is None else inputs_embeds
        past = self._past(past_key_values)
        num_tokens = self._check_length(given, past)
        mask = _check_mask(attention_mask, given, past, position_ids)
        if position_ids is None:
            position_ids = positions_in(mask, cu_seqlens, past, num_tokens, given.device)
        x = self.embed(input_ids, position_ids, inputs_embeds)
        options = {
            "key_mask": None if mask is None else mask[:, -num_tokens:].bool(),
            "cu_seqlens": cu_seqlens,
        }
        hidden_states = [x]
        for i, (block, turns) in enumerate(zip(self.layers, self.turns(position_ids), strict=True)):
            cache = None if past_key_values is None else past_key_values.layers[i]
            x = block(x, positions=turns, past_key_values=cache, **options)
            hidden_states.append(x)
        x = self.norm(x)
        wanted = self.config.output_hidden_states if output_hidden_states is None else output_hidden_states
        return BaseModelOutputWithPast(
            last_hidden_state=x,
            past_key_values=past_key_values,
            hidden_states=(*hidden_states[:-1], x) if wanted else None,
        )

    def prefill(self, input_ids: Tensor, state: ModelState, attention_mask: Tensor | None = None):
        """input_ids (b, t) on top of a state → (hidden states (b, t, hidden), the state after them)."""
        num_tokens = self._check_length(
            input_ids, 0 if self.config.max_position_embeddings is None else int(state.position.max())
        )
        mask = _check_mask(attention_mask, input_ids, 0, None)
        positions = state.position[:, None] + positions_in(mask, None, 0, num_tokens, input_ids.device)
        key_mask = None if mask is None else mask.bool()
        x = self.embed(input_ids, positions)
        layers = []
        for block, layer, turns in zip(self.layers, state.layers, self.turns(positions), strict=True):
            x, layer = block.prefill(x, layer, positions=turns, key_mask=key_mask)
            layers.append(layer)
        seen = num_tokens if mask is None else mask.long().sum(-1)
        return self.norm(x), ModelState(layers, state.position + seen)

    def step(self, token_ids: Tensor, state: ModelState) -> Tensor:
        """One token a row, (b,) → (b, hidden). Writes into `state`."""
        positions = state.position[:, None]
        x = self.embed(token_ids[:, None], positions)
        for block, layer, turns in zip(self.layers, state.layers, self.turns(positions), strict=True):
            x = block.step(x, layer, turns)
        state.position.add_(1)
        return self.norm(x)[:, 0]

    def embed(
        self, input_ids: Tensor | None, positions: Tensor, inputs_embeds: Tensor | None = None
    ) -> Tensor:
        """What enters the first block, (b, t, hidden)."""
        x = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        if self.embed_positions is not None:
            place = self.embed_positions(positions).to(x.dtype)
            if self.config.position == "sinusoidal_half":
                x = torch.cat([x, place.expand(*x.shape[:2], -1)], dim=-1)
            else:
                x = x + place
        return self.dropout(x)

    def turns(self, positions: Tensor) -> list[Turns | None]:
        """Each layer's rotary turns; layers of one width share them."""
        made: dict[int, Turns] = {}
        out: list[Turns | None] = []
        for block in self.layers:
            rotary = getattr(block.attention, "rotary", None)
            if rotary is not None and rotary.dim not in made:
                made[rotary.dim] = rotary.turns(positions)
            out.append(None if rotary is None else made[rotary.dim])
        return out

    def _past(self, cache: Cache | None) -> int:
        if cache is None:
            return 0
        if len(cache.layers) != len(self.layers) or not all(isinstance(x, StateLayer) for x in cache.layers):
            raise ValueError(
                "this cache was not made for this model; make one with DynamicCache(config=model.config) or "
                "StaticCache(config=model.config, max_cache_len=…)."
            )
        return cache.get_seq_length()

    def _check_length(self, x: Tensor, past: int) -> int:
        """t, if it is a length that this model takes."""
        num_tokens, longest = x.shape[1], self.config.max_position_embeddings
        if num_tokens == 0:
            raise ValueError("the input is empty: a model needs at least one token.")
        if longest is not None and past + num_tokens > longest:
            raise ValueError(
                f"this model takes sequences of up to {longest} tokens (max_position_embeddings); "
                f"got {past + num_tokens}."
            )
        return num_tokens


def _check_mask(mask: Tensor | None, x: Tensor, past: int, position_ids: Tensor | None) -> Tensor | None:
    if mask is None:
        return None
    (b, t), full = x.shape[:2], past + x.shape[1]
    if mask.ndim != 2 or mask.shape[0] != b or mask.shape[1] not in (t, full):
        raise ValueError(
            f"attention_mask must be (b, t) = {(b, full)}, 0 where there is padding; got {tuple(mask.shape)}."
        )
    if mask.shape[1] != full and position_ids is None:
        raise ValueError(
            f"with a cache of {past} tokens attention_mask must cover them too, {(b, full)}; got "
            f"{tuple(mask.shape)}. Or pass position_ids."
        )
    return mask
