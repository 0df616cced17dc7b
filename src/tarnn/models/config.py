"""The sizes and choices of a model: one flat, frozen, checked record, from which all modules here are built."""

from copy import copy, deepcopy
from dataclasses import dataclass
from typing import Any, ClassVar, cast

from tarnn.attention.registry import ATTENTIONS, DECAYS
from tarnn.feature_maps import FeatureMap
from tarnn.feature_maps.by_name import described
from tarnn.feature_maps.registry import MAPS
from tarnn.models.checks import check_choice, check_flag, check_number, check_options, check_pattern, check_positive_int

FILLED_IN: Any = None  # the default of a key that others decide
WIDEST_FILTER = 31  # of `short_convolution`
MOST_HEADS = 2**20  # per-head numbers are computed before weights are counted


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The keys that say what a model computes. A key that is None by default is filled in.

    `attention` and `feature_map` take a name for all layers, or a list of names: a pattern that is repeated over the
    layers, so that a hybrid is one line:

        ModelConfig(num_hidden_layers=8, attention=["linear", "linear", "linear", "softmax"])

    attention: a name of `tarnn.attention.names()`: linear | gated_delta | mamba2 | rwkv7 | softmax | window | none, or
        one of your own.
    attention_options: arguments of the kinds of attention, by name, such as {"softmax": {"dropout": 0.1}}.
    feature_map: a name of `tarnn.feature_maps.names()`, such as elu, relu, dpfp or favor (FAVOR+), or a map, which
        stands for its name and its options: each layer makes its own. feature_map_options: arguments of the maps,
        by name: {"favor": {"num_features": 128, "seed": 1, "centre": true, "balance": true}}, {"dpfp": {"nu": 2}}.
    normalize: divide by the sum of the weights; False: a norm on each head's output (signed maps need it).
    causal: each token sees those before it; False: all see all others (an encoder).
    input_size: None: the input is token ids; n: frames of n numbers (`input_features`, of `TarnnForCTC`), of which
        `subsampling` neighbours make one position of the sequence. front: how they do. stack: side by side, through one
        matrix; conv: halved again and again by convolutions over 5 frames (subsampling = 2, 4, 8 …), which overlap.
    conv_kernel: before attention, each layer filters its channels over so many tokens (1 to 31): the last ones, or without
        causality those on both sides; None: it does not.
    decay: none | head (RetNet) | token (Mamba-2) | channel (GLA), of linear attention and gated DeltaNet; by default token,
        and none if causal=False, where each side has a decay of its own.
    position: rotary | sinusoidal (added to the embedding) | sinusoidal_half (half of the channels are the
        embedding, half the position; untied) | learned (added; needs max_position_embeddings) | none. By default none,
        since a decay knows the order, and sinusoidal if causal=False.
    max_position_embeddings: the longest sequence that is accepted; None: any length.
    norm: rms | layer; norm_position: pre | post (the residual sum is normed, as in 2017).
    mlp: swiglu | gelu | squared_relu (as in RWKV) | none (as in Mamba); intermediate_size: by default 8/3 times hidden_size
        for swiglu and 4 times for the others, alike in parameters.
    qk_norm: an RMSNorm of each query and key.
    bias: whether projections have one. dropout: on the embedding and on what each sublayer adds.
    reversible: two residual streams, so that training stores the activations of one layer, not of all, and is slower.

    Raises ValueError, in one sentence, for an unknown choice, sizes that don't fit each other, and combinations that
    have no meaning.
    """

    positions: ClassVar[tuple[str, ...]] = ("rotary", "sinusoidal", "sinusoidal_half", "learned", "none")

    vocab_size: int = 257
    hidden_size: int = 256
    num_hidden_layers: int = 8
    num_attention_heads: int = 8
    num_key_value_heads: int = FILLED_IN  # num_attention_heads
    head_dim: int = FILLED_IN  # hidden_size / num_attention_heads
    intermediate_size: int = FILLED_IN  # see above
    attention: str | list[str] = "linear"
    attention_options: dict = FILLED_IN  # {}
    feature_map: str | FeatureMap | list[str | FeatureMap] = "elu"
    feature_map_options: dict = FILLED_IN  # {}
    normalize: bool = True
    decay: str = FILLED_IN  # see above
    position: str = FILLED_IN  # see above
    rotary_base: float = 10000.0
    max_position_embeddings: int | None = None
    causal: bool = True
    input_size: int | None = None
    subsampling: int = 1
    front: str = "stack"
    conv_kernel: int | None = None
    norm: str = "rms"
    norm_eps: float = 1e-6
    norm_position: str = "pre"
    mlp: str = "swiglu"
    bias: bool = False
    qk_norm: bool = True
    tie_word_embeddings: bool = FILLED_IN  # True if the embedding is a matrix like the output layer's
    dropout: float = 0.0
    reversible: bool = False

    def __post_init__(self) -> None:
        tied = self.position != "sinusoidal_half" and self.input_size is None
        self._fill_in(
            decay="token" if self.causal else "none",
            position="none" if self.causal else "sinusoidal",
            tie_word_embeddings=tied,
            attention_options={},
            feature_map_options={},
        )
        map_sizes = self._name_feature_maps()
        self._check_values()
        self._check_combinations()
        wide = 8 * self.hidden_size / 3 if self.mlp == "swiglu" else 4 * self.hidden_size
        self._fill_in(
            num_key_value_heads=self.num_attention_heads,
            head_dim=self.hidden_size // self.num_attention_heads,
            intermediate_size=-int(-wide // 32) * 32,
        )
        self._check_feature_maps(map_sizes)

    def attention_of(self, layer: int) -> str:
        """The kind of attention in this layer."""
        return layer_choice(self.attention, layer)

    def cross_attention_of(self, layer: int) -> str:
        """The kind of this layer's attention to another sequence."""
        return self.attention_of(layer)

    def feature_map_of(self, layer: int) -> str:
        """The name of this layer's feature map."""
        return layer_choice(cast(str | list[str], self.feature_map), layer)

    def feature_map_sizes(self) -> dict[str, Any]:
        """The arguments of feature maps that the model decides."""
        return {
            "head_dim": self.head_dim,
            "num_heads": self.num_key_value_heads,
            "max_length": self.max_position_embeddings,
        }

    def numbers_outside_blocks(self) -> int:
        """The size of embeddings, final norm and output layer."""
        hidden = self.hidden_size
        width = hidden // 2 if self.position == "sinusoidal_half" else hidden
        numbers = self._numbers_before(width) + (0 if self.tie_word_embeddings else self.vocab_size * hidden)
        if self.position == "learned":
            numbers += width * (self.max_position_embeddings or 0)
        return numbers + (0 if self.norm_position == "post" else hidden * (1 if self.norm == "rms" else 2))

    def _numbers_before(self, width: int) -> int:
        """The size of what tokens or frames enter by."""
        if self.input_size is None:
            return self.vocab_size * width
        if self.front == "stack":
            return (self.input_size * self.subsampling + 1) * width
        inputs = [self.input_size, *[width] * (self.subsampling.bit_length() - 2)]
        return sum(5 * n + 1 for n in inputs) * width + (width + 1) * width

    def _fill_in(self, **defaults: Any) -> None:
        """Set keys that are None; only `__post_init__` may."""
        vars(self).update({key: value for key, value in defaults.items() if getattr(self, key) is None})

    def _name_feature_maps(self) -> dict[str, dict[str, Any]]:
        """Replace feature-map objects by names and options; return the sizes that they were constructed with."""
        options = self.feature_map_options
        if isinstance(options, dict):
            options = {MAPS.own_name(name): value for name, value in options.items()}
        check_options("feature_map_options", options, MAPS, "{'dpfp': {'nu': 2}}")
        check_options("attention_options", self.attention_options, ATTENTIONS, "{'linear': {'dropout': 0.1}}")
        names: list[Any] = []
        sizes: dict[str, dict[str, Any]] = {}
        pattern = self.feature_map if isinstance(self.feature_map, list | tuple) else [self.feature_map]
        for choice in pattern:
            if not isinstance(choice, FeatureMap):
                names.append(MAPS.own_name(choice))
                continue
            name, own_options, sizes[name] = described(choice)
            if options.get(name, own_options) != own_options:
                raise ValueError(
                    f"all layers with one kind of feature map have the same options of it; got {options[name]} and "
                    f"{own_options} for {name!r}."
                )
            options = {**options, name: own_options}
            names.append(name)
        vars(self).update(  # copies: what the caller passed may change later
            feature_map=names if isinstance(self.feature_map, list | tuple) else names[0],
            feature_map_options=deepcopy({name: values for name, values in options.items() if values}),
            attention=copy(self.attention),
            attention_options=deepcopy(self.attention_options),
        )
        return sizes

    def _check_values(self) -> None:
        for name in ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "subsampling"):
            check_positive_int(name, getattr(self, name))
        optional = (
            "num_key_value_heads",
            "head_dim",
            "intermediate_size",
            "max_position_embeddings",
            "input_size",
            "conv_kernel",
        )
        for name in optional:
            if getattr(self, name) is not None:
                check_positive_int(name, getattr(self, name))
        for name in ("normalize", "bias", "qk_norm", "tie_word_embeddings", "causal", "reversible"):
            check_flag(name, getattr(self, name))
        check_number("dropout", self.dropout, 0, 1)
        check_number("norm_eps", self.norm_eps, 0, 10)
        check_number("rotary_base", self.rotary_base, 1, 1e12)
        check_choice("norm", self.norm, ("rms", "layer"))
        check_choice("norm_position", self.norm_position, ("pre", "post"))
        check_choice("mlp", self.mlp, ("swiglu", "gelu", "squared_relu", "none"))
        check_choice("position", self.position, self.positions)
        check_choice("front", self.front, ("stack", "conv"))
        check_choice("decay", self.decay, ("none", *DECAYS.names()))
        check_pattern("attention", self.attention, ATTENTIONS, self.num_hidden_layers)
        check_pattern("feature_map", self.feature_map, MAPS, self.num_hidden_layers)

    def _check_combinations(self) -> None:
        heads, kv_heads = self.num_attention_heads, self.num_key_value_heads
        if max(heads, kv_heads or 0) > MOST_HEADS:
            raise ValueError(
                f"num_attention_heads and num_key_value_heads must be at most {MOST_HEADS:,}; got {heads:,} and "
                f"{kv_heads or heads:,}."
            )
        if self.head_dim is None and self.hidden_size % heads:
            raise ValueError(
                "hidden_size must be a multiple of num_attention_heads, or head_dim given; got "
                f"hidden_size = {self.hidden_size} and num_attention_heads = {heads}."
            )
        if kv_heads is not None and heads % kv_heads:
            raise ValueError(
                f"num_attention_heads must be a multiple of num_key_value_heads; got {heads} and {kv_heads}."
            )
        if self.position == "learned" and self.max_position_embeddings is None:
            raise ValueError('position = "learned" is a table: say how long, max_position_embeddings.')
        if self.position.startswith("sinusoidal") and self.hidden_size % 4:
            raise ValueError(
                f"sinusoidal positions need a hidden_size that is a multiple of 4; got {self.hidden_size}."
            )
        if self.position == "sinusoidal_half" and self.tie_word_embeddings:
            raise ValueError(
                'position = "sinusoidal_half" makes embeddings half as wide as the output layer, so they '
                "can't be tied; leave tie_word_embeddings out."
            )
        if self.input_size is not None and self.tie_word_embeddings:
            raise ValueError(
                "frames of input_size numbers have no embedding that the output layer could share; leave "
                "tie_word_embeddings out."
            )
        if self.reversible and (self.norm_position == "post" or self.conv_kernel is not None):
            raise ValueError(
                f'reversible layers need norm_position = "pre" and no conv_kernel; got {self.norm_position!r} and '
                f"{self.conv_kernel}. Leave them out, or reversible."
            )
        if self.reversible and self.mlp == "none":
            raise ValueError('reversible layers need a feed-forward; got mlp = "none". Leave it out, or reversible.')
        if self.input_size is None and (self.subsampling != 1 or self.front != "stack"):
            raise ValueError(
                f"subsampling joins neighbouring frames, and front says how; tokens (input_size = null) have none, got "
                f"subsampling = {self.subsampling} and front = {self.front!r}."
            )
        if self.front == "conv" and (self.subsampling == 1 or self.subsampling & (self.subsampling - 1)):
            raise ValueError(
                f'front = "conv" halves the number of frames in each convolution, so subsampling must be 2, 4, 8 …; got '
                f"{self.subsampling}."
            )
        if self.conv_kernel is not None and self.conv_kernel > WIDEST_FILTER:
            raise ValueError(f"conv_kernel must be from 1 to {WIDEST_FILTER} tokens, or null; got {self.conv_kernel}.")

    def _check_feature_maps(self, sizes: dict[str, dict[str, Any]]) -> None:
        """Raise ValueError for a feature-map object that was constructed for other sizes."""
        for name, own_sizes in sizes.items():
            for key, value in self.feature_map_sizes().items():
                if own_sizes.get(key, value) != value:
                    raise ValueError(
                        f"the {MAPS[name].kind.__name__} given as feature_map was made with {key} = {own_sizes[key]}; "
                        f"this model's is {value}."
                    )


