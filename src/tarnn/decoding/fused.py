"""A fused step for the token loop: the whole model in one call of a compiled kernel. Which models, and how.

Of the same numbers in the same order as `model.step`, within float32's rounding; weights may be stored in fewer bits.
"""

from collections.abc import Sequence
from dataclasses import replace
from operator import is_
from typing import Any, TypeVar

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from tarnn.attention import ChannelDecay, HeadDecay, LinearAttention, NoAttention, Rotary, SoftmaxAttention, TokenDecay
from tarnn.decoding.as_built import change
from tarnn.decoding.fused_maps import Move, recipe
from tarnn.kernels.cpu import library
from tarnn.kernels.cpu.stack import ATTENTIONS, DECAYS, FORMATS, FUNCTIONS, Block, step
from tarnn.models.backbone import TextModel
from tarnn.models.block import Block as Layer
from tarnn.models.block import GeluMlp
from tarnn.models.images import ImageModel
from tarnn.models.inputs import check_length
from tarnn.models.state import ModelState
from tarnn.numerics import default_eps
from tarnn.ops import KVCache
from tarnn.ops import State as LayerState
from tarnn.ops.softmax.op import full

Model = TextModel | ImageModel
State = TypeVar("State", bound=ModelState)
KINDS: dict[type, str] = {LinearAttention: "linear", SoftmaxAttention: "softmax", NoAttention: "none"}
DECAY_KINDS: dict[type, str] = {type(None): "none", HeadDecay: "head", TokenDecay: "token", ChannelDecay: "channel"}
NO_LIMIT = 2**62
MOST_PLACES = 2**16  # positions whose embeddings are kept in a table; beyond, each step computes its own


def refusal(model: nn.Module) -> str | None:
    """Why there is no fused step for this model, or None where there is one."""
    if reason := refusal_of_its_kind(model):
        return reason
    weights = list(model.parameters())
    if any(p.device.type != "cpu" or p.dtype != torch.float32 for p in weights):
        return "it computes in float32 on a CPU, and this model is elsewhere or of another type"
    if any(type(p.data) is not Tensor or p.layout != torch.strided for p in weights):
        return "its weights are sharded, or kept in another way than as numbers"
    # others do the same in training: transformers leaves a new head so
    trains = (x.training for x in model.modules() if not isinstance(x, nn.Linear | nn.Embedding | nn.ModuleList))
    return "the model is in training mode" if any(trains) else None


def refusal_of_its_kind(model: nn.Module) -> str | None:
    """The same for any model built like this one, wherever its weights are."""
    if not isinstance(model, TextModel | ImageModel):
        return f"it is made for models of text and of images, not for {type(model).__name__}"
    for block in model.model.layers:
        if reason := _attention_refusal(block.attention):
            return reason
    if what := change(model, TextModel if isinstance(model, TextModel) else ImageModel):
        return f"it is made for models as their configs build them, and would leave out {what}"
    if not library.available():
        return f"the compiled kernels can't be used: {library.status().why}"
    return None


def _attention_refusal(attention: Any) -> str | None:
    """Why there is no fused step for a model with this attention, or None."""
    if type(attention) not in KINDS:
        return f"it has no {type(attention).__name__}"
    if not isinstance(attention, LinearAttention):
        return None
    if recipe(attention.feature_map, attention.head_dim) is None:
        return f"it has no {attention.feature_map._get_name()} features, or not with these options"
    if type(attention.decay) not in DECAY_KINDS:
        return f"it has no {type(attention.decay).__name__}"
    return None


