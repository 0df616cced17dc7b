"""A backward pass in parts is the backward pass; what lies in memory between its kernels is bounded."""

import pytest
import torch
from kernels.test_backends import all_results

from tarnn.kernels.eager import linear as eager
from tarnn.kernels.linear import Call
from tarnn.kernels.triton import linear as triton, split_backward

pytestmark = pytest.mark.usefixtures("triton_kernels")


def results_of(backend, call: Call) -> tuple:
    """Outputs and gradients; what comes back through the state is drawn alike."""
    torch.manual_seed(1)
    return all_results(backend, call)


def test_one_row_of_one_head_after_another(monkeypatch):
    """With decays and random features; the gradients of Ω and β are sums over rows."""
    torch.manual_seed(0)
    q, k, v = torch.randn(2, 4, 3, 2), torch.randn(2, 2, 3, 2), torch.randn(2, 2, 3, 3)
    call = Call(
        q,
        k,
        v,
        -torch.rand(2, 2, 3),
        S=torch.rand(2, 2, 5, 3),
        z=torch.rand(2, 2, 5),
        omega=torch.randn(1, 2, 5, 2),
        bias=torch.randn(1, 2, 5),
        key_mask=torch.rand(2, 3) > 0.3,
        function="elu",
        eps=1e-30,
    )
    expected = results_of(eager, call)[1]
    monkeypatch.setattr(split_backward, "MOST_BYTES", 1)
    assert len(split_backward.parts_of(call, 16)) == 4
    found = results_of(triton, call)[1]
    for x, y in zip(found, expected):
        if y is not None:
            torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-4)


def test_values_wider_than_a_tile():
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 1, 5, n) for n in (3, 3, 300))
    call = Call(
        q, k, v, -torch.rand(1, 1, 5), S=torch.rand(1, 1, 3, 300), z=torch.rand(1, 1, 3), function="elu", eps=1e-30
    )
    assert triton.refusal(call) is None
    assert [part.e for part in split_backward.parts_of(call, 16)] == [slice(0, 256), slice(256, 300)]
    for mine, expected in zip(results_of(triton, call), results_of(eager, call)):
        for x, y in zip(mine, expected):
            if y is not None:
                torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-4)


def test_how_much_is_kept_between_kernels():
    """With decays two states for each chunk; without nothing that grows with the length."""
    q = torch.empty(2, 8, 4096, 64, device="meta")
    decay = torch.empty(2, 8, 4096, device="meta")
    plain, decayed = Call(q, q, q), Call(q, q, q, decay)
    assert split_backward.bytes_between(plain, 64) == 0
    assert split_backward.bytes_between(decayed, 64) == 64 * 2 * 64 * 64 * 4
    assert len(split_backward.parts_of(plain, 16)) == 1
    projected = Call(q, q, q, omega=torch.empty(1, 1, 128, 64, device="meta"))
    assert split_backward.bytes_between(projected, 64) == 2 * 4096 * 128 * 4
    most = split_backward.MOST_BYTES
    for call in (decayed, projected):
        cut = split_backward.parts_of(call, 16)
        rows = [(x.b.stop - x.b.start) * (x.g.stop - x.g.start) for x in cut]
        assert sum(rows) == 16
        assert max(rows) * split_backward.bytes_between(call, 16) <= most