@dataclass(frozen=True, kw_only=True)
class Seq2SeqModelConfig(ModelConfig):
    """The keys of a decoder that attends to an encoder, and of that encoder.

    encoder_layers: blocks of the encoder, which is else like the decoder, sees both sides and has no decay; by default
        num_hidden_layers.
    cross_attention: the kind of the decoder's attention to the encoder: a name, or a list that is repeated over the
        layers; by default that of `attention`.
    """

    encoder_layers: int = FILLED_IN  # num_hidden_layers
    cross_attention: str | list[str] = FILLED_IN  # attention
    position: str = "sinusoidal"

    def __post_init__(self) -> None:
        self._fill_in(encoder_layers=self.num_hidden_layers, cross_attention=self.attention)
        check_positive_int("encoder_layers", self.encoder_layers)
        if not self.causal or self.input_size is not None:
            raise ValueError("an encoder–decoder of tokens has a causal decoder and no input_size; leave both out.")
        if self.reversible:
            raise ValueError("blocks with cross-attention are not reversible; leave reversible out.")
        super().__post_init__()
        check_pattern("cross_attention", self.cross_attention, ATTENTIONS, self.num_hidden_layers)
        vars(self).update(cross_attention=copy(self.cross_attention))

    def cross_attention_of(self, layer: int) -> str:
        return layer_choice(self.cross_attention, layer)


def layer_choice(pattern: str | list[str], layer: int) -> str:
    """The name that a pattern has for this layer."""
    return pattern if isinstance(pattern, str) else pattern[layer % len(pattern)]


def softmax_pattern(config: ModelConfig) -> list[str]:
    """The attention of all layers with softmax for every kind; a layer without any stays without."""
    pattern = [config.attention_of(i) for i in range(config.num_hidden_layers)]
    return ["none" if kind == "none" else "softmax" for kind in pattern]
