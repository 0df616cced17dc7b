"""What each attention layer of a converted model computes: options in its config, parameters in the layer itself.

`set_options` gives every attention module of a model a child, `tarnn`: a `LayerAttention` with the layer's feature map and
its λ per head. They are parameters and buffers like any others: trained, moved and saved with the model.
"""

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import nn

from tarnn.auto_classes import CONVERTED, METHOD
from tarnn.conversion.layer import MODES, Heads, LayerAttention
from tarnn.feature_maps import FeatureMap
from tarnn.feature_maps.by_name import described, make, options_of

LINEAR, HYBRID = "tarnn_linear", "tarnn_hybrid"
KEY = CONVERTED  # of a model's config: the options of all layers, and under "layers" those of single ones
CHILD = "tarnn"  # of an attention module


class AttentionOptions(NamedTuple):
    """What one layer is to compute.

    window: keys at a distance of less than this are exact. sinks: so are the first so many. slots: so are, of the keys that
        have left the window, so many that features represent worst.
    feature_map: estimates all others: a name, {"name": …, and its options}, or a map with a name, such as a trained one
        for all of the layer's key/value heads; None: they are not seen.
    mode: for all key/value heads, or a list with one for each: "features"; "window": window, sinks and slots alone; "exact":
        softmax over everything, whose keys and values are all kept.
    far_until: queries at this place of their sequence (from 0) and beyond see no estimated keys: `convert` sets the length
        that it calibrated on, since beyond it features do harm. Not causal: no query of a longer text does. None: all do.
    far_bias: λ, added to the log-weights of estimated keys: a number, or one for each query head. It is a parameter of
        the layer, so it is saved with the weights, not in config.json.
    """

    window: int = 256
    sinks: int = 4
    slots: int = 0
    feature_map: Any = "favor"
    mode: Any = "features"
    far_bias: Any = 0.0
    far_until: int | None = None


DEFAULTS = {HYBRID: AttentionOptions(), LINEAR: AttentionOptions(window=1, sinks=0)}


def attention_layers(model: nn.Module) -> list[nn.Module]:
    """The modules of a model of transformers that call an attention function, in the order of `model.modules()`.

    In a decoder or an encoder this is one per layer. Cross-attention counts too, though it stays as it is.
    """
    return [x for x in model.modules() if hasattr(x, "is_causal")]


def child_of(module: nn.Module) -> LayerAttention | None:
    """What `set_options` gave an attention module."""
    child: Any = module._modules.get(CHILD)
    return child


def set_options(model: nn.Module, *, layers: int | Iterable[int] | None = None, **options: Any) -> None:
    """Sets `AttentionOptions` of some layers, or of all; `save_pretrained` saves them with the model.

    layers: numbers in `attention_layers(model)`; None: all. What is not named stays as it is, learned parameters too.
    Where `tarnn` is imported, `from_pretrained` loads such a model with this attention.

    Raises ValueError for an unknown option or layer, and for a map that does not fit the layer's heads.
    """
    if unknown := sorted(set(options) - set(AttentionOptions._fields)):
        raise ValueError(
            f"tarnn's attention has no option {', '.join(unknown)}; it takes {', '.join(AttentionOptions._fields)}."
        )
    config: Any = model.config
    found, given = attention_layers(model), dict(options)
    chosen = list(range(len(found)) if layers is None else [layers] if isinstance(layers, int) else layers)
    if wrong := [i for i in chosen if not 0 <= i < len(found)]:
        raise ValueError(f"this model has attention layers 0 to {len(found) - 1}; got layer {wrong[0]}.")
    bias, phi = given.pop("far_bias", None), given.get("feature_map")
    own = phi if isinstance(phi, FeatureMap) else None
    if own is not None:
        name, its_options, _ = described(own)
        given["feature_map"] = {"name": name, **its_options}
    stored = with_options(getattr(config, KEY, None) or {}, given, None if layers is None else chosen)
    device, made = next(model.parameters()).device, list[tuple[nn.Module, LayerAttention]]()
    for i, module in enumerate(found):
        before, here = child_of(module), i in chosen
        if here or before is None:
            layer = layer_attention(options_in(stored, i), heads_of(module), own if here else None, before)
            if here and bias is not None:
                layer.set_bias(bias)
            made.append((module, layer.to(device)))
    for module, layer in made:  # all or none
        setattr(module, CHILD, layer)
    setattr(config, KEY, stored)
    name = config._attn_implementation
    config.quantization_config = {"quant_method": METHOD, "attention": name if name in DEFAULTS else HYBRID}


def with_options(stored: Mapping, options: Mapping, layers: Iterable[int] | None) -> dict[str, Any]:
    """`stored` with more options: for these layers, or for all, which overrules what single ones had."""
    common = {key: value for key, value in stored.items() if key != "layers"}
    single = {key: dict(value) for key, value in stored.get("layers", {}).items()}
    if layers is None:
        common |= options
        single = {i: {x: y for x, y in given.items() if x not in options} for i, given in single.items()}
    for i in layers or ():
        single[str(i)] = single.get(str(i), {}) | dict(options)
    single = {i: given for i, given in single.items() if given}
    return common | ({"layers": single} if single else {})


