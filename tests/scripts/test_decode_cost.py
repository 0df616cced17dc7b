"""The cost of a token is measured where it says, on a state that stays where it is."""

import pytest
import torch
from support.scripts import lines_of

from scripts.common.decode_cost import decode_cost, fastest_decode_cost, rewind, state_at, time_steps
from scripts.common.decode_cost_figure import decode_cost_figure
from tarnn.huggingface.config import softmax_twin
from tarnn.models import TarnnConfig, TarnnForCausalLM
from tarnn.ops import KVCache

SHAPE = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 11}
LINEAR_BYTES, CACHE_BYTES = 2 * 4 * (8 * 8 + 8) * 4, 2 * 2 * 32 * 4  # a sequence; a token


def make(**options):
    torch.manual_seed(0)
    return TarnnForCausalLM(TarnnConfig(**SHAPE, **options)).eval()


@pytest.mark.parametrize("batch_size", [1, 3])
def test_bytes_of_state_are_exact(batch_size):
    linear, softmax = make(), make(attention="softmax")
    for position in (7, 300):
        found = decode_cost(linear, position, batch_size=batch_size, rounds=3, seconds_a_round=0)
        assert found.state_bytes == batch_size * LINEAR_BYTES
        found = decode_cost(softmax, position, batch_size=batch_size, rounds=3, seconds_a_round=0)
        assert found.state_bytes == batch_size * position * CACHE_BYTES
        assert (found.position, found.batch_size, found.rounds) == (position, batch_size, 3)
        assert 0 < found.ms_min <= found.ms <= found.ms_max


@pytest.mark.parametrize("attention", ["linear", "softmax"])
def test_every_round_begins_at_the_position(attention):
    model, seen = make(attention=attention), []

    def step(token, state, inplace):
        seen.append(int(state.position[0]))
        caches = [layer.length for layer in state.layers if isinstance(layer, KVCache)]
        assert caches == [seen[-1]] * len(caches)
        assert token.shape == (2,)
        return model.step(token, state, inplace=inplace)

    decode_cost(model, 50, batch_size=2, rounds=4, seconds_a_round=0, step=step)
    assert seen == [50, 51, 52] * 5  # the warm-up and four rounds


def test_time_is_that_of_the_step(monkeypatch):
    from scripts.common import decode_cost as module

    clock = iter([0.0, 0.030, 1.0, 1.004, 2.0, 2.006, 3.0, 3.040])
    monkeypatch.setattr(module.time, "perf_counter", lambda: next(clock))
    found = decode_cost(make(), 5, rounds=3, seconds_a_round=0.02)  # 10 ms a step at first, so 3 steps a round
    assert (found.ms, found.ms_min, found.ms_max) == pytest.approx((2.0, 4 / 3, 40 / 3))


def test_the_fastest_number_of_threads_is_taken(monkeypatch):
    from scripts.common import decode_cost as module

    before = torch.get_num_threads()
    monkeypatch.setattr(module, "time_steps", lambda *_: {1: 0.004, 2: 0.002, 3: 0.009}[torch.get_num_threads()])
    found = fastest_decode_cost(make(), 5, threads=(1, 2, 3), rounds=5)
    assert (found.threads, found.ms, found.rounds) == (2, 2.0, 5)
    assert torch.get_num_threads() == before


def test_the_state_holds_numbers_that_a_step_can_use():
    for options in ({}, {"attention": "softmax"}, {"feature_map": "exp", "position": "none"}):
        model = make(**options)
        state = state_at(model, 1000, 2, room=5)
        assert state.position.tolist() == [1000, 1000]
        logits, _ = model.step(torch.zeros(2, dtype=torch.long), state)
        assert logits.isfinite().all()


def test_a_rewound_state_costs_and_fits_as_before():
    model = make(attention="softmax")
    state = state_at(model, 20, 1, room=3)
    for _ in range(4):
        time_steps(model.step, torch.zeros(1, dtype=torch.long), state, 20, 3)
    rewind(state, 20)
    assert state.layers[0].length == 20


def test_the_twin_is_the_same_model_with_softmax():
    config = TarnnConfig(
        **SHAPE | {"num_hidden_layers": 4}, attention=["none", "linear"], decay="token", position="none"
    )
    twin = softmax_twin(config)
    assert twin.attention == ["none", "softmax", "none", "softmax"]
    assert (twin.hidden_size, twin.num_hidden_layers, twin.vocab_size) == (32, 4, 11)
    assert config.attention == ["none", "linear"]


def test_the_plot_shows_times_with_their_ranges_and_bytes():
    model = make()
    costs = {"linear": [decode_cost(model, p, rounds=3, seconds_a_round=0) for p in (4, 16)]}
    figure = decode_cost_figure(costs, "a title")
    time, size = figure.axes
    assert lines_of(time) == {"linear": ([4, 16], [p.ms for p in costs["linear"]])}
    assert lines_of(size) == {"linear": ([4, 16], [p.state_bytes for p in costs["linear"]])}
    band = time.collections[0].get_paths()[0].vertices[:, 1]
    assert (band.min(), band.max()) == (min(p.ms_min for p in costs["linear"]), max(p.ms_max for p in costs["linear"]))
    assert (time.get_xscale(), time.get_yscale(), figure.get_suptitle()) == ("log", "log", "a title")
