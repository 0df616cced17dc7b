"""Linear attention without a query: what ranks that share a sequence ask of the kernels, a state alone."""

import pytest
import torch

from tarnn import Elu, linear_attention
from tarnn.ops.linear.arguments import make_call
from tarnn.ops.linear.op import attend


@pytest.mark.parametrize("decays", [False, True])
def test_any_number_of_threads_makes_the_state_that_queries_would_leave(decays):
    generator, before = torch.Generator().manual_seed(0), torch.get_num_threads()
    q, k, v = (torch.randn(1, 3, 3000, 16, generator=generator) for _ in "qkv")
    decay = -torch.rand(1, 3, 3000, generator=generator) / 10 if decays else None
    made = make_call(q, k, v, Elu(), True, True, None, None, None, decay, None, None)
    states = [linear_attention(q, k, v, Elu(), causal=True, log_decay=decay, return_state=True)[1]]
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            states.append(made.state_of(attend(made.call._replace(q=q[:, :0]), with_state=True)))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(x.S, states[0].S) and torch.equal(x.z, states[0].z) for x in states)
