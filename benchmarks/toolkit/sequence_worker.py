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
from torch.nn.functional import cross_entropy

sys.path.insert(0, str(Path(__file__).parents[2]))
from scripts.common.memory import peak_bytes
from tarnn import linear_attention, parallel
from tarnn.models import TarnnConfig, TarnnForCausalLM

HEADS, HEAD_DIM, LAYERS = 8, 32, 4  # 256 channels
Call = Callable[[], Any]


def main() -> None:
    rank, processes, store, settings = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], json.loads(sys.argv[4])
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(store, processes), rank=rank, world_size=processes)
    with parallel.sequence() as ranks:
        found: dict[str, Any] = {"error": error(rank, processes)}
        for kind, make in (("attention", attention_call), ("model", model_call)):
            for length in settings["lengths"]:
                found.setdefault(kind, {})[length] = measured(make(length), settings["rounds"], ranks)
    found["messages"] = (
        {n: message_seconds(n, settings["rounds"]) for n in settings["messages"]} if processes > 1 else {}
    )
    if rank == 0:
        print(json.dumps(found))
    dist.destroy_process_group()


def draw(length: int) -> list[Tensor]:
    """q, k, v (1, h, t, d) and log-decays (1, h, t) of a whole sequence, the same in every process."""
    torch.manual_seed(0)
    shape = (1, HEADS, length, HEAD_DIM)
    return [torch.randn(shape), torch.randn(shape), torch.randn(shape), -0.01 * torch.rand(shape[:3])]


def attend(q: Tensor, k: Tensor, v: Tensor, decay: Tensor) -> Tensor:
    return linear_attention(q, k, v, "elu", causal=True, log_decay=decay)


def error(rank: int, processes: int) -> float:
    """How far outputs and gradients of 301 positions are from those of one process, of their size."""
    from tarnn.parallel.group import alone

    whole = [x.requires_grad_() for x in draw(301)]
    with alone():
        o = attend(*whole)
        expected = [o, *torch.autograd.grad(o.square().sum(), whole)]
    part = [parallel.cut(x.detach(), 2).requires_grad_() for x in whole]
    o = attend(*part)
    results = [o, *torch.autograd.grad(o.square().sum(), part)]
    pairs = [(parallel.cut(x.detach(), 2), y.detach(), x.detach()) for x, y in zip(expected, results)]
    most = max(float((x - y).abs().max() / whole.abs().max()) for x, y, whole in pairs)
    return agreed(most)


def attention_call(length: int) -> Call:
    part = [parallel.cut(x, 2).clone().requires_grad_() for x in draw(length)]
    return lambda: torch.autograd.grad(attend(*part).square().sum(), part)


def model_call(length: int) -> Call:
    """Loss and gradients of a model, before they are summed over processes."""
    torch.manual_seed(0)
    config = TarnnConfig(num_hidden_layers=LAYERS, num_attention_heads=HEADS, hidden_size=HEADS * HEAD_DIM)
    model = TarnnForCausalLM(config).train()
    ids = torch.randint(config.vocab_size, (1, length + 1))
    inputs, targets = parallel.cut(ids[:, :-1]), parallel.cut(ids[:, 1:])

    def call() -> None:
        logits = model(input_ids=inputs, use_cache=False).logits
        (cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum") / length).backward()
        model.zero_grad()

    return call


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
