"""RWKV-7: whole language models in plain torch, made from the weights of a checkpoint."""

from collections.abc import Mapping
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from tarnn.attention.rwkv7 import Rwkv7TimeMixing
from tarnn.attention.token_shift import RwkvState, token_shift
from tarnn.models.inputs import check_inputs, count_tokens, last_tokens
from tarnn.models.state import ModelState
from tarnn.numerics import wide


class Rwkv7ChannelMixing(nn.Module):
    """W₂ relu(W₁ x')², x' a mixture of a token's input and the one before."""

    def __init__(self, hidden_size: int, intermediate_size: int):
        super().__init__()
        self.x_k = nn.Parameter(torch.full((1, 1, hidden_size), 0.5))
        self.key = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.value = nn.Linear(intermediate_size, hidden_size, bias=False)

    def forward(self, x: Tensor, before: Tensor) -> Tensor:
        return self.value(torch.relu(self.key(x + (before - x) * self.x_k)).square())


class RwkvBlock(nn.Module):
    """Time mixing and channel mixing, each f in x + f(norm x); the first block norms the embedding, too."""

    def __init__(self, att: nn.Module, ffn: nn.Module, hidden_size: int, *, is_first: bool):
        super().__init__()
        self.ln0 = nn.LayerNorm(hidden_size) if is_first else None
        self.ln1, self.ln2 = nn.LayerNorm(hidden_size), nn.LayerNorm(hidden_size)
        self.att, self.ffn = att, ffn

    def forward(
        self, x: Tensor, state: RwkvState, first_values: Tensor | None, **options
    ) -> tuple[Tensor, RwkvState, Tensor | None]:
        """Return (x, the state after, the values of the first block). options: those of the time mixing."""
        x = x if self.ln0 is None else self.ln0(x)
        y, S, last, first_values = self.att(self.ln1(x), state.S, state.attention_input, first_values, **options)
        x = x + y
        normed = self.ln2(x)
        before, last_of_mlp = token_shift(normed, state.mlp_input, options.get("key_mask"), options.get("cu_seqlens"))
        return x + self.ffn(normed, before), RwkvState(S, last, last_of_mlp), first_values