def options_in(stored: Mapping, layer: int) -> dict[str, Any]:
    """What the config says of one layer."""
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
        if unknown := sorted(set(options) - set(AttentionOptions._fields)):
            raise ValueError(f"{KEY} has no option {', '.join(unknown)}; it has {', '.join(AttentionOptions._fields)}.")
        for name, least in (("window", 1), ("sinks", 0), ("slots", 0)):
            value = options.get(name, least)
            if type(value) is not int or not least <= value < 2**31:
                raise ValueError(f"{KEY}: {name} must be a whole number of {least} or more; got {value!r:.60}.")
        until = options.get("far_until")
        if not (until is None or (type(until) is int and until >= 0)):
            raise ValueError(f"{KEY}: far_until must be a whole number of 0 or more; got {until!r:.60}.")
        phi, mode, bias = (options.get(name) for name in ("feature_map", "mode", "far_bias"))
        if not (phi is None or isinstance(phi, str) or (isinstance(phi, Mapping) and isinstance(phi.get("name"), str))):
            raise ValueError(f"{KEY}: feature_map must be a name or {{'name': …, options}}; got {phi!r:.60}.")
        if not (
            mode is None or isinstance(mode, str) or (isinstance(mode, list) and all(isinstance(x, str) for x in mode))
        ):
            raise ValueError(f"{KEY}: mode must be a name or a list of names; got {mode!r:.60}.")
        if not (bias is None or isinstance(bias, int | float)):
            raise ValueError(f"{KEY}: far_bias must be a number; got {bias!r:.60}.")


def attach(model: nn.Module) -> None:
    """Gives each attention layer what the model's config says; its parameters are as they start.

    Raises ValueError for options that it can't have.
    """
    stored = getattr(model.config, KEY, None) or {}
    check_stored(stored, len(attention_layers(model)))
    for i, module in enumerate(attention_layers(model)):
        setattr(module, CHILD, layer_attention(options_in(stored, i), heads_of(module), None, None))


def heads_of(module: nn.Module) -> Heads:
    """Of an attention module of transformers, from its config."""
    config: Any = module.config
    h = config.num_attention_heads
    g = getattr(config, "num_key_value_heads", None) or h
    d = getattr(module, "head_dim", None) or getattr(module, "attention_head_size", None)
    return Heads(h, g, d or config.hidden_size // h)


def layer_attention(
    options: Mapping[str, Any], heads: Heads, own: FeatureMap | None, before: LayerAttention | None
) -> LayerAttention:
    """The layer that these options describe, with the parameters of `own` if given, else with those of the one before
    where it had the same map."""
    asked = AttentionOptions()._replace(**options)
    modes = [asked.mode] * heads.g if isinstance(asked.mode, str) else list(asked.mode)
    if len(modes) != heads.g or set(modes) - set(MODES):
        raise ValueError(
            f"mode is {', '.join(MODES)}, or a list with one for each of a layer's {heads.g} key/value heads; got "
            f"{asked.mode!r}."
        )
    layer = LayerAttention(heads, modes, options)
    estimated = layer.places("features")
    if estimated and asked.feature_map is not None:
        layer.feature_map = made_map(asked.feature_map, heads.d, len(estimated))
    if own is not None:
        take_over(layer.feature_map, own, list(range(heads.g)), estimated)
    if before is not None:
        layer.far_bias.data.copy_(before.far_bias.detach())
        same = before.options.get("feature_map", "favor") == asked.feature_map
        if own is None and same and before.feature_map is not None:
            take_over(layer.feature_map, before.feature_map, before.places("features"), estimated)
    return layer


def made_map(given: str | Mapping[str, Any], head_dim: int, num_heads: int) -> FeatureMap:
    """A map from its description; random features are drawn from seed 0 unless that says another."""
    options = {"name": given} if isinstance(given, str) else dict(given)
    name = options.pop("name")
    seed = {"seed": 0} if "seed" in options_of(name) else {}
    made = make(name, head_dim=head_dim, num_heads=num_heads, **seed | options)
    made.check_positive(head_dim)
    return made


@torch.no_grad()
def take_over(to: FeatureMap | None, source: FeatureMap, heads: list[int], wanted: list[int]) -> None:
    """The parameters and buffers of `source`, a map for these key/value heads, for those that are wanted.

    Nothing where it is not for all of them. Tensors with an axis of heads have it first.
    """
    if to is None or not set(wanted) <= set(heads):
        return
    theirs = source.state_dict()
    for name, x in to.state_dict().items():
        y = theirs[name].to(x.device)
        if y.shape[1:] != x.shape[1:]:
            raise ValueError(
                f"this {source._get_name()} was made for heads of another width: its {name} is {tuple(y.shape)}, and "
                f"this layer needs {tuple(x.shape)}."
            )
        if x.shape != y.shape and len(y) > 1:
            y = y[[heads.index(i) for i in wanted]]
        x.copy_(y)