class FusedStep:
    """A copy of a model's weights, packed, with which one call of a kernel computes what `model.step` does.

        step = FusedStep(model, weights="int8")
        parameters, state = step(token_ids, state)      # as model.step; inplace=True writes into the state

    weights: float32 | bfloat16 | int8 | int4, how the layers' matrices are kept; the sums over them and all else are float32.
    With int8 and int4, each row of activations is rounded to bytes too (see `tarnn.kernels.cpu.stack`), and the head is bfloat16.
    most_places: sinusoidal positions that are kept in a table; where a model has more, each step computes its own.

    The copy is made here, once, and never follows the model: a step goes on with the weights of its making, whatever
    training, loading or writing does to the model's later. To use those, make another step. Several threads may call a
    step at once, each with a state of its own.

    Raises ValueError for a model that has no fused step (`refusal`), and for an unknown format.
    """

    def __init__(self, model: Model, weights: str = "float32", most_places: int = MOST_PLACES):
        if weights not in FORMATS:
            raise ValueError(f"weights must be one of {', '.join(FORMATS)}; got {weights!r}.")
        if reason := refusal(model):
            raise ValueError(f"there is no fused step for this model: {reason}. Use model.step.")
        self.model, self.weights = model, weights
        block = Block()
        with torch.no_grad():
            _write_model(block, model, weights)
            self.block, self.plan = block.bytes(), torch.tensor(block.plan, device="cpu")
            self.tokens, self.places = _token_table(model), _place_table(model, most_places)
        limit = model.config.max_position_embeddings
        self._numbers: tuple[Any, ...] = (
            _head(model).out_features,
            min(limit or NO_LIMIT, NO_LIMIT),
            model.config.norm_eps,
            default_eps(torch.float32),
        )
        layers = model.model.layers
        self._like = [x.attention.new_state(1, capacity=1, device="meta") for x in layers]
        # of the last call: the parts of its state, and their tensors; one tuple, so that threads don't mix them
        self._seen: tuple[tuple[Any, ...], list[Tensor]] = ((), [])

    def __call__(
        self, token_ids: Int[Tensor, " b"], state: State, *, inplace: bool = False
    ) -> tuple[Float[Tensor, "b p"], State]:
        """One token per row, (b,): (parameters or logits (b, p) float32; the state after it).

        Raises ValueError for anything but whole numbers (b,), for a token that is not in the vocabulary, beyond the
        model's last position, and for a state that is not of this model's kind; nothing is written then.
        """
        state = state if inplace else state.clone()
        ids, positions = _whole(token_ids), state.position
        tensors, caches = self._tensors_of(state, len(ids)), _caches(state)
        lengths = torch.tensor(
            [n for x in caches for n in (x.length, x.mask is not None)], dtype=torch.int64, device="cpu"
        )
        extra = _extra(self.model, state, self.places)
        try:
            parameters = step(
                ids, positions, self.plan, self.block, self.tokens, self.places, extra, tensors, lengths, *self._numbers
            )
        except RuntimeError as error:
            check_length(self.model.config, 1, int(positions.max()))
            raise ValueError(str(error).splitlines()[0]) from error
        return parameters, state if not caches else self._longer(state, tensors)

    def _longer(self, state: State, tensors: list[Tensor]) -> State:
        """The state with one more key and value in each cache; its tensors are those that were looked at."""
        layers = tuple(replace(x, length=x.length + 1) if isinstance(x, KVCache) else x for x in state.layers)
        self._seen = (state.position, *layers), tensors
        return replace(state, layers=layers)

    def _tensors_of(self, state: ModelState, batch_size: int) -> list[Tensor]:
        """Those of all layers; looked at again only where they are others than those of the last call."""
        parts, (seen, tensors) = (state.position, *state.layers), self._seen
        same = len(parts) == len(seen) and all(map(is_, parts, seen))
        if not same or len(state.position) != batch_size:
            _check_state(self._like, state, batch_size)
            tensors = [x for layer in state.layers for x in _written(layer)]
            self._seen = parts, tensors
        for cache in _caches(state):
            if cache.length == cache.capacity:
                raise full(cache.capacity, cache.length, 1)
        return tensors


def _whole(token_ids: Tensor) -> Tensor:
    """Tokens (b,) as the kernel reads them: int64, in a row."""
    if token_ids.dtype != torch.int64 or token_ids.ndim != 1:
        if token_ids.ndim != 1 or token_ids.is_floating_point() or token_ids.dtype == torch.bool:
            raise ValueError(
                f"a step takes token ids (b,), whole numbers; got {tuple(token_ids.shape)} of {token_ids.dtype}."
            )
        token_ids = token_ids.long()
    return token_ids.contiguous()


def _check_state(like: list[LayerState], state: ModelState, batch_size: int) -> None:
    """like: a state of each layer, with one row."""
    position = state.position
    fits = position.shape == (batch_size,) and position.dtype == torch.int64 and position.is_contiguous()
    if len(like) != len(state.layers) or not fits:
        raise ValueError(
            f"the state is of {len(state.layers)} layers and {len(state.position)} rows; the model has {len(like)} "
            f"layers, and {batch_size} tokens came. Make it with model.new_state({batch_size})."
        )
    for layer, row in zip(state.layers, like, strict=True):
        wanted = row.map(lambda x: x.expand(batch_size, *x.shape[1:]))
        if type(layer) is type(wanted) and _fits(layer, wanted):
            continue
        raise ValueError(
            f"the fused step takes states as model.new_state({batch_size}) makes them, contiguous and float32: "
            f"{wanted!r}; got {layer!r}."
        )


