"""A step recorded in a CUDA graph: a token costs one launch, not the host's way through the model."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

WARM_UP = 3  # steps before the recording: kernels are compiled, libraries make their workspaces


def cannot_record(state: Any) -> str | None:
    """Why a step from this state can't be recorded, or None."""
    if state is None:
        return "it needs the state that it begins with"
    if state.position.device.type != "cuda":
        return "the model is not on a GPU"
    if any(layer.grows for layer in state.layers):
        return "the caches of its softmax layers have another length at every token"
    return None


class RecordedStep:
    """`model.step` for as many rows as the given state has, with the signature of `model.step`.

    It writes into tensors of its own, so logits are good until the next step; a state that isn't the one that it returned
    (of a fork, of a file) is copied into them first.
    """

    def __init__(self, model: Any, state: Any):
        self.model, self.state = model, state.clone()
        self.token = torch.zeros_like(self.state.position)
        start = self.state.clone()
        self.logits: Any = None
        with torch.cuda.device_of(self.token):  # streams and graphs are of the current device
            self.play = record(self._run, lambda: self._load(start))

    def _run(self) -> None:
        self.logits, self.state = self.model.step(self.token, self.state, inplace=True)

    def _load(self, state: Any) -> None:
        for own, other in zip(self.state.tensors().values(), state.tensors().values(), strict=True):
            if own is not other:
                own.copy_(other)

    @torch.no_grad()
    def __call__(self, token: Tensor, state: Any, *, inplace: bool = True) -> tuple[Tensor, Any]:
        self._load(state)
        self.token.copy_(token)
        self.play()
        return self.logits, self.state if inplace else self.state.clone()


@torch.no_grad()
def record(run: Callable[[], None], undo: Callable[[], None]) -> Callable[[], object]:
    """What plays again the kernels that `run` launches, on the tensors that it used, which are then as they were."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(WARM_UP):
            run()
            undo()  # a position further on may be beyond the model's last
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph.replay
