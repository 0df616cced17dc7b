"""The cost of a token is measured where it says, on a state that stays where it is."""

import pytest
import torch

from scripts.common import decode_cost as module
from scripts.common.decode_cost import decode_cost, fastest_decode_cost, rewind, state_at, time_steps
from tarnn.models import TarnnConfig, TarnnForCausalLM
from tarnn.ops import KVCache

SHAPE = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 11}
LINEAR_BYTES, CACHE_BYTES = 2 * 4 * (8 * 8 + 8) * 4, 2 * 2 * 32 * 4  # a sequence; a token


def make(**options):
    torch.manual_seed(0)
    return TarnnForCausalLM(TarnnConfig(**SHAPE, **options)).eval()


@pytest.mark.parametrize("batch_size", [1, 3])
def test_bytes_of_state_are_exact(batch_size):
    for position in (7, 300):
        for options, expected in (({}, LINEAR_BYTES), ({"attention": "softmax"}, position * CACHE_BYTES)):
            found = decode_cost(make(**options), position, batch_size=batch_size, rounds=3, seconds_a_round=0)
            assert found.state_bytes == batch_size * expected
            assert (found.position, found.batch_size, found.rounds) == (position, batch_size, 3)
            assert 0 < found.ms_min <= found.ms <= found.ms_max


@pytest.mark.parametrize("attention", ["linear", "softmax"])
def test_every_round_begins_at_the_position(attention):
    model, seen = make(attention=attention), []

    def step(token, state, inplace):
        seen.append(int(state.position[0]))
        caches = [layer.length for layer in state.layers if isinstance(layer, KVCache)]
        assert caches == [seen[-1]] * len(caches)
        return model.step(token, state, inplace=inplace)

    decode_cost(model, 50, batch_size=2, rounds=4, seconds_a_round=0, step=step)
    assert seen == [50, 51, 52] * 5  # the warm-up and four rounds
    state = state_at(model, 20, 1, room=3)
    for _ in range(4):
        time_steps(model.step, torch.zeros(1, dtype=torch.long), state, 20, 3)
    rewind(state, 20)
    assert int(state.position[0]) == 20


def test_time_is_that_of_the_step(monkeypatch):
    clock = iter([0.0, 0.030, 1.0, 1.004, 2.0, 2.006, 3.0, 3.040])
    monkeypatch.setattr(module.time, "perf_counter", lambda: next(clock))
    found = decode_cost(make(), 5, rounds=3, seconds_a_round=0.02)  # 10 ms a step at first, so 3 steps a round
    assert (found.ms, found.ms_min, found.ms_max) == pytest.approx((2.0, 4 / 3, 40 / 3))


def test_the_fastest_number_of_threads_is_taken(monkeypatch):
    before = torch.get_num_threads()
    monkeypatch.setattr(module, "time_steps", lambda *_: {1: 0.004, 2: 0.002, 3: 0.009}[torch.get_num_threads()])
    found = fastest_decode_cost(make(), 5, threads=(1, 2, 3), rounds=5)
    assert (found.threads, found.ms, found.rounds) == (2, 2.0, 5)
    assert torch.get_num_threads() == before
