"""A trained model of ours as an export reads it: its checked config and its tensors, under our names."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tarnn.errors import UserError
from tarnn.families.config import FILE, Config
from tarnn.families.own.text import checked
from tarnn.families.weights import Weights
from tarnn.json_file import read_json
from tarnn.models.config import ModelConfig

OWN = "tarnn"
ADDS = ("attention.o_proj", "attention.mixing.output", "mlp.down_proj")  # to the residual stream
COUNTER = {"num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 64}  # sizes of softmax that adds nothing
TOKENS, HEAD, NORM = "model.embed_tokens.weight", "lm_head.weight", "model.norm"


@dataclass(frozen=True)
class OwnModel:
    """A model of text. tensors: in float64, by our names; fields: config.json as it stands."""

    place: str
    record: ModelConfig
    tensors: Mapping[str, Tensor]
    fields: Mapping[str, Any]

    @classmethod
    def read(cls, folder: Path) -> "OwnModel":
        """Read a folder. Raises UserError for a model that is not tarnn's own, and for one that is no language model."""
        config = Config.read(folder)
        if config.model_type != OWN:
            raise UserError(
                f"{folder} holds a model of type {config.model_type!r:.60}; expected a language model that `tarnn train` made "
                f"(type {OWN!r}). Folders of other families are in their own layout already."
            )
        record, weights = checked(config, ModelConfig, "TarnnForCausalLM"), Weights.read(folder)
        tensors = {name: weights[name].double() for name in weights}
        weights.check_finite()
        return cls(str(folder), record, tensors, read_json(folder / FILE))

    @property
    def kinds(self) -> list[str]:
        """The kind of attention of each layer."""
        return [self.record.attention_of(i) for i in range(self.record.num_hidden_layers)]

    @property
    def head(self) -> Tensor:
        """The output layer's weights, also where the embeddings are tied to it."""
        return self.tensors[TOKENS if self.record.tie_word_embeddings else HEAD]

    def options(self, kind: str) -> dict[str, Any]:
        """Return the options of a kind of attention."""
        return self.record.attention_options.get(kind, {})

    def layer(self, i: int) -> dict[str, Tensor]:
        """Return the tensors of a layer, by the rest of their names."""
        start = f"model.layers.{i}."
        return {name.removeprefix(start): x for name, x in self.tensors.items() if name.startswith(start)}

    def ends(self) -> dict[str, Any]:
        """Return the ids that begin, end and fill a text, null where there are none."""
        return {key: self.fields.get(key) for key in ("bos_token_id", "eos_token_id", "pad_token_id")}

    def check(self, layout: str, kinds: Iterable[str], **expected: Any) -> None:
        """Raise UserError that names every choice of the model that a layout lacks. expected: what it has, one or a tuple."""
        lacking = [
            f"attention = {kind!r} (it has {', '.join(kinds)})"
            for kind in dict.fromkeys(self.kinds)
            if kind not in kinds
        ]
        for key, value in {"norm_position": "pre", "reversible": False, "conv_kernel": None, **expected}.items():
            allowed = value if isinstance(value, tuple) else (value,)
            if getattr(self.record, key) not in allowed:
                lacking.append(f"{key} = {getattr(self.record, key)!r} (it has {' or '.join(map(repr, allowed))})")
        if lacking:
            raise UserError(f"{self.place}: the layout of {layout} lacks {'; '.join(lacking)}.")

    def with_norm_eps(self, eps: float) -> "OwnModel":
        """Return a model of the same outputs whose norms of all channels add `eps` to the mean square.

        norm(c x) with c² eps is norm(x) with eps: what is added to the residual stream is multiplied with c, and the last norm
        makes up for it where the embeddings are the output layer too.
        """
        c = (eps / self.record.norm_eps) ** 0.5
        if c == 1:
            return self
        layers = [f"model.layers.{i}.{name}" for i in range(self.record.num_hidden_layers) for name in ADDS]
        grown = {TOKENS, *(f"{name}.{x}" for name in layers for x in ("weight", "bias"))}
        shrunk = {f"{NORM}.{x}" for x in ("weight", "bias")} if self.record.tie_word_embeddings else set()
        factors = {name: c if name in grown else 1 / c if name in shrunk else 1.0 for name in self.tensors}
        tensors = {name: x * factors[name] for name, x in self.tensors.items()}
        return replace(self, tensors=tensors, record=replace(self.record, norm_eps=eps))


def wide_enough(filters: Tensor) -> Tensor:
    """Return filters (c, w) as a Conv1d has them, (c, 1, w), of width 2 at least: a tap of zero changes nothing."""
    return torch.nn.functional.pad(filters, (max(0, 2 - filters.shape[1]), 0))[:, None]


def counting_layer(model: OwnModel, double_queries: bool = False) -> dict[str, Tensor]:
    """Return the tensors of a layer with softmax that adds nothing, with Llama's names; sizes as in `COUNTER`."""
    hidden, inner, d = model.record.hidden_size, model.record.intermediate_size, COUNTER["head_dim"]
    shapes = {"self_attn.q_proj": (2 * d if double_queries else d, hidden), "self_attn.o_proj": (hidden, d)}
    shapes |= {f"self_attn.{name}_proj": (d, hidden) for name in "kv"}
    shapes |= {f"mlp.{name}_proj": (inner, hidden) for name in ("gate", "up")} | {"mlp.down_proj": (hidden, inner)}
    norms = dict.fromkeys(("input_layernorm", "post_attention_layernorm"), (hidden,))
    biased = [name for name in shapes if name.startswith("mlp.") and model.record.bias]
    named = {f"{name}.weight": shape for name, shape in {**shapes, **norms}.items()}
    named |= {f"{name}.bias": shapes[name][:1] for name in biased}
    return {name: torch.zeros(shape) for name, shape in named.items()}


def as_json(fields: Mapping[str, Any]) -> str:
    """Return a config as a file has it."""
    return json.dumps(fields, indent=2) + "\n"
