"""The config that users see and that is saved: a model's sizes and choices, and what transformers must know besides."""

from dataclasses import fields
from difflib import get_close_matches
from inspect import cleandoc, get_annotations
from typing import TYPE_CHECKING, Any, ClassVar, Self

from transformers import PreTrainedConfig

from tarnn.attention.registry import ATTENTIONS
from tarnn.huggingface.config_keys import TAKEN, check_base_keys, without_old_keys
from tarnn.huggingface.folders import check_folder
from tarnn.huggingface.versions import CACHE
from tarnn.models.checks import check_number
from tarnn.models.config import ModelConfig, softmax_pattern
from tarnn.models.size import count_numbers
from tarnn.other_names import CONFIG, our_name

LARGEST = 10**13  # weights of a model; above that a size is a slip


class RecordConfig(PreTrainedConfig):
    """A config with the keys, defaults and docs of a record: `class TarnnConfig(RecordConfig, record=ModelConfig)`."""

    record_class: ClassVar[type[ModelConfig]]

    if TYPE_CHECKING:

        def __init__(self, **choices: Any): ...

    def __init_subclass__(cls, record: type[ModelConfig] | None = None, **options: Any):
        if record is not None:
            cls.record_class = record
            cls.__annotations__ = {x.name: x.type for x in fields(record)} | get_annotations(cls)
            for key in fields(record):
                setattr(cls, key.name, key.default)
            cls.__doc__ = f"{cleandoc(cls.__doc__ or '')}\n\n{cleandoc(record.__doc__ or '')}"
        super().__init_subclass__(**options)

    def record(self) -> Any:
        """The frozen record from which `tarnn.models` builds. Raises ValueError for values that it refuses."""
        return self.record_class(**{x.name: getattr(self, x.name) for x in fields(self.record_class)})


class TarnnConfig(RecordConfig, record=ModelConfig):
    """The choices that make a `TarnnModel` and what stands on it (`TarnnForCausalLM` …), checked at construction.

    Its keys are those of `tarnn.models.config.ModelConfig`, below, and these:

    initializer_range: the standard deviation of the weights at the start. use_cache: whether the model returns a cache
        when it is not training. bos_token_id, eos_token_id, pad_token_id: as everywhere in transformers.

    An unknown key raises ValueError, which lists the known ones.
    """

    model_type = "tarnn"
    keys_to_ignore_at_inference: ClassVar[list[str]] = [CACHE]

    initializer_range: float = 0.02
    use_cache: bool = True
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
    pad_token_id: int | None = None

    attention_of: ClassVar[Any] = ModelConfig.attention_of
    feature_map_of: ClassVar[Any] = ModelConfig.feature_map_of

    def __post_init__(self, **kwargs):
        self._refuse_unknown(kwargs)
        check_base_keys({**vars(self), **kwargs})
        vars(self).update(vars(self.record()))  # with the defaults filled in
        self._check()
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

    @property
    def layer_types(self) -> list[str]:
        """The kind of cache that each layer needs, as transformers asks for it; not saved."""
        kinds = (self.attention_of(i) for i in range(self.num_hidden_layers))
        convolved = "" if self.conv_kernel is None else "_convolved"
        return [ATTENTIONS.find(kind).kind.layer_type + convolved for kind in kinds]

    def validate(self) -> None:
        """Called by transformers before saving, in place of its own checks, which don't know our layers."""
        self.record()
        self._check()

    def num_parameters_estimate(self) -> int:
        """The numbers that the model's weights and its maps' buffers take, without allocating them."""
        return count_numbers(self.record())

    @classmethod
    def known_keys(cls) -> list[str]:
        """The choices that this class adds to transformers' own."""
        own = {name for c in cls.__mro__ if issubclass(c, TarnnConfig) for name in get_annotations(c)}
        return [field.name for field in fields(cls) if field.name in own]

    def _refuse_unknown(self, kwargs: dict[str, Any]) -> None:
        unknown = sorted(set(kwargs) - TAKEN)
        if unknown:
            close = [
                our_name(x, CONFIG) or next(iter(get_close_matches(x, self.known_keys(), n=1)), "") for x in unknown
            ]
            hint = f" Did you mean {', '.join(filter(None, close))}?" if any(close) else ""
            raise ValueError(
                f"{type(self).__name__} has no {', '.join(map(repr, unknown))}; "
                f"it takes {', '.join(self.known_keys())}.{hint}"
            )
        if (model_type := kwargs.get("model_type", self.model_type)) != self.model_type:
            raise ValueError(f"this is the config of a {model_type!r} model, not of a {self.model_type} model.")

    def _check(self) -> None:
        """Checks the keys that the record lacks, and the whole: what the layers refuse, and sizes that no computer holds."""
        check_number("initializer_range", self.initializer_range, 0, 10)
        for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
            value = getattr(self, name)
            ids = value if isinstance(value, list) and name == "eos_token_id" else [value]
            if not all(x is None or (type(x) is int and 0 <= x < self.vocab_size) for x in ids):
                raise ValueError(
                    f"{name} must be a token's number, from 0 to below vocab_size = {self.vocab_size}, "
                    f"or null; got {value!r}."
                )
        try:
            numbers: float = self.num_parameters_estimate()
        except (RuntimeError, OverflowError):  # sizes beyond 64 bits
            numbers = float("inf")
        if numbers > LARGEST:
            raise ValueError(
                f"these sizes make a model of {numbers:.2g} weights, more than the {LARGEST:.0g} that are taken; make "
                "hidden_size, num_hidden_layers, vocab_size or another of them smaller."
            )


def softmax_twin(config: TarnnConfig) -> Any:
    """The config of the same shape with softmax for every kind of attention; a layer without any stays without."""
    return type(config).from_dict(config.to_dict() | {"attention": softmax_pattern(config.record())})
