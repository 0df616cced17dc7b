"""The threads of the fused step: several callers, and processes that were forked."""

import os
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from scripts.common.clock import with_threads
from tarnn.decoding.fused import FusedStep
from tarnn.kernels.cpu import library
from tarnn.models import TarnnConfig, TarnnForCausalLM

pytestmark = pytest.mark.skipif(not library.available(), reason="the compiled kernels are not there")


def stepped(step, state=None, steps=12, batch=20):
    """What comes out last."""
    state = step.model.new_state(batch) if state is None else state
    for i in range(steps):
        out, state = step(torch.arange(batch) + i, state, inplace=True)
    return out


def test_steps_of_several_callers_at_once_don_t_mix():
    """Helpers go to whoever called last; the others do without them. Each caller has another number of threads: a helper that one
    has woken may find a job of another, which has no memory for so many."""
    torch.manual_seed(0)
    step = FusedStep(TarnnForCausalLM(TarnnConfig(hidden_size=72, num_attention_heads=3)).eval())
    with with_threads(1):
        expected = stepped(step)

    def rounds(threads):
        torch.set_num_threads(threads)
        own = FusedStep(step.model)
        return [stepped(own) for _ in range(8)]

    with ThreadPoolExecutor(4) as callers:
        for outs in callers.map(rounds, [2, 12, 3, 12]):
            assert all(torch.equal(out, expected) for out in outs)


def test_one_step_has_several_callers():
    """Each with a state of its own, whatever state another brings in between."""
    torch.manual_seed(0)
    config = TarnnConfig(hidden_size=24, num_hidden_layers=2, num_attention_heads=3, attention="softmax")
    step = FusedStep(TarnnForCausalLM(config).eval())
    expected = stepped(step, step.model.new_state(20, 12))
    with ThreadPoolExecutor(3) as callers:
        for out in callers.map(lambda _: stepped(step, step.model.new_state(20, 12)), range(30)):
            assert torch.equal(out, expected)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_forked_child_has_helpers_of_its_own():
    """Those of its parent are not in it, and may have held a lock.

    The child's state is made before: PyTorch fills large tensors by OpenMP, which waits for ever in a forked child.
    """
    step = FusedStep(TarnnForCausalLM(TarnnConfig(hidden_size=72, num_attention_heads=3)).eval())
    with with_threads(3):
        expected, state = stepped(step), step.model.new_state(20)
        child = os.fork()
        if not child:
            os._exit(0 if torch.equal(stepped(step, state), expected) else 1)
        assert os.waitpid(child, 0)[1] == 0
        assert torch.equal(stepped(step), expected)
