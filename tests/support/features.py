"""The formulas of the feature maps that the kernels compute, written from the papers and in no way of ours.

Each gives (features, log-scale or None), φ = features · e^scale, the scale a constant: exponents have their maximum
taken out, so that the definition holds numbers of any size.
"""

import math

import torch
from torch import Tensor

Scaled = tuple[Tensor, Tensor | None]
EPSILON = 1e-3  # of Performer-ReLU


def elementwise(name: str, x: Tensor) -> Scaled:
    """x; elu(x) + 1 (Katharopoulos et al. 2020, eq. 7); max(x, 0) and its square; eˣ."""
    zero = torch.zeros((), dtype=x.dtype, device=x.device)
    positive = torch.where(x > 0, x, zero)
    formulas = {
        "identity": lambda: x,
        "elu": lambda: torch.where(x > 0, x + 1, torch.exp(torch.where(x > 0, zero, x))),
        "relu": lambda: positive,
        "squared_relu": lambda: positive**2,
    }
    return exponentials(x) if name == "exp" else (formulas[name](), None)


def projected(name: str, x: Tensor, omega: Tensor, A: float | Tensor = 0.0) -> Scaled:
    """Random features of x (…, d) by ω (m, d); A broadcasts with the features.

    With x' = x/d^(1/4), so that the kernel is exp(x·y/√d):

    positive    exp(ω·x' − |x'|²/2)/√m                                             Choromanski et al. 2021, eq. 5
    hyperbolic  exp(±ω·x' − |x'|²/2)/√(2m)                                          the same
    optimal     (1 − 4A)^(d/4) exp(A|ω|² + √(1 − 4A) ω·x' − |x'|²/2)/√m              Likhosherstov et al. 2022
    relu        (max(ω·x, 0) + ε)/√m                                               Choromanski et al. 2021, 4.3
    """
    m, d = omega.shape
    omega = omega.to(x.dtype)
    if name == "relu":
        return (elementwise("relu", x @ omega.T)[0] + EPSILON) / math.sqrt(m), None
    x = x * d**-0.25
    u, half = x @ omega.T, (x**2).sum(-1, keepdim=True) / 2
    if name == "hyperbolic":
        return exponentials(torch.cat([u, -u], dim=-1) - half - math.log(2 * m) / 2)
    if name == "optimal":
        A = torch.as_tensor(A, dtype=x.dtype)
        u = torch.sqrt(1 - 4 * A) * u + A * (omega**2).sum(-1) + d / 4 * torch.log(1 - 4 * A)
    return exponentials(u - half - math.log(m) / 2)


def exponentials(u: Tensor) -> Scaled:
    largest = u.detach().amax(-1, keepdim=True)
    return torch.exp(u - largest), largest.squeeze(-1)
