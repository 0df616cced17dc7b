"""One layer of the backbone: attention and feed-forward, each with a norm and a residual."""

from torch import Tensor, nn
from torch.nn.functional import gelu, silu
from transformers.modeling_layers import GradientCheckpointingLayer

from tarnn.models.choices import make_attention
from tarnn.models.configuration import TarnnConfig


class SwiGlu(nn.Module):
    """W₃ (silu(W₁ x) ⊙ W₂ x) (Shazeer 2020, arXiv 2002.05202)."""

    def __init__(self, config: TarnnConfig):
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=config.bias)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=config.bias)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=config.bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(silu(self.gate_proj(x)) * self.up_proj(x))


class GeluMlp(nn.Module):
    """W₂ gelu(W₁ x)."""

    def __init__(self, config: TarnnConfig):
        super().__init__()
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=config.bias)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=config.bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(gelu(self.up_proj(x)))


def make_norm(config: TarnnConfig) -> nn.Module:
    kind = nn.RMSNorm if config.norm == "rms" else nn.LayerNorm
    return kind(config.hidden_size, eps=config.norm_eps)


class TarnnBlock(GradientCheckpointingLayer):
    """Attention, then feed-forward, each f in x + f(norm x) (pre-norm) or norm(x + f(x)) (post-norm).

    Three ways through it: `forward` with a transformers cache or none, `prefill` with a state, and `step`.
    """

    def __init__(self, config: TarnnConfig, layer: int):
        super().__init__()
        self.pre_norm = config.norm_position == "pre"
        self.attention = make_attention(config, layer)
        self.attention_norm = make_norm(config)
        self.mlp = SwiGlu(config) if config.mlp == "swiglu" else GeluMlp(config)
        self.mlp_norm = make_norm(config)
        self.dropout = nn.Dropout(config.dropout)
        for projection in (self.attention.o_proj, self.mlp.down_proj):
            projection.adds_to_residual = True  # type: ignore[assignment]  # its weights start smaller

    def forward(self, x: Tensor, *, past_key_values=None, cu_seqlens=None, **options) -> Tensor:
        """x (b, t, hidden) → the same. `past_key_values`: this layer's `StateLayer`, read and written (under
        this name, so that gradient checkpointing leaves it out); `cu_seqlens`: of documents in all b·t tokens;
        options as in `MultiHeadAttention`."""
        if cu_seqlens is not None:
            rows = self._before(x).flatten(0, 1)[None]  # (1, b·t, hidden)
            return self._after(x, self.attention(rows, cu_seqlens=cu_seqlens, **options).view_as(x))
        if past_key_values is None:
            return self._after(x, self.attention(self._before(x), **options))
        x, state = self.prefill(x, past_key_values.take(self.attention, x), **options)
        past_key_values.write(state, x.shape[1])
        return x

    def prefill(self, x: Tensor, state, **options):
        """Many tokens on top of a state: (x, the state after them)."""
        y, state = self.attention(self._before(x), state=state, return_state=True, **options)
        return self._after(x, y), state

    def step(self, x: Tensor, state, positions=None) -> Tensor:
        """One token, x (b, 1, hidden) → the same; writes into `state`."""
        y, _ = self.attention.step(self._before(x), state, positions=positions, inplace=True)
        return self._after(x, y)

    def _before(self, x: Tensor) -> Tensor:
        return self.attention_norm(x) if self.pre_norm else x

    def _after(self, x: Tensor, y: Tensor) -> Tensor:
        """All that follows attention's output y."""
        x = x + self.dropout(y)
        if self.pre_norm:
            return x + self.dropout(self.mlp(self.mlp_norm(x)))
        x = self.attention_norm(x)
        return self.mlp_norm(x + self.dropout(self.mlp(x)))
