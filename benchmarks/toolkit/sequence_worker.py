"""One of the processes that share sequences, for `sequence_parallel.py`; the first one prints what they measure, as JSON.

    python benchmarks/toolkit/sequence_worker.py RANK PROCESSES STORE '{"lengths": [2048], "rounds": 5, "messages": [65536]}'

STORE: a file that is not there yet, by which they find each other. One thread each.
"""

import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[2]))
from scripts.common.memory import peak_bytes
from tarnn import linear_attention, parallel

HEADS, HEAD_DIM = 8, 32
Call = Callable[[], Any]


def main() -> None:
    rank, processes, store, settings = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], json.loads(sys.argv[4])
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(store, processes), rank=rank, world_size=processes)
    whole, expected = by_one()
    with parallel.sequence() as ranks:
        found: dict[str, Any] = {"error": error(whole, expected), "attention": {}}
        for length in settings["lengths"]:
            found["attention"][length] = measured(attention_call(length), settings["rounds"], ranks)
    found["messages"] = (
        {n: message_seconds(n, settings["rounds"]) for n in settings["messages"]} if processes > 1 else {}
    )
    if rank == 0:
        print(json.dumps(found))
    dist.barrier()  # one that is gone early may end the others in gloo
    dist.destroy_process_group()


def draw(length: int) -> list[Tensor]:
    """q, k, v (1, h, t, d) and log-decays (1, h, t) of a whole sequence, the same in every process."""
    torch.manual_seed(0)
    shape = (1, HEADS, length, HEAD_DIM)
    return [torch.randn(shape), torch.randn(shape), torch.randn(shape), -0.01 * torch.rand(shape[:3])]


def attend(q: Tensor, k: Tensor, v: Tensor, decay: Tensor) -> Tensor:
    return linear_attention(q, k, v, "elu", causal=True, log_decay=decay)


def by_one() -> tuple[list[Tensor], list[Tensor]]:
    """Draw 301 positions, and compute their outputs and gradients by this process alone."""
    whole = [x.requires_grad_() for x in draw(301)]
    o = attend(*whole)
    return whole, [o, *torch.autograd.grad(o.square().sum(), whole)]


def error(whole: list[Tensor], expected: list[Tensor]) -> float:
    """Return how far outputs and gradients are from those of one process, of their size."""
    part = [parallel.cut(x.detach(), 2).requires_grad_() for x in whole]
    o = attend(*part)
    results = [o, *torch.autograd.grad(o.square().sum(), part)]
    pairs = [(parallel.cut(x.detach(), 2), y.detach(), x.detach()) for x, y in zip(expected, results)]
    most = max(float((x - y).abs().max() / size.abs().max()) for x, y, size in pairs)
    return agreed(most)


def attention_call(length: int) -> Call:
    part = [parallel.cut(x, 2).clone().requires_grad_() for x in draw(length)]
    return lambda: torch.autograd.grad(attend(*part).square().sum(), part)


def measured(call: Call, rounds: int, ranks: Any) -> dict[str, float]:
    """Median seconds from a common start to the last process's end; bytes that one sends per call; the largest peak of one."""
    call()
    seconds, before = [], ranks.bytes_sent
    for _ in range(rounds):
        dist.barrier()
        begun = time.perf_counter()
        call()
        seconds.append(agreed(time.perf_counter() - begun))
    sent = (ranks.bytes_sent - before) / rounds
    dist.barrier()
    return {"seconds": statistics.median(seconds), "bytes": agreed(sent), "peak": agreed(peak_bytes(call) or 0)}


def message_seconds(size: int, rounds: int) -> float:
    """Seconds of an all-gather of so many bytes from each process: the mean of 20, the median of the rounds."""
    mine, every = torch.zeros(size // 4), torch.zeros(dist.get_world_size(), size // 4)
    seconds = []
    for _ in range(rounds + 1):
        dist.barrier()
        begun = time.perf_counter()
        for _ in range(20):
            dist.all_gather(list(every), mine)
        seconds.append((time.perf_counter() - begun) / 20)
    return agreed(statistics.median(seconds[1:]))


def agreed(number: float) -> float:
    """The largest of all processes' numbers."""
    value = torch.tensor(float(number), dtype=torch.float64)
    dist.all_reduce(value, dist.ReduceOp.MAX)
    return float(value)


if __name__ == "__main__":
    main()