class RwkvModel(nn.Module):
    """A language model of RWKV-7, whose parameters have the names of its checkpoints.

    Make it from the tensors of a safetensors file: `RwkvModel.from_weights(tensors)`. It runs like `TextModel`:
    `forward` for logits of all tokens, `prefill` and `step` with a state.
    """

    def __init__(self, blocks: list[RwkvBlock], hidden_size: int, vocab_size: int):
        super().__init__()
        self.emb = nn.Embedding(vocab_size, hidden_size)
        self.blocks: Any = nn.ModuleList(blocks)
        self.ln_out = nn.LayerNorm(hidden_size)
        self.head = nn.Linear(hidden_size, vocab_size, bias=False)

    @classmethod
    def from_weights(cls, weights: Mapping[str, Tensor]) -> "RwkvModel":
        """Make the model of these weights, matrices as (out, in). Raises ValueError for the weights of another model."""
        if "blocks.0.att.time_decay" in weights:
            raise ValueError(
                "these are the weights of RWKV-5 or RWKV-6, but RwkvModel computes RWKV-7. Take a checkpoint of RWKV-7, or run "
                "this one with the package rwkv."
            )
        num_layers = len({name.split(".")[1] for name in weights if name.startswith("blocks.")})
        expected: dict[str, Tensor] = {}
        if "emb.weight" in weights and num_layers:
            vocab_size, hidden_size = weights["emb.weight"].shape
            with torch.device("meta"):
                blocks = [_block(weights, i, hidden_size) for i in range(num_layers)]
                model = cls(blocks, hidden_size, vocab_size)
            expected = model.state_dict()
        others = expected.keys() ^ weights.keys()
        wrong = sorted(others) or [name for name, x in expected.items() if weights[name].shape != x.shape]
        if wrong:
            names = ", ".join(wrong[:5]) + (" …" if len(wrong) > 5 else "")
            raise ValueError(
                f"these are not the weights of an RWKV-7 model: they lack, or have too much or in another shape, "
                f"{names}. Matrices are (out, in), and the six mixtures one tensor, x_rwkvag."
            )
        model.load_state_dict(dict(weights), assign=True)
        return model

    def forward(
        self,
        input_ids: Int[Tensor, "b t"],
        attention_mask: Tensor | None = None,
        cu_seqlens: Int[Tensor, " n_plus_1"] | None = None,
    ) -> Float[Tensor, "b t vocab"]:
        """Logits of each token. attention_mask (b, t): 0 = padding, on either side; cu_seqlens: packed sequences, b = 1."""
        rows = len(input_ids) if cu_seqlens is None else len(cu_seqlens) - 1
        key_mask = None if attention_mask is None else attention_mask.bool()
        x, _ = self._read(input_ids, self.new_state(rows).layers, key_mask=key_mask, cu_seqlens=cu_seqlens)
        return self.head(x)

    @torch.no_grad()
    def prefill(
        self, input_ids: Int[Tensor, "b t"], state: ModelState, attention_mask: Tensor | None = None
    ) -> tuple[Float[Tensor, "b vocab"], ModelState]:
        """Read tokens on top of a state: (logits after each row's last token, float32, the state after them)."""
        check_inputs(input_ids, None, attention_mask)
        key_mask = None if attention_mask is None else attention_mask.bool()
        x, layers = self._read(input_ids, state.layers, key_mask=key_mask)
        seen = count_tokens(input_ids.shape[1], key_mask)
        return self.head(last_tokens(x, key_mask)).float(), ModelState(layers, state.position + seen)

    @torch.no_grad()
    def step(self, token_ids: Int[Tensor, " b"], state: ModelState) -> tuple[Float[Tensor, "b vocab"], ModelState]:
        """Read one token per row: (logits, float32, the state after it)."""
        x, layers = self._read(token_ids[:, None], state.layers, one_token=True)
        return self.head(x[:, 0]).float(), ModelState(layers, state.position + 1)

    def new_state(self, batch_size: int) -> ModelState:
        """Make the state before the first token."""
        weight = self.emb.weight
        last = weight.new_zeros(batch_size, weight.shape[1])
        heads = [x.att.num_heads for x in self.blocks]
        matrices = [last.unflatten(1, (h, -1))[..., None].expand(-1, -1, -1, last.shape[1] // h) for h in heads]
        layers = tuple(RwkvState(S.to(wide(S.dtype)).contiguous(), last, last) for S in matrices)
        return ModelState(layers, torch.zeros(batch_size, dtype=torch.int64, device=weight.device))

    def _read(
        self, input_ids: Tensor, layers: tuple, *, key_mask: Bool[Tensor, "b t"] | None = None, **options
    ) -> tuple[Tensor, tuple]:
        x, first_values, behind = self.emb(input_ids), None, []
        for block, state in zip(self.blocks, layers, strict=True):
            x, state, first_values = block(x, state, first_values, key_mask=key_mask, **options)
            behind.append(state)
        return self.ln_out(x), tuple(behind)


def _block(weights: Mapping[str, Tensor], layer: int, hidden_size: int) -> RwkvBlock:
    """Make a block of the sizes that these weights have."""
    here = {name: x for name, x in weights.items() if name.startswith(f"blocks.{layer}.")}
    size = lambda name: here[f"blocks.{layer}.{name}"].shape[0] if f"blocks.{layer}.{name}" in here else 1  # noqa: E731
    intermediate = size("ffn.key.weight")
    ranks = {name: size(f"att.{name}1") for name in "wagv" if name != "v" or layer > 0}
    time_mixing = Rwkv7TimeMixing(hidden_size, size("att.r_k"), ranks)
    return RwkvBlock(time_mixing, Rwkv7ChannelMixing(hidden_size, intermediate), hidden_size, is_first=layer == 0)
