"""What a tarnn model is made of: one flat, checked list of choices."""

from dataclasses import fields
from difflib import get_close_matches
from inspect import get_annotations
from typing import Any, ClassVar, Self, cast

from transformers import PreTrainedConfig

from tarnn.attention.registry import ATTENTIONS, DECAYS
from tarnn.feature_maps import FeatureMap
from tarnn.feature_maps.registry import MAPS
from tarnn.models.base_keys import TAKEN, check_base_keys, without_old_keys
from tarnn.models.choices import by_own_names, check_options, named_maps, of_the_model
from tarnn.models.folders import check_folder
from tarnn.other_names import CONFIG
from tarnn.registry import Registry

_CHOICES = {"norm": ("rms", "layer"), "norm_position": ("pre", "post"), "mlp": ("swiglu", "gelu")}
_RANGES = {"dropout": (0, 1), "initializer_range": (0, 10), "norm_eps": (0, 10), "rotary_base": (1, 1e12)}
MOST_HEADS = 2**20  # numbers per head are made before weights are counted
LARGEST = 10**13  # weights of a model; above that a size is a slip


class TarnnConfig(PreTrainedConfig):
    """The choices that make a `TarnnModel` and what stands on it (`TarnnForCausalLM` …), checked as soon as it is made.

    `attention` and `feature_map` take a name for all layers, or a list of names: a pattern that is repeated
    over the layers, so that a hybrid is one line:

        TarnnConfig(num_hidden_layers=8, attention=["linear", "linear", "linear", "softmax"])

    attention: a name of `tarnn.attention.names()`: linear | softmax | none, or one of your own.
    attention_options: arguments of the kinds of attention, by name, such as {"softmax": {"dropout": 0.1}}.
    feature_map: a name of `tarnn.feature_maps.names()`, such as elu, relu, dpfp or favor (FAVOR+), or a map, which
        stands for its name and its options: each layer makes its own. feature_map_options: arguments of the maps,
        by name: {"favor": {"num_features": 128, "seed": 1, "centre": true, "balance": true}}, {"dpfp": {"nu": 2}}.
    normalize: divide by the sum of the weights; False: a norm on each head's output (signed maps need it).
    causal: each token sees those before it; False: all see all others (an encoder).
    input_size: None: the input is token ids; n: frames of n numbers (`input_features`, of `TarnnForCTC`), of which
        `subsampling` neighbours make one place of the sequence.
    decay: none | head (RetNet) | token (Mamba-2) | channel (GLA), of linear attention's state; by default token, and
        none where causal=False, since a decay runs along time.
    position: rotary | sinusoidal (added to the embedding) | sinusoidal_half (half of the channels are the
        embedding, half the position; untied) | learned (added; needs max_position_embeddings) | none. By default none,
        since a decay knows the order, and sinusoidal where causal=False.
    max_position_embeddings: the longest sequence that is taken; None: any length.
    norm: rms | layer; norm_position: pre | post (the residual sum is normed, as in 2017).
    mlp: swiglu | gelu; intermediate_size: by default 8/3 and 4 times hidden_size, alike in parameters.
    qk_norm: an RMSNorm of each query and key.
    bias: whether projections have one. dropout: on the embedding and on what each sublayer adds.

    Raises ValueError, in one sentence, for an unknown key (it lists the known ones), an unknown choice, sizes
    that don't fit each other, and combinations that have no meaning.
    """

    model_type = "tarnn"
    keys_to_ignore_at_inference: ClassVar[list[str]] = ["past_key_values"]
    positions: ClassVar[tuple[str, ...]] = ("rotary", "sinusoidal", "sinusoidal_half", "learned", "none")

    vocab_size: int = 257
    hidden_size: int = 256
    num_hidden_layers: int = 8
    num_attention_heads: int = 8
    num_key_value_heads: int = None  # type: ignore[assignment]  # as many as there are heads
    head_dim: int = None  # type: ignore[assignment]  # hidden_size / num_attention_heads
    intermediate_size: int = None  # type: ignore[assignment]  # see above
    attention: str | list[str] = "linear"
    attention_options: dict = None  # type: ignore[assignment]  # {}
    feature_map: str | FeatureMap | list[str | FeatureMap] = "elu"
    feature_map_options: dict = None  # type: ignore[assignment]  # {}
    normalize: bool = True
    decay: str = None  # type: ignore[assignment]  # see above
    position: str = None  # type: ignore[assignment]  # see above
    rotary_base: float = 10000.0
    max_position_embeddings: int | None = None
    causal: bool = True
    input_size: int | None = None
    subsampling: int = 1
    norm: str = "rms"
    norm_eps: float = 1e-6
    norm_position: str = "pre"
    mlp: str = "swiglu"
    bias: bool = False
    qk_norm: bool = True
    tie_word_embeddings: bool = None  # type: ignore[assignment]  # True, but see `_can_tie`
    dropout: float = 0.0
    initializer_range: float = 0.02
    use_cache: bool = True
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
    pad_token_id: int | None = None

    def __post_init__(self, **kwargs):
        self._refuse_unknown(kwargs)
        check_base_keys({**vars(self), **kwargs})
        if self.decay is None:
            self.decay = "token" if self.causal else "none"
        if self.position is None:
            self.position = "none" if self.causal else "sinusoidal"
        if self.tie_word_embeddings is None:
            self.tie_word_embeddings = self._can_tie()
        self.attention_options = self.attention_options or {}
        self.feature_map_options = self.feature_map_options or {}
        self.feature_map_options = by_own_names(self.feature_map_options)
        check_options(self)
        self.feature_map, options, of_maps = named_maps(self.feature_map, self.feature_map_options)
        self.feature_map_options = {name: given for name, given in options.items() if given}
        self._check()
        if self.num_key_value_heads is None:
            self.num_key_value_heads = self.num_attention_heads
        if self.head_dim is None:
            self.head_dim = self.hidden_size // self.num_attention_heads
        if self.intermediate_size is None:
            wide = 4 * self.hidden_size if self.mlp == "gelu" else 8 * self.hidden_size / 3
            self.intermediate_size = -int(-wide // 32) * 32
        self._check_maps(of_maps)
        self._check_layers()
        super().__post_init__(**kwargs)

    @classmethod
    def get_config_dict(cls, pretrained_model_name_or_path, **kwargs):
        check_folder(pretrained_model_name_or_path)
        return super().get_config_dict(pretrained_model_name_or_path, **kwargs)

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Self:
        """As transformers reads a config.json; keys of its own that mean nothing here are ignored with a warning."""
        known = TAKEN | {field.name for field in fields(cls)}
        return super().from_dict(without_old_keys(config_dict, known), **kwargs)

    @classmethod
    def paper(cls, **overrides) -> Self:
        """The model of "Transformers are RNNs" (Katharopoulos et al. 2020, arXiv 2006.16236, section 4.2).

        8 layers of 8 heads of 32, feed-forward of four times the width with GELU, LayerNorm after each residual sum, biases,
        positions concatenated to the embedding (as in the authors' code), an output layer of its own. Weights
        begin with the standard deviation that torch's own linear layers have, and so the authors':
        initializer_range = 1/√(3·hidden_size).
        """
        preset: dict[str, Any] = {
            "hidden_size": 256,
            "num_hidden_layers": 8,
            "num_attention_heads": 8,
            "attention": "linear",
            "feature_map": "elu",
            "normalize": True,
            "decay": "none",
            "position": "sinusoidal_half",
            "norm": "layer",
            "norm_eps": 1e-5,
            "norm_position": "post",
            "mlp": "gelu",
            "bias": True,
            "qk_norm": False,
        }
        config = cls(**{**preset, **overrides})
        if "initializer_range" not in overrides:
            config.initializer_range = (3 * config.hidden_size) ** -0.5
        return config

    def attention_of(self, layer: int) -> str:
        """The kind of attention in this layer."""
        names = self.attention
        return names if isinstance(names, str) else names[layer % len(names)]

    def cross_attention_of(self, layer: int) -> str:
        """The kind of this layer's attention to another sequence, where it has one."""
        return self.attention_of(layer)

    def feature_map_of(self, layer: int) -> str:
        """The name of this layer's feature map."""
        names = cast(str | list[str], self.feature_map)
        return names if isinstance(names, str) else names[layer % len(names)]

    @property
    def layer_types(self) -> list[str]:
        """The kind of cache that each layer needs, as transformers asks for it; not saved."""
        kinds = (self.attention_of(i) for i in range(self.num_hidden_layers))
        return [ATTENTIONS.find(kind).kind.layer_type for kind in kinds]

    def validate(self) -> None:
        """Called by transformers before saving, in place of its own checks, which don't know our layers."""
        check_options(self)
        self._check()
        self._check_layers()

    def num_parameters_estimate(self) -> int:
        """The numbers that the model's weights and its maps' buffers take, without allocating them."""
        from tarnn.models.block import count_in_blocks  # which is made of a config

        return count_in_blocks(self) + self._around_blocks()

    def _around_blocks(self) -> int:
        """Those of embeddings, final norm and output layer."""
        hidden = self.hidden_size
        width = hidden // 2 if self.position == "sinusoidal_half" else hidden
        read = self.vocab_size if self.input_size is None else self.input_size * self.subsampling + 1
        numbers = read * width + (0 if self.tie_word_embeddings else self.vocab_size * hidden)
        if self.position == "learned":
            numbers += width * (self.max_position_embeddings or 0)
        return numbers + (0 if self.norm_position == "post" else hidden * (1 if self.norm == "rms" else 2))

    def _can_tie(self) -> bool:
        """Whether the embedding is a matrix like the output layer's."""
        return self.position != "sinusoidal_half" and self.input_size is None

    def _check_layers(self) -> None:
        """Raises ValueError for what the layers refuse, and for sizes that no computer has room for."""
        try:
            numbers: float = self.num_parameters_estimate()
        except (RuntimeError, OverflowError):  # sizes beyond 64 bits
            numbers = float("inf")
        if numbers > LARGEST:
            raise ValueError(
                f"these sizes make a model of {numbers:.2g} weights, more than the {LARGEST:.0g} that are taken; make "
                "hidden_size, num_hidden_layers, vocab_size or another of them smaller."
            )

    @classmethod
    def known_keys(cls) -> list[str]:
        """The choices that this class adds to transformers' own."""
        own = {name for c in cls.__mro__ if issubclass(c, TarnnConfig) for name in get_annotations(c)}
        return [field.name for field in fields(cls) if field.name in own]

    def _refuse_unknown(self, kwargs: dict[str, Any]) -> None:
        unknown = sorted(set(kwargs) - TAKEN)
        if unknown:
            close = [CONFIG.get(x) or next(iter(get_close_matches(x, self.known_keys(), n=1)), "") for x in unknown]
            hint = f" Did you mean {', '.join(filter(None, close))}?" if any(close) else ""
            raise ValueError(
                f"{type(self).__name__} has no {', '.join(map(repr, unknown))}; "
                f"it takes {', '.join(self.known_keys())}.{hint}"
            )
        if (found := kwargs.get("model_type", self.model_type)) != self.model_type:
            raise ValueError(f"this is the config of a {found!r} model, not of a {self.model_type} model.")

    def _check(self) -> None:
        for name in ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "subsampling"):
            check_positive_int(name, getattr(self, name))
        optional = ("num_key_value_heads", "head_dim", "intermediate_size", "max_position_embeddings", "input_size")
        for name in optional:
            if getattr(self, name) is not None:
                check_positive_int(name, getattr(self, name))
        for name in ("normalize", "bias", "qk_norm", "tie_word_embeddings", "causal"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name} must be true or false; got {getattr(self, name)!r}.")
        for name, (low, high) in _RANGES.items():
            value = getattr(self, name)
            if not isinstance(value, int | float) or isinstance(value, bool) or not low <= value < high:
                raise ValueError(f"{name} must be a number from {low} to below {high:g}; got {value!r}.")
        for name, known in {**_CHOICES, "position": self.positions}.items():
            check_choice(name, getattr(self, name), known)
        self._check_tokens()
        check_choice("decay", self.decay, ("none", *DECAYS.names()))
        check_pattern("attention", self.attention, ATTENTIONS, self.num_hidden_layers)
        check_pattern("feature_map", self.feature_map, MAPS, self.num_hidden_layers)
        self._check_sizes()

    def _check_maps(self, of_maps: dict[str, dict[str, Any]]) -> None:
        """A map that was given as an object must have been made for this model."""
        for name, made_for in of_maps.items():
            for key, value in of_the_model(self).items():
                if made_for.get(key, value) != value:
                    raise ValueError(
                        f"the {MAPS[name].kind.__name__} given as feature_map was made with {key} = {made_for[key]}; "
                        f"this model's is {value}."
                    )

    def _check_tokens(self) -> None:
        for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
            value = getattr(self, name)
            ids = value if isinstance(value, list) and name == "eos_token_id" else [value]
            if not all(one is None or (type(one) is int and 0 <= one < self.vocab_size) for one in ids):
                raise ValueError(
                    f"{name} must be a token's number, from 0 to below vocab_size = {self.vocab_size}, "
                    f"or null; got {value!r}."
                )

    def _check_sizes(self) -> None:
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
        if self.input_size is None and self.subsampling != 1:
            raise ValueError(
                f"subsampling joins neighbouring frames; tokens (input_size = null) have none, got {self.subsampling}."
            )


def check_positive_int(name: str, value) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"{name} must be a positive integer; got {value!r}.")
    if value >= 2**40:
        raise ValueError(f"{name} must be below 2⁴⁰; got {value}.")


def check_choice(name: str, value, known) -> None:
    if value not in known:
        close = get_close_matches(str(value), known, n=1)
        hint = f" Did you mean {close[0]!r}?" if close else ""
        raise ValueError(f"{name} must be one of {', '.join(known)}; got {value!r}.{hint}")


def check_pattern(name: str, value, known: Registry, num_layers: int) -> None:
    for one in value if isinstance(value, list | tuple) else [value]:
        known.find(one)
    if not isinstance(value, str) and (not value or num_layers % len(value)):
        raise ValueError(
            f"a list of {name}s is repeated over the layers, so their number must be a multiple of its "
            f"length; got {len(value)} {name}s for {num_layers} layers."
        )
