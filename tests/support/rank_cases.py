"""What ranks of tests/parallel do besides calls: they disagree, are killed, count bytes."""

import os
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

from support.op_stretches import Case, call_here
from support.received_bytes import received
from support.stretch_cases import Call, stretch, weights
from tarnn import Elu, linear_attention
from tarnn.errors import UserError
from tarnn.parallel import check_alike, cut, sequence
from tarnn.parallel.collectives import gather_plain
from tarnn.parallel.group import active


def bytes_of_call(group: Any, rank: int, call: Call, backward: bool) -> tuple[int, int]:
    """Bytes that a call sends, by its own account, and that the system counts as received."""
    tensors = stretch(call.tensors(), call, rank)
    for name, x in tensors.items():
        x.requires_grad_(backward and x.is_floating_point() and name != "M")
    phi = call.map()

    def run() -> None:
        outputs = call.apply(tensors, phi)
        if backward:
            (outputs[0] if call.state_wanted else outputs).sum().backward()

    return _bytes_of(group, run)


def bytes_of_case(group: Any, rank: int, case: Case, backward: bool) -> tuple[int, int]:
    """The same of a call of another op."""
    call = call_here(case, rank)
    return _bytes_of(group, lambda: call(backward))


def _bytes_of(group: Any, run: Callable[[], None]) -> tuple[int, int]:
    dist.barrier(group)
    time.sleep(0.05)  # the last one's messages are counted before
    before = received()
    with sequence(group) as ranks:
        run()
    return ranks.bytes_sent, received() - before


def other_calls(group: Any, rank: int, call: Call, changes: dict[str, Any]) -> None:
    """A call that is another one on the last rank."""
    call = replace(call, **changes) if rank == group.size() - 1 else call
    with sequence(group):
        call.apply(stretch(call.tensors(), call, rank), call.map())


def on_mesh(group: Any, rank: int) -> tuple[float, str]:
    """Sequences over the second dimension of a mesh, two ranks each; and what a whole mesh is answered."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "sequence"))
    total = sum_of_ones(mesh["sequence"], rank)
    try:
        with sequence(mesh):
            pass
    except UserError as error:
        return total, str(error)
    return total, ""


def checkpointed(group: Any, rank: int, call: Call) -> dict[str, Tensor]:
    """Gradients where the backward pass computes the call again."""
    tensors = stretch(call.tensors(), call, rank)
    leaves = {name: x.clone().requires_grad_() for name, x in tensors.items()}
    phi = call.map()
    with sequence(group):
        o = checkpoint(lambda: call.apply(leaves, phi), use_reentrant=False)
        o.backward(stretch({"o": weights(call)}, call, rank)["o"])
    return {"o": o.detach()} | {f"gradient of {name}": x.grad for name, x in leaves.items() if x.grad is not None}


def wrong_shapes(group: Any, rank: int) -> None:
    """One rank has fewer keys than queries."""
    x = torch.randn(1, 2, 8, 4)
    with sequence(group):
        linear_attention(x, x[:, :, : 5 if rank == 1 else 8], x[:, :, : 5 if rank == 1 else 8], causal=True)


def own_error(group: Any, rank: int) -> None:
    """An error of the program itself on one rank, which no other waits for."""
    with sequence(group):
        if rank == 1:
            int("one")


def sum_of_ones(group: Any, rank: int) -> float:
    """Whether the ranks still work together."""
    one = torch.ones(1, 1, 2, 1)
    with sequence(group):
        return linear_attention(one, one, one, "identity", causal=True, normalize=False)[0, 0, -1, 0].item()


def other_models(group: Any, rank: int, difference: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4 if difference != "shape" or rank == 0 else 5), nn.Linear(3, 3))
    if rank == 1 and difference == "weights":
        with torch.no_grad():
            model[1].bias[2] += 1e-3
    check_alike(model, group)


def a_call(group: Any, rank: int, moment: str, victim: int, how: int) -> tuple[str, str, float]:
    """One rank ends, or stops, before a call or between it and its backward pass; what the others raise, and when."""
    x = torch.randn(1, 2, 50, 8, requires_grad=True)
    start = time.monotonic()
    try:
        with sequence(group):
            for i in range(2):
                if rank == victim and moment == "forward" and i == 1:
                    os.kill(os.getpid(), how)
                o = linear_attention(x, x, x, Elu(), causal=True)
                if rank == victim and moment == "backward" and i == 1:
                    os.kill(os.getpid(), how)
                o.sum().backward()
    except Exception as error:
        return type(error).__name__, str(error), time.monotonic() - start
    return "", "", time.monotonic() - start


def numbers_of_no_backend(group: Any, rank: int) -> None:
    with sequence(group) as ranks:
        gather_plain(ranks, torch.zeros(3, dtype=torch.int16))


def twice(group: Any, rank: int, x: Tensor) -> Tensor:
    """The second derivative of a sum of outputs with regard to this rank's stretch of v and k, in some direction."""
    mine = cut(x, 2, group).clone().requires_grad_()
    with sequence(group):
        o = linear_attention(mine, mine, mine, Elu(), causal=True)
        first = torch.autograd.grad(o.square().sum(), mine, create_graph=True)[0]
        return torch.autograd.grad(first.square().sum(), mine)[0]


def places(group: Any, rank: int) -> tuple[bool, bool, bool, list[int]]:
    """Whether a group is active within a context, an inner one of one rank, and behind an error; and a stretch."""
    alone = dist.new_group([rank], use_local_synchronization=True)
    with sequence(group):
        inside = active() is not None
        with sequence(alone):
            within = active() is not None
    try:
        with sequence(group):
            raise KeyError
    except KeyError:
        behind = active() is not None
    return inside, within, behind, cut(torch.arange(10), 0, group).tolist()
