"""Options of the attention layers of a converted model: in its config, and as parameters in the layer itself.

`set_options` gives every attention module of a model a child, `tarnn`: a `LayerAttention` with the layer's feature map and
its λ per head. They are parameters and buffers like any others: trained, moved and saved with the model.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from tarnn.checkpoint_keys import CONVERTED, METHOD
from tarnn.conversion.layer import MODES, Heads, LayerAttention
from tarnn.decoding.live import completing
from tarnn.feature_maps import FeatureMap
from tarnn.feature_maps.by_name import described, make, options_of
from tarnn.removed import message

LINEAR, HYBRID = "tarnn_linear", "tarnn_hybrid"
KEY = CONVERTED  # of a model's config: the options of all layers, and under "layers" those of single ones
CHILD = "tarnn"  # of an attention module


class AttentionOptions(NamedTuple):
    """Options of one layer.

    window: keys at a distance of less than this are exact. sinks: number of first keys kept exact. slots: number of keys
        kept exact among those that have left the window: those that the features approximate worst.
    feature_map: estimates all others: a name, {"name": …, and its options}, or a map with a name, such as a trained one
        for all of the layer's key/value heads; None: they have no weight.
    mode: for all key/value heads, or a list with one for each: "features"; "window": window, sinks and slots alone; "exact":
        softmax over all keys, which are all kept with their values.
    far_until: queries from this position of their sequence on (from 0) have no estimated keys: `convert` sets the length
        that it calibrated on, since beyond it features do harm. Not causal: no query of a longer text has any. None: all do.
    far_bias: λ, added to the log-weights of estimated keys: a number, or one for each query head. It is a parameter of
        the layer, so it is saved with the weights, not in config.json.
    """

    window: int = 256
    sinks: int = 4
    slots: int = 0
    feature_map: str | Mapping[str, Any] | FeatureMap | None = "favor"
    mode: str | Sequence[str] = "features"
    far_bias: float | Sequence[float] | Tensor = 0.0
    far_until: int | None = None


LEAST = {"window": 1, "sinks": 0, "slots": 0, "far_until": 0}
STORED_TYPES: dict[str, Any] = {  # in a config.json, of options that are no whole numbers
    "feature_map": str | Mapping | None,
    "mode": str | list | None,
    "far_bias": int | float | None,
}
DEFAULTS = {HYBRID: AttentionOptions(), LINEAR: AttentionOptions(window=1, sinks=0)}


_told: list[Callable[[nn.Module], None]] = []


def tell(listener: Callable[[nn.Module], None]) -> None:
    """Call it with each model that gets options from now on."""
    _told.append(listener)


def attention_layers(model: nn.Module) -> list[nn.Module]:
    """The modules of a model of transformers that call an attention function, in the order of `model.modules()`.

    In a decoder or an encoder this is one per layer. Cross-attention counts too, though it stays as it is.
    """
    return [x for x in model.modules() if hasattr(x, "is_causal")]


def child_of(module: nn.Module) -> LayerAttention | None:
    """Return the child that `set_options` gave an attention module, if any."""
    return cast("LayerAttention | None", module._modules.get(CHILD))


def converted_layers(model: nn.Module) -> dict[int, LayerAttention]:
    """Return the children that `set_options` gave the attention modules, by layer number."""
    children = enumerate(map(child_of, attention_layers(model)))
    return {i: child for i, child in children if child is not None}


def set_options(model: nn.Module, *, layers: int | Iterable[int] | None = None, **options: Any) -> None:
    """Set `AttentionOptions` of some layers, or of all; `save_pretrained` saves them with the model.

    layers: numbers in `attention_layers(model)`; None: all. Options that are not named stay as they are, learned parameters
    too. Once `tarnn` is imported, `from_pretrained` loads such a model with this attention.

    Raises ValueError for an unknown option or layer, and for a map that does not fit the layer's heads.
    """
    _check_names("tarnn's attention", options)
    config: Any = model.config
    modules, options = attention_layers(model), dict(options)
    chosen = list(range(len(modules)) if layers is None else [layers] if isinstance(layers, int) else layers)
    if wrong := [i for i in chosen if not 0 <= i < len(modules)]:
        raise ValueError(f"this model has attention layers 0 to {len(modules) - 1}; got layer {wrong[0]}.")
    bias, phi = options.pop("far_bias", None), options.get("feature_map")
    source = phi if isinstance(phi, FeatureMap) else None
    if source is not None:
        name, map_options, _ = described(source)
        options["feature_map"] = {"name": name, **map_options}
    stored = with_options(getattr(config, KEY, None) or {}, options, None if layers is None else chosen)
    device, children = next(model.parameters()).device, dict[int, LayerAttention]()
    for i, module in enumerate(modules):
        before, is_chosen = child_of(module), i in chosen
        if is_chosen or before is None:
            child = layer_attention(options_in(stored, i), heads_of(module), source if is_chosen else None, before)
            if is_chosen and bias is not None:
                child.set_bias(bias)
            children[i] = child.to(device).train(module.training)
    for i, child in children.items():  # all or none
        setattr(modules[i], CHILD, child)
    setattr(config, KEY, stored)
    name = config._attn_implementation
    config.quantization_config = {"quant_method": METHOD, "attention": name if name in DEFAULTS else HYBRID}
    for listener in _told:
        listener(model)


def with_options(stored: Mapping, options: Mapping, layers: Iterable[int] | None) -> dict[str, Any]:
    """`stored` with more options: for these layers, or for all, which replaces what single ones had."""
    common = {key: value for key, value in stored.items() if key != "layers"}
    single = {key: dict(value) for key, value in stored.get("layers", {}).items()}
    if layers is None:
        common |= options
        single = {i: {x: y for x, y in own.items() if x not in options} for i, own in single.items()}
    for i in layers or ():
        single[str(i)] = single.get(str(i), {}) | dict(options)
    single = {i: own for i, own in single.items() if own}
    return common | ({"layers": single} if single else {})


def options_in(stored: Mapping, layer: int) -> dict[str, Any]:
    """Return the options of one layer from the config."""
    common = {key: value for key, value in stored.items() if key != "layers"}
    return common | stored.get("layers", {}).get(str(layer), {})


def check_stored(stored: Any, num_layers: int) -> None:
    """ValueError for options that a config.json can hold and no layer can have: another type, or out of range."""
    if not isinstance(stored, Mapping) or not isinstance(stored.get("layers", {}), Mapping):
        raise ValueError(f"{KEY} must be an object, and its layers too; got {stored!r:.80}.")
    single = stored.get("layers", {})
    if wrong := [i for i in single if not (str(i).isdecimal() and int(i) < num_layers)]:
        raise ValueError(f"{KEY}: this model has attention layers 0 to {num_layers - 1}; got layer {wrong[0]!r:.40}.")
    for options in ({k: v for k, v in stored.items() if k != "layers"}, *single.values()):
        if not isinstance(options, Mapping):
            raise ValueError(f"{KEY}: the options of a layer are an object; got {options!r:.80}.")
        _check_names(KEY, options)
        for name, value in options.items():
            if name in LEAST and not (name == "far_until" and value is None):
                check_whole_number(f"{KEY}: {name}", value, LEAST[name], 2**31)
            elif name in STORED_TYPES and not isinstance(value, STORED_TYPES[name]):
                raise ValueError(f"{KEY}: {name} has the wrong type; got {value!r:.60}.")


def _check_names(owner: str, options: Mapping[str, Any]) -> None:
    """Raise ValueError for options that there are not."""
    if unknown := sorted(set(options) - set(AttentionOptions._fields)):
        gone = "".join(f" {message(f'set_options({name}=)')}" for name in unknown)
        raise ValueError(
            f"{owner} has no option {', '.join(unknown)}; it takes {', '.join(AttentionOptions._fields)}.{gone}".rstrip()
        )


def check_whole_number(name: str, value: Any, least: int, below: float = math.inf) -> None:
    """Raise ValueError for anything but a whole number within these bounds."""
    if type(value) is not int or not least <= value < below:
        raise ValueError(f"{name} must be a whole number, {least} or more; got {value!r:.60}.")


def attach(model: nn.Module) -> None:
    """Give each attention layer what the model's config says, with parameters as they are before any training.

    Raises ValueError for options that it can't have.
    """
    add_layers(model)
    for listener in _told:
        listener(model)


def add_layers(model: Any) -> None:
    """Do what `attach` does, and tell nobody."""
    stored, modules = getattr(model.config, KEY, None) or {}, attention_layers(model)
    check_stored(stored, len(modules))
    for i, module in enumerate(modules):
        setattr(module, CHILD, layer_attention(options_in(stored, i), heads_of(module), None, None))


completing.append(add_layers)


def heads_of(module: nn.Module) -> Heads:
    """The heads of an attention module of transformers, from its config."""
    config: Any = module.config
    h = config.num_attention_heads
    g = getattr(config, "num_key_value_heads", None) or h
    d = getattr(module, "head_dim", None) or getattr(module, "attention_head_size", None)
    return Heads(h, g, d or config.hidden_size // h)


def layer_attention(
    options: Mapping[str, Any], heads: Heads, source: FeatureMap | None, before: LayerAttention | None
) -> LayerAttention:
    """The layer that these options describe.

    Its map has the parameters of `source` if given, else those of the layer `before` if that had the same map.
    """
    wanted = AttentionOptions()._replace(**options)
    modes = [wanted.mode] * heads.g if isinstance(wanted.mode, str) else list(wanted.mode)
    if len(modes) != heads.g or set(modes) - set(MODES):
        raise ValueError(
            f"mode is {', '.join(MODES)}, or a list with one for each of a layer's {heads.g} key/value heads; got "
            f"{wanted.mode!r}."
        )
    layer = LayerAttention(heads, modes, options)
    estimated = layer.heads_with("features")
    if estimated and isinstance(wanted.feature_map, str | Mapping):
        layer.feature_map = build_map(wanted.feature_map, heads.d, len(estimated))
    if source is not None:
        copy_heads(layer.feature_map, source, list(range(heads.g)), estimated)
    if before is not None:
        layer.far_bias.data.copy_(before.far_bias.detach())
        same = before.options.get("feature_map", "favor") == wanted.feature_map
        if source is None and same and before.feature_map is not None:
            copy_heads(layer.feature_map, before.feature_map, before.heads_with("features"), estimated)
    return layer


def build_map(description: str | Mapping[str, Any], head_dim: int, num_heads: int) -> FeatureMap:
    """Build a map from its description; random features are drawn from seed 0 unless that names another."""
    options = {"name": description} if isinstance(description, str) else dict(description)
    name = options.pop("name")
    seed = {"seed": 0} if "seed" in options_of(name) else {}
    feature_map = make(name, head_dim=head_dim, num_heads=num_heads, **seed | options)
    feature_map.check_positive(head_dim)
    return feature_map


@torch.no_grad()
def copy_heads(target: FeatureMap | None, source: FeatureMap, heads: list[int], wanted: list[int]) -> None:
    """Copy the parameters and buffers of `source`, a map for these key/value heads, for the wanted ones.

    Copies nothing unless `source` has all of them. Tensors with an axis of heads have it first.
    """
    if target is None or not set(wanted) <= set(heads):
        return
    theirs = source.state_dict()
    for name, x in target.state_dict().items():
        y = theirs[name].to(x.device)
        if y.shape[1:] != x.shape[1:]:
            raise ValueError(
                f"this {source._get_name()} was made for heads of another width: its {name} is {tuple(y.shape)}, and "
                f"this layer needs {tuple(x.shape)}."
            )
        if x.shape != y.shape and len(y) > 1:
            y = y[[heads.index(i) for i in wanted]]
        x.copy_(y)
