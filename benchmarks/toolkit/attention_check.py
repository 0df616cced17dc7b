"""Is it right, before it is fast: each method against the definition, outputs and gradients.

In float64 to 10⁻⁹; in each dtype that is measured, with an error at most twice that of the definition computed in
that dtype (and a rounding), both against float64. Of code that is not ours three digits are asked: its eps is larger.
Errors are norms over the whole tensor.
"""

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from tarnn.ops.linear import definition as linear_definition
from toolkit.baselines import PHI, Method

# lengths that no chunk divides; the long one is cut into stretches for two cores
HEADS, LENGTH, LONG = 2, 97, 1337
Attended = tuple[Tensor, ...]  # o, dq, dk, dv


def wrong(
    method: Method,
    dtype: torch.dtype,
    head_dims: Sequence[int],
    device: str = "cpu",
    phi: Callable[[Tensor], Tensor] = PHI,
) -> str:
    """What is wrong with this method, or nothing. SDPA is torch's own and computes something else: not asked."""
    if method.power > 1:
        return ""
    try:
        with method.surroundings():
            for d in head_dims:
                for causal in (True, False):
                    for t, definition in ((LENGTH, as_defined), (LONG, by_products)):
                        if t == LONG and dtype.itemsize < 4:
                            continue  # products of 16 bits take long here, and the paths are those of float32
                        defined = partial(definition, phi, causal=causal)
                        if found := _wrong(method, dtype, (1, HEADS, t, d), causal, defined, device):
                            return f"t = {t}, d = {d}, {'causal' if causal else 'full'}, {str(dtype)[6:]}: {found}"
    except Exception as error:
        if method.ours:
            raise
        return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    return ""


def _wrong(method: Method, dtype: torch.dtype, shape, causal: bool, definition, device: str) -> str:
    torch.manual_seed(0)
    q, k, v, grad = (torch.randn(shape, device=device).to(dtype) for _ in range(4))
    found = attended(lambda q, k, v: method.attend(*method.given(q, k, v), causal), q, k, v, grad)
    exact = attended(definition, *(x.double() for x in (q, k, v, grad)))
    plain = attended(definition, q, k, v, grad)
    for name, x, y, z in zip(("o", "dq", "dk", "dv"), found, exact, plain):
        error, size = (x.double() - y).norm(), y.norm()
        if dtype == torch.float64:
            most = 1e-9 * size
        elif method.ours:
            most = 2 * (z.double() - y).norm() + torch.finfo(dtype).eps * size
        else:
            most = 1e-3 * size
        if not error <= most:
            return f"{name} is {error / size:.1e} off the definition, allowed is {most / size:.1e}"
    return ""


def attended(f, q: Tensor, k: Tensor, v: Tensor, grad: Tensor) -> Attended:
    q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
    o = f(q, k, v)
    return (o.detach(), *torch.autograd.grad(o, (q, k, v), grad))


def as_defined(phi, q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    return linear_definition.quadratic(phi(q), phi(k), v, causal=causal)


def by_products(phi, q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    """The same in less memory: a (t × t) matrix of weights, not one of features."""
    weights = phi(q) @ phi(k).mT
    weights = weights.tril() if causal else weights
    return weights @ v / weights.sum(-1, keepdim=True)
