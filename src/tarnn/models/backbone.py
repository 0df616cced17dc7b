"""The backbone and the language model as RNNs: embedding, blocks, final norm and a head, run by `prefill` and `step`.

Generation needs no more than this. `TarnnModel` and `TarnnForCausalLM` in `tarnn.huggingface` derive from these classes and add
`forward`, caches, and initial weights.
"""

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn

from tarnn.attention.rotary import Rotation, positions_in
from tarnn.models.block import Block, make_norm
from tarnn.models.config import ModelConfig
from tarnn.models.convolved_frames import ConvolvedFrames
from tarnn.models.frames import Frames
from tarnn.models.inputs import check_inputs, check_length, check_positions, count_tokens, last_tokens, without_padding
from tarnn.models.positions import SinusoidalPositions
from tarnn.models.state import ModelState
from tarnn.numerics import widen
from tarnn.ops import State


class Recurrent(nn.Module):
    """A module that is built from a record.

    `config` is that record, or, in a subclass in `tarnn.huggingface`, the config that has the same keys.
    """

    config: Any

    def __init__(self, config: Any, **options: Any):
        super().__init__()
        self.config = config
        self.build(config, **options)
        self.tie()

    def build(self, config: Any) -> None:
        """Make the layers."""
        raise NotImplementedError

    @property
    def tied(self) -> dict[str, str]:
        """Names of weights that are the same tensor as others, and the names of those."""
        return {}

    def tie(self) -> None:
        """Make them one tensor."""

    @property
    def device(self) -> torch.device:
        return next(self.parameters()).device

    @property
    def dtype(self) -> torch.dtype:
        return next(x.dtype for x in self.parameters() if x.is_floating_point())


