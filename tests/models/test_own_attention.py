"""An attention of one's own: one class with a name, and configs, models, generation and files know it."""

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from tarnn.attention import names, register
from tarnn.attention.multihead import MultiHeadAttention
from tarnn.attention.registry import ATTENTIONS
from tarnn.models import TarnnConfig, TarnnForCausalLM
from tarnn.ops.state import State


@dataclass(frozen=True, eq=False)
class Sum(State):
    total: Tensor  # (b, hidden)
    count: Tensor  # (b, 1)


class RunningMean(MultiHeadAttention):
    """y_i = W_o gain · mean_{j ≤ i} W_v x_j."""

    def __init__(self, hidden_size: int, num_heads: int, *, causal: bool, gain: float = 1.0):
        super().__init__(hidden_size, num_heads, causal=causal)
        del self.q_proj, self.k_proj
        self.gain = gain

    def forward(
        self, x, *, key_mask=None, cu_seqlens=None, positions=None, state=None, return_state=False, inplace=False
    ):
        state = self.new_state(x.shape[0]) if state is None else state
        seen = x.new_ones(x.shape[:2]) if key_mask is None else key_mask.to(x.dtype)
        total = state.total[:, None] + (self.v_proj(x) * seen[..., None]).cumsum(1)
        count = state.count + seen.cumsum(1)
        y = self.o_proj(self.gain * total / count.clamp(min=1)[..., None])
        if not return_state:
            return y
        if not inplace:
            return y, Sum(total[:, -1], count[:, -1:])
        state.total.copy_(total[:, -1])
        state.count.copy_(count[:, -1:])
        return y, state

    def step(self, x, state, *, positions=None, inplace=False):
        return self(x, state=state, return_state=True, inplace=inplace)

    def new_state(self, batch_size, *, capacity=None, dtype=None, device=None):
        weight = self.v_proj.weight
        return Sum(weight.new_zeros(batch_size, weight.shape[0]), weight.new_zeros(batch_size, 1))


@pytest.fixture
def mean():
    register("test_mean")(RunningMean)
    yield
    del ATTENTIONS["test_mean"]


@pytest.fixture
def model(mean):
    torch.manual_seed(0)
    config = TarnnConfig(
        vocab_size=31,
        hidden_size=16,
        num_hidden_layers=4,
        num_attention_heads=2,
        initializer_range=0.3,
        attention=["test_mean", "linear", "softmax", "test_mean"],
        attention_options={"test_mean": {"gain": 2.0}},
    )
    return TarnnForCausalLM(config).double().eval()


def test_it_is_made_from_a_config(model):
    assert "test_mean" in names()
    layers = [block.attention for block in model.model.layers]
    assert [type(layers[i]) for i in (0, 3)] == [RunningMean, RunningMean]
    assert layers[0].gain == 2.0
    with pytest.raises(ValueError, match="attention 'test_mean' has no option 'gian'; it takes gain"):
        TarnnConfig(attention="test_mean", attention_options={"test_mean": {"gian": 1.0}})


@torch.no_grad()
def test_steps_are_the_model(model):
    ids = torch.randint(31, (2, 7))
    state = model.new_state(2, capacity=7)
    for i in range(7):
        logits, state = model.step(ids[:, i], state)
    torch.testing.assert_close(logits.double(), model(ids).logits[:, -1], rtol=1e-5, atol=1e-6)
    assert {"layers.0.total", "layers.3.count"} <= set(state.tensors())


@pytest.mark.parametrize("num_beams", [1, 3])
def test_generate_with_its_state_as_without(model, num_beams):
    ids = torch.randint(31, (2, 5))
    options = {"max_new_tokens": 8, "do_sample": False, "num_beams": num_beams, "pad_token_id": 0}
    assert torch.equal(model.generate(ids, **options), model.generate(ids, use_cache=False, **options))


def test_a_name_with_a_dot_is_understood_but_not_listed():
    register("test.mean")(RunningMean)
    try:
        config = TarnnConfig(attention="test.mean", attention_options={"test.mean": {"gain": 3.0}})
        assert config.attention_of(0) == "test.mean"
        assert "test.mean" not in names()
    finally:
        del ATTENTIONS["test.mean"]
    with pytest.raises(ValueError, match=r"got 'test.mean'. A package outside tarnn declares the names test\.\*: only"):
        TarnnConfig(attention="test.mean")
