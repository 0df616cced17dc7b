"""What one more token costs at a given position: time, and bytes of state. Linear or softmax, the same model.

The position is not reached by generating: the state is put there. Of a linear model all of the state, of a
softmax model the cache up to that position is filled at random; the arithmetic is then what it would be after
so many tokens, without the hours.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from tarnn.models.backbone import TextModel
from tarnn.models.state import ModelState

ROUNDS, SECONDS_A_ROUND, WARM_UP, MOST_STEPS = 7, 0.25, 3, 128
Step = Callable[..., tuple[Tensor, ModelState]]


@dataclass(frozen=True)
class DecodeCost:
    """Milliseconds per step of the whole batch (median of the rounds, their range), and bytes of state."""

    position: int
    batch_size: int
    ms: float
    ms_min: float
    ms_max: float
    rounds: int
    state_bytes: int
    threads: int


@torch.no_grad()
def decode_cost(
    model: TextModel,
    position: int,
    *,
    batch_size: int = 1,
    rounds: int = ROUNDS,
    seconds_a_round: float = SECONDS_A_ROUND,
    step: Step | None = None,
    cache_dtype: torch.dtype | None = None,
) -> DecodeCost:
    """Measures `model.step` (or `step`, a faster form of it) with `position` tokens behind it, caches in `cache_dtype`.

    Each round runs as many steps as take about `seconds_a_round` (at least 3, at most 128), and is worth its
    mean; the same few positions are written again each round, so that a cache need not grow for the sake of
    the measurement. A warm-up decides how many steps a round has. Bytes are those of the position: of a
    cache, the part that is filled, though all of it has to be allocated beforehand.
    """
    step = model.step if step is None else step
    state = state_at(model, position, batch_size, room=MOST_STEPS, cache_dtype=cache_dtype)
    state_bytes = used_bytes(state)
    token = torch.zeros(batch_size, dtype=torch.long, device=state.position.device)
    warm_up = time_steps(step, token, state, position, WARM_UP)
    steps = int(min(MOST_STEPS, max(3, seconds_a_round / warm_up)))
    times = [1000 * time_steps(step, token, state, position, steps) for _ in range(rounds)]
    ms = statistics.median(times)
    threads = torch.get_num_threads()
    return DecodeCost(position, batch_size, ms, min(times), max(times), rounds, state_bytes, threads)


def fastest_decode_cost(model: TextModel, position: int, *, threads: Sequence[int] = (), **options: Any) -> DecodeCost:
    """`decode_cost` with each number of threads (by default one, and torch's own), the fastest of them.

    A short cache is read faster by one thread, a long one by all, and each kind of attention gets its best.
    """
    before = torch.get_num_threads()
    costs = []
    try:
        for number in threads or sorted({1, before}):
            torch.set_num_threads(number)
            costs.append(decode_cost(model, position, **options))
    finally:
        torch.set_num_threads(before)
    return min(costs, key=lambda cost: cost.ms)


def state_at(
    model: TextModel, position: int, batch_size: int, *, room: int, cache_dtype: torch.dtype | None = None
) -> ModelState:
    """A state as large as after `position` tokens, with random numbers in it, and room for some more.

    Keys, values and the sums of linear attention are normal numbers of the size that they have in a model (a
    sum over `position` keys); the normaliser's are positive, as sums of positive features are.
    """
    state = rewind(model.new_state(batch_size, capacity=position + room, cache_dtype=cache_dtype), position)
    fill = {
        "k": Tensor.normal_,
        "v": Tensor.normal_,
        "S": lambda x: x.normal_(std=position**0.5),
        "z": lambda x: x.uniform_(0.5 * position, 1.5 * position),
        "M": Tensor.zero_,
    }
    for layer in state.layers:
        for name, x in layer.tensors().items():
            fill[name](x)
    return state


def rewind(state: ModelState, position: int) -> ModelState:
    """The state at that position, in the same memory: the next step writes there."""
    state.position.fill_(position)
    return pytree.tree_map_only(int, lambda length: position, state)  # a cache's length is its only number


def time_steps(step: Step, token: Tensor, state: ModelState, position: int, steps: int) -> float:
    """Seconds per step, in place, mean over `steps` steps from `position` on."""
    state = rewind(state, position)
    wait_for(token.device)
    start = time.perf_counter()
    for _ in range(steps):
        _, state = step(token, state, inplace=True)
    wait_for(token.device)
    return (time.perf_counter() - start) / steps


def wait_for(device: torch.device) -> None:
    """Until the device has done what it was given: a GPU's clock is not ours."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def used_bytes(state: ModelState) -> int:
    """Bytes of state that hold something: all of a LinearState, the filled part of a cache."""
    return sum(x.nbytes for layer in state.layers for x in layer.tensors().values())