class Backbone(Recurrent):
    """Token and position embeddings, `num_hidden_layers` blocks, a final norm (none after post-norm blocks).

    config.causal: each position sees those before it, as language models do; else all positions see all others (an
    encoder, which has no cache and no state).

    Sinusoidal positions have amplitude 1, so embeddings are scaled by √hidden before they are added (Vaswani et al.
    2017, section 3.4).
    """

    block: ClassVar[type[Block]] = Block
    cross: ClassVar[bool] = False  # whether blocks also attend to another sequence of the same width

    def build(self, config: ModelConfig) -> None:
        sinusoidal = config.position.startswith("sinusoidal")
        width = config.hidden_size // 2 if config.position == "sinusoidal_half" else config.hidden_size
        self.embed_tokens: Any
        if config.input_size is None:
            self.embed_tokens = nn.Embedding(config.vocab_size, width)
        elif config.front == "conv":
            sizes = (config.input_size, width, config.subsampling)
            self.embed_tokens = ConvolvedFrames(*sizes, causal=config.causal)
        else:
            self.embed_tokens = Frames(config.input_size, width, config.subsampling)
        self.embed_positions: nn.Module | None = None
        if sinusoidal:
            self.embed_positions = SinusoidalPositions(width)
        elif config.position == "learned":
            self.embed_positions = nn.Embedding(cast(int, config.max_position_embeddings), width)
        self.embed_scale = config.hidden_size**0.5 if sinusoidal else 1.0
        self.dropout = nn.Dropout(config.dropout)
        sides: dict[str, Any] = {"causal": config.causal, "context_size": config.hidden_size if self.cross else None}
        blocks = [self.block(config, i, **sides) for i in range(config.num_hidden_layers)]
        self.layers = cast(list[Block], nn.ModuleList(blocks))
        self.norm = make_norm(config) if config.norm_position == "pre" else nn.Identity()

    def prefill(
        self,
        input_ids: Tensor | None,
        state: ModelState,
        attention_mask: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        *,
        inplace: bool = False,
    ) -> tuple[Tensor, ModelState]:
        """Read input_ids (b, t) on top of a state: (hidden states (b, t, hidden), the state after them).

        inputs_embeds (b, t, width): embeddings to use instead of those of the ids. The given state stays as it was;
        `inplace` lets its memory be used for the new one.
        """
        ids = input_ids if inputs_embeds is None else None
        (_, t), device = check_inputs(ids, inputs_embeds, attention_mask)
        positions = state.position[:, None] + positions_in(attention_mask, None, 0, t, device)
        if self.config.max_position_embeddings is not None:
            check_positions(self.config, positions, past=int(state.position.max()))
        key_mask = None if attention_mask is None else attention_mask.bool()
        x = self.embed(input_ids, positions, without_padding(inputs_embeds, key_mask))
        layers: list[State] = []
        parts = zip(self.layers, self.by_layer(state.layers), self.layer_options(positions), strict=True)
        for block, states, options in parts:
            x, *after = block.prefill(x, *states, key_mask=key_mask, inplace=inplace, **options)
            layers += after
        return self.finish(x), ModelState(tuple(layers), state.position + count_tokens(t, key_mask))

    def step(
        self,
        token_ids: Tensor,
        state: ModelState,
        inputs_embeds: Tensor | None = None,
        *,
        inplace: bool = False,
        cross: Sequence[Mapping[str, Any]] | None = None,
    ) -> tuple[Tensor, ModelState]:
        """Read one token per row, (b,): ((b, hidden), the state after it). inputs_embeds (b, 1, width): as in `prefill`.

        cross: what each layer's cross-attention reads, as `Block` takes it.

        `inplace` writes into the given state's tensors, position included, and allocates nothing.
        """
        # on another device this would wait for each token, and couldn't be recorded: there the token loop counts
        if self.config.max_position_embeddings and state.position.is_cpu and not torch.compiler.is_compiling():
            check_length(self.config, 1, int(state.position.max()))
        positions = state.position[:, None]
        x = self.embed(token_ids[:, None], positions, inputs_embeds)
        layers: list[State] = []
        parts = zip(self.layers, self.by_layer(state.layers), self.layer_options(positions, cross), strict=True)
        for block, states, options in parts:
            x, *after = block.step(x, *states, inplace=inplace, **options)
            layers += after
        position = state.position.add_(1) if inplace else state.position + 1
        return self.finish(x)[:, 0], ModelState(tuple(layers), position)

    def new_states(
        self, batch_size: int, capacity: int | None = None, cache_dtype: torch.dtype | None = None
    ) -> tuple[State, ...]:
        """Make the states of all layers before the first token. `capacity`: the number of tokens that softmax layers allocate.

        cache_dtype: the weights' type by default. For a model in float32 it may be bfloat16, which halves the memory of
        softmax layers' keys and values, and the time to read them. Raises ValueError for another.
        """
        narrower = cache_dtype == torch.bfloat16 and self.dtype == torch.float32
        if cache_dtype not in (None, self.dtype) and not narrower:
            raise ValueError(
                f"keys and values are kept in {self.dtype}, as the weights, or, of a model in float32, in bfloat16; "
                f"got cache_dtype={cache_dtype}."
            )
        dtype = cache_dtype or self.dtype
        blocks = (x.new_states(batch_size, capacity=capacity, dtype=dtype) for x in self.layers)
        return tuple(chain.from_iterable(blocks))

    @property
    def states_per_layer(self) -> int:
        """One, or, with a convolution, two."""
        return 1 if self.config.conv_kernel is None else 2

    def by_layer(self, states: Sequence[Any]) -> list[tuple[Any, ...]]:
        """Group the states of all layers, or what there is one of for each."""
        return list(zip(*[iter(states)] * self.states_per_layer, strict=True))

    def new_state(
        self, batch_size: int, capacity: int | None = None, cache_dtype: torch.dtype | None = None
    ) -> ModelState:
        """Make the state before the first token; see `new_states`."""
        layers = self.new_states(batch_size, capacity, cache_dtype)
        return ModelState(layers, torch.zeros(batch_size, dtype=torch.int64, device=self.device))

    def embed(self, input_ids: Tensor | None, positions: Tensor, inputs_embeds: Tensor | None = None) -> Tensor:
        """Return the input of the first block, (b, t, hidden); for reversible blocks both streams, (b, t, 2·hidden)."""
        x = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        if self.embed_positions is not None:
            embedded = self.embed_positions(positions).to(x.dtype)
            x = x if self.embed_scale == 1 else x * self.embed_scale
            half = self.config.position == "sinusoidal_half"
            x = torch.cat([x, embedded.expand(*x.shape[:2], -1)], dim=-1) if half else x + embedded
        x = self.dropout(x)
        return torch.cat([widen(x)] * 2, dim=-1) if self.config.reversible else x

    def finish(self, x: Tensor) -> Tensor:
        """The final norm of what the last block has written, of the mean of both streams if there are two."""
        if self.config.reversible:
            first, second = x.chunk(2, -1)
            x = ((first + second) / 2).to(cast(Any, self.norm).weight.dtype)
        return self.norm(x)

    def layer_options(
        self, positions: Tensor, cross: Sequence[Mapping[str, Any]] | None = None
    ) -> list[dict[str, Any]]:
        """Make each layer's options: the positions, their rotation (one for equal rotary embeddings), and what its
        cross-attention reads, if it has any."""
        rotations: dict[Any, Rotation] = {}
        layers: list[dict[str, Any]] = []
        for i, block in enumerate(self.layers):
            options: dict[str, Any] = {"positions": positions}
            if cross is not None:
                options["cross"] = cross[i]
            if (rotary := block.attention.rotary) is not None:
                key = (type(rotary), *vars(rotary).values())
                if key not in rotations:
                    rotations[key] = rotary.rotation(positions, self.dtype)
                options["rotation"] = rotations[key]
            layers.append(options)
        return layers


