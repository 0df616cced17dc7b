"""Check that all ranks are about to compute the same, before they exchange data whose sizes depend on it."""

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from hashlib import blake2b
from traceback import walk_tb
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tarnn.errors import LostRankError, UserError
from tarnn.parallel.collectives import gather_plain
from tarnn.parallel.group import Layout, Ranks

_REFUSAL = "refusal"


def agree(ranks: Ranks, length: int, facts: dict[str, Any]) -> Layout:
    """Check that all ranks state the same facts, by name, and find out how long their stretches are.

    Raises UserError on every rank if they differ, with the first one that does.
    """
    digest = int.from_bytes(blake2b(repr(facts).encode(), digest_size=8).digest(), "little", signed=True)
    stated = gather_plain(ranks, torch.tensor([digest, length], device=_device(ranks))).tolist()
    if any(other != digest for other, _ in stated):
        raise UserError(_difference(ranks, facts))
    return Layout.of(ranks.rank, [length for _, length in stated])


@contextmanager
def telling(ranks: Ranks) -> Iterator[None]:
    """Tell the other ranks, which wait in `agree`, if an op or a layer refuses its input within this context."""
    try:
        yield
    except (ValueError, TypeError) as error:
        if not isinstance(error, UserError) and _is_ours(error):  # all of them raise the first
            with suppress(UserError, LostRankError):  # they did not refuse theirs, and have been told; or are gone
                agree(ranks, 0, {_REFUSAL: str(error)})
        raise


def _is_ours(error: Exception) -> bool:
    """Return whether an error was raised within a call of tarnn: nobody waits for one of the program's own."""
    names = (frame.f_globals.get("__name__", "") for frame, _ in walk_tb(error.__traceback__))
    return any(name.startswith("tarnn.") and not name.startswith("tarnn.parallel.") for name in names)


def looks(x: Any, time: int | None = None) -> Any:
    """Return the facts of an argument that must match across ranks: of a tensor its dtype and its shape without the time axis."""
    if not isinstance(x, Tensor):
        return x if isinstance(x, bool | int | float | str | None) else type(x).__name__
    shape = ["t" if axis == time else n for axis, n in enumerate(x.shape)]
    return f"({', '.join(map(str, shape))}) {x.dtype} on {x.device.type}".replace("torch.", "")


def check_alike(module: nn.Module, group: Any = None) -> None:
    """Raise UserError on every rank unless all have the same model: config, names, shapes and weights, to the bit.

    Weights that differ show in no shape, and would make outputs that belong to no model. It reads all weights once.
    """
    ranks = group if isinstance(group, Ranks) else Ranks(group)
    facts = {} if (config := getattr(module, "config", None)) is None else {"config": str(config)}
    agree(ranks, 0, facts | {name: _fingerprint(x) for name, x in module.state_dict().items()})


def _difference(ranks: Ranks, facts: dict[str, Any]) -> str:
    everyone: list[Any] = [None] * ranks.size
    dist.all_gather_object(everyone, facts, group=ranks.process_group)
    refusals = [f"rank {i}: {theirs[_REFUSAL]}" for i, theirs in enumerate(everyone) if _REFUSAL in theirs]
    if refusals:
        return f"a rank refused its input. {refusals[0]}"
    for name in dict.fromkeys(name for theirs in everyone for name in theirs):
        by_value: dict[str, list[int]] = {}
        for i, theirs in enumerate(everyone):
            by_value.setdefault(str(theirs.get(name, "nothing")), []).append(i)
        if len(by_value) > 1:
            said = "; ".join(f"{value} on rank {', '.join(map(str, who))}" for value, who in by_value.items())
            return (
                f"all ranks must make the same calls with the same model; got different values of {name}: {said}. "
                "Give every rank the same configuration, inputs of one shape but for their length, and the same state."
            )
    raise AssertionError("facts that differ in no value")


def _device(ranks: Ranks) -> torch.device:
    """Return the device of small messages: the CPU if the group has a backend for it, so that no GPU has to be waited for."""
    kinds = dist.get_backend_config(ranks.process_group)
    return torch.device("cpu" if "cpu:" in kinds else kinds.split(":")[0])


def _fingerprint(x: Tensor) -> str:
    data = x.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()
    return f"{tuple(x.shape)} {x.dtype} #{blake2b(data, digest_size=4).hexdigest()}"
