"""A compiled step for the token loop: faster by the token, slower to start. When it pays, when it can't."""

import os
import shutil
import time
from importlib.util import find_spec

import torch

from tarnn.decoding.loop import TokenLoop

WORTH_COMPILING = 20_000  # tokens; on a CPU, compiling takes 15–40 s and saves one to a few ms per token


def cannot_compile(loop: TokenLoop) -> str | None:
    """Why this loop's step can't be compiled, or None."""
    if any(layer.grows for layer in loop.state.layers):
        return "the caches of its softmax layers have another length at every token"
    if loop.state.position.device.type == "cuda":
        return None if find_spec("triton") else "compiling for a GPU needs triton, which is not installed"
    compilers = filter(None, [os.environ.get("CXX"), "g++", "clang++", "cl"])
    return None if any(map(shutil.which, compilers)) else "there is no C++ compiler (g++ or clang++) here"


def choose(loop: TokenLoop, asked: bool | None, num_tokens: int) -> tuple[bool, str]:
    """Whether to compile for `num_tokens` tokens, and why. `asked` None: where it pays.

    Raises ValueError where it is asked for and can't be done.
    """
    if asked is False:
        return False, "as asked"
    reason = cannot_compile(loop)
    if asked and reason:
        raise ValueError(f"the step can't be compiled: {reason}. Leave --compile out.")
    if asked:
        return True, "as asked"
    if reason:
        return False, reason
    if num_tokens < WORTH_COMPILING:
        return False, f"compiling pays from about {WORTH_COMPILING:,} tokens on"
    return True, f"{num_tokens:,} tokens are to be made"


def compile_step(loop: TokenLoop) -> float:
    """Gives the loop a compiled step, tried on a copy of its state; returns the seconds that this took.

    The shapes are static and the state is written in place, so nothing is compiled again or allocated later.
    Raises whatever torch.compile raises; the loop is then as it was.
    """
    start = time.perf_counter()
    step = torch.compile(loop.model.step, fullgraph=True, dynamic=False)
    trial, state = loop.state.clone(), loop.state.clone()  # contiguous, alike in every stride
    with torch.no_grad():
        for _ in range(2):
            _, trial = step(torch.zeros_like(trial.position), trial, inplace=True)
    loop.step, loop.state = step, state
    return time.perf_counter() - start