def _fits(layer: LayerState, wanted: LayerState) -> bool:
    """As wide, and as the kernel reads it; how long a cache is does not matter, and it may have a mask."""
    found, expected = _written(layer), _written(wanted)
    floats = [torch.float32]
    if isinstance(layer, KVCache):
        expected = [x.expand(-1, -1, layer.capacity, -1) for x in expected]
        floats.append(torch.bfloat16)
    shapes = [x.shape for x in found][: len(expected)] == [x.shape for x in expected]
    types = {x.dtype for x in found if x.dtype != torch.bool}
    return (
        shapes
        and len(types) < 2
        and types.issubset(floats)
        and all(x.device.type == "cpu" and x.is_contiguous() for x in found)
    )


def _written(layer: LayerState) -> list[Tensor]:
    """The tensors of a layer's state, whole."""
    return [x for x in vars(layer).values() if isinstance(x, Tensor)]


def _caches(state: ModelState) -> list[KVCache]:
    return [x for x in state.layers if isinstance(x, KVCache)]


# --- weights


def _write_model(block: Block, model: Model, weights: str) -> None:
    config, layers = model.config, model.model.layers
    pre_norm = config.norm_position == "pre"
    rotaries = {x.dim: x for x in (layer.attention.rotary for layer in layers) if x is not None}
    block.numbers(
        config.hidden_size,
        config.num_attention_heads,
        config.num_key_value_heads,
        config.head_dim,
        config.intermediate_size,
        len(layers),
        len(rotaries),
    )
    block.numbers(pre_norm, config.norm == "layer", config.mlp == "swiglu", config.normalize)
    for rotary in rotaries.values():
        block.numbers(rotary.dim)
        block.place(rotary.frequencies())
    for layer in layers:
        _write_layer(block, layer, weights, list(rotaries))
    _write_norm(block, model.model.norm if pre_norm else None)
    head = _head(model)
    block.matrix(head.weight, head.bias, "float32" if weights == "float32" else "bfloat16")


def _write_layer(block: Block, layer: Layer, weights: str, widths: Sequence[int]) -> None:
    attention: Any = layer.attention
    kind = KINDS[type(attention)]
    decay = attention.decay if kind == "linear" else None
    rotary: Rotary | None = attention.rotary
    block.numbers(ATTENTIONS.index(kind), DECAYS.index(DECAY_KINDS[type(decay)]))
    rotates_features = kind == "linear" and rotary is not None and not attention.rotates_inputs
    block.numbers(-1 if rotary is None else widths.index(rotary.dim), rotates_features)
    if kind == "linear":
        _write_features(block, attention)
    _write_norm(block, layer.attention_norm)
    _write_norm(block, layer.mlp_norm)
    projections = [attention.v_proj] if kind == "none" else [attention.q_proj, attention.k_proj, attention.v_proj]
    rows = [(x.weight, x.bias) for x in projections]
    if isinstance(decay, TokenDecay):
        rows.append((decay.gate.weight, decay.bias))
    if isinstance(decay, ChannelDecay):
        rows.append((decay.down.weight, None))
    block.matrix(*_stacked(rows), weights)
    block.matrix(attention.o_proj.weight, attention.o_proj.bias, weights)
    mlp: Any = layer.mlp
    if isinstance(mlp, GeluMlp):
        block.matrix(mlp.up_proj.weight, mlp.up_proj.bias, weights)
    else:
        block.matrix(*_interleaved(mlp.gate_proj, mlp.up_proj), weights)
    block.matrix(mlp.down_proj.weight, mlp.down_proj.bias, weights)
    if isinstance(decay, ChannelDecay):
        block.heads(*(x.unflatten(0, (decay.num_heads, -1)) for x in (decay.up.weight, decay.up.bias)))
    o_norm = attention.o_norm if kind == "linear" else None
    for norm in (attention.q_norm, attention.k_norm, o_norm):
        block.vector(None if norm is None else norm.weight)
    block.vector(decay.log_decay if isinstance(decay, HeadDecay) else None)