class TextModel(Recurrent):
    """`Backbone` and a linear layer to the vocabulary. How to run it: see `TarnnForCausalLM`."""

    backbone: ClassVar[type[Backbone]] = Backbone
    end_ids: frozenset[int] = frozenset()  # the tokens that end a text, as `open_model` has read them
    pad_id: int = 0  # fills a row whose text has ended

    def build(self, config: ModelConfig) -> None:
        if not config.causal or config.input_size is not None:
            raise ValueError(
                "a language model reads tokens and sees those before the one that it predicts: its config has causal=True "
                f"and no input_size; got causal={config.causal} and input_size={config.input_size}."
            )
        self.model = self.backbone(self.config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)

    @property
    def tied(self) -> dict[str, str]:
        return {"lm_head.weight": "model.embed_tokens.weight"} if self.config.tie_word_embeddings else {}

    def tie(self) -> None:
        if self.tied:
            self.lm_head.weight = self.model.embed_tokens.weight

    def new_state(
        self, batch_size: int, capacity: int | None = None, cache_dtype: torch.dtype | None = None
    ) -> ModelState:
        """`Backbone.new_state`."""
        return self.model.new_state(batch_size, capacity, cache_dtype)

    @torch.no_grad()
    def prefill(
        self, input_ids: Tensor, state: ModelState, attention_mask: Tensor | None = None, *, inplace: bool = False
    ) -> tuple[Tensor, ModelState]:
        """Read input_ids (b, t) on top of a state: (logits after each row's last token, new state).

        Logits are (b, vocab) float32. A long prompt may come in pieces. attention_mask (b, t) is for these
        tokens, 0 = padding, on either side. The given state stays as it was, unless `inplace` lets its memory
        be used for the new one: softmax layers then append to their keys without a copy.
        """
        x, state = self.model.prefill(input_ids, state, attention_mask, inplace=inplace)
        return self.lm_head(last_tokens(x, attention_mask)).float(), state

    @torch.no_grad()
    def step(self, token_ids: Tensor, state: ModelState, *, inplace: bool = False) -> tuple[Tensor, ModelState]:
        """Read one token per row (b,): (logits (b, vocab) float32, the state after it).

        The given state stays as it was, unless `inplace` lets its tensors be written: then nothing is copied, and the
        given state must not be used again. Shapes never change, so `torch.compile(model.step,
        fullgraph=True)` compiles once (for models without softmax layers, whose caches fill up).
        """
        x, state = self.model.step(token_ids, state, inplace=inplace)
        return self.lm_head(x).float(), state