def _write_features(block: Block, attention: LinearAttention) -> None:
    made = recipe(attention.feature_map, attention.head_dim)
    assert made is not None
    heads, m = (0, 0) if made.omega is None else made.omega.shape[:2]
    block.numbers(FUNCTIONS.index(made.function), made.made_here, attention.feature_map.log_scaled)
    block.numbers(attention.num_features, heads, m)
    if made.omega is not None:
        bias = made.bias
        block.heads(made.omega, None if bias is None else bias.expand(heads, -1))
    numbers = (made.square, made.offset, made.gain, made.shift, made.number)
    block.place(torch.tensor(numbers, dtype=torch.float64))
    block.place(torch.tensor(made.parts) if made.parts else None)
    for moved in (made.queries, made.keys):
        _write_move(block, moved)


def _write_move(block: Block, move: Move | None) -> None:
    block.numbers(0 if move is None else len(move.centre))
    for x in move or [None] * 4:
        block.vector(None if x is None else x.flatten())


def _write_norm(block: Block, norm: Any) -> None:
    block.vector(None if norm is None else norm.weight)
    block.vector(getattr(norm, "bias", None))


def _stacked(rows: list[tuple[Tensor, Tensor | None]]) -> tuple[Tensor, Tensor]:
    """Several products of the same input as one."""
    weights, biases = zip(*rows, strict=True)
    return torch.cat(weights), torch.cat(
        [w.new_zeros(len(w)) if b is None else b for w, b in zip(weights, biases, strict=True)]
    )


def _interleaved(gate: nn.Linear, up: nn.Linear) -> tuple[Tensor, Tensor]:
    """64 rows of the gate, 64 of what it gates, and so on."""

    def panels(x: Tensor | None, like: Tensor) -> Tensor:
        x = like.new_zeros(len(like)) if x is None else x
        whole = -(-len(x) // 64) * 64
        return torch.cat([x, x.new_zeros(whole - len(x), *x.shape[1:])]).unflatten(0, (-1, 64))

    return tuple(  # type: ignore[return-value]
        torch.stack([panels(a, gate.weight), panels(b, gate.weight)], 1).flatten(0, 2)
        for a, b in ((gate.weight, up.weight), (gate.bias, up.bias))
    )


def _head(model: Model) -> nn.Linear:
    return model.lm_head if isinstance(model, TextModel) else model.head


# --- what enters the first layer: a row per token, a row per position, and what else each row of the batch has


def _token_table(model: Model) -> Tensor:
    return _full_width(model, model.model.embed_tokens.weight * model.model.embed_scale)


def _full_width(model: Model, x: Tensor) -> Tensor:
    """(n, width) with zeros where the positions are beside the embedding."""
    missing = model.config.hidden_size - x.shape[1]
    return (torch.nn.functional.pad(x, (0, missing)) if missing else x).contiguous()


def _place_table(model: Model, most_places: int) -> Tensor | None:
    """(places, hidden); None where there are none, or too many of those that a formula gives."""
    limit = model.config.max_position_embeddings
    if limit is None or (limit > most_places and model.config.position not in ("learned", "grid")):
        return None
    places = torch.arange(limit, device="cpu")[None]
    if isinstance(model, ImageModel) and model.grid:
        start = torch.zeros(1, limit, dtype=torch.long, device="cpu")
        return (model.embed(start, places, None) - model.model.embed_tokens(start))[0].contiguous()
    if model.model.embed_positions is None:
        return None
    return _beside(model, places)[0].contiguous()


def _beside(model: Model, positions: Tensor) -> Tensor:
    """The embeddings of positions (b, t), as wide as the model."""
    assert model.model.embed_positions is not None
    place = model.model.embed_positions(positions)
    return torch.nn.functional.pad(place, (model.config.hidden_size - place.shape[-1], 0))


def _extra(model: Model, state: ModelState, places: Tensor | None) -> Tensor | None:
    """What the batch's rows have of their own, (b, hidden): their class, and their position where no table has it."""
    condition, extra = getattr(state, "condition", None), None
    if condition is not None:
        extra = _full_width(model, condition * model.model.embed_scale)
    if places is None and model.model.embed_positions is not None:
        check_length(model.config, 1, int(state.position.max()))
        place = _beside(model, state.position[:, None])[:, 0]
        extra = place.contiguous() if extra is None else extra + place
    return extra
