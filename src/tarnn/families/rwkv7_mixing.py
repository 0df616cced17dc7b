"""The layers of RWKV-7 (Peng et al. 2025, arXiv 2503.14456), for weights with the names of its checkpoints."""

import math

from torch import Tensor

from tarnn.families.weights import Weights
from tarnn.program.recording import LayerState, Register, apply, head_product, heads, low_rank_delta, mix, norm, product

DECAY = math.exp(-0.5)  # of the logarithm of a channel per token, at most
NORM_EPS = 64e-5  # of heads of any width


def time_mixing(
    x: Register,
    weights: Weights,
    num_heads: int,
    state: LayerState,
    name: str,
    first_values: Register | None,
    eps: float = NORM_EPS,
) -> tuple[Register, Register]:
    """Write the layer between tokens: (what is added to the residual, its values).

    Each of r, w, k, v, a, g is made of its own mixture of a token's input and the one before. With κ̂ the key of length 1 and
    α = σ(a), S ← (Diag(e^(−0.607 σ(w))) − (κ̂ ⊙ α) κ̂ᵀ) S + k vᵀ, o = W (g ⊙ (norm(Sᵀr) + (Σ r ⊙ k ⊙ r_k) v)).

    name: of the state's field for the last input. first_values: those of the first layer, with which later ones mix their own.
    eps: of the norm of a head.
    """
    h, width = num_heads, weights.shape("k_k")[-1]
    vector = lambda name: weights.get(name, (1, 1, width)).flatten()  # noqa: E731
    matrix = lambda name: weights.get(f"{name}.weight", (width, x.size))  # noqa: E731
    low_rank = lambda y, name, between="identity": _low_rank(y, weights, name, width, between)  # noqa: E731
    x_r, x_w, x_k, x_v, x_a, x_g = mix(x, weights.get("x_rwkvag", (6, 1, x.size))[:, 0], state, name)
    r, k, v = product(x_r, matrix("receptance")), product(x_k, matrix("key")), product(x_v, matrix("value"))
    log_decay = apply(low_rank(x_w, "w", "tanh"), "sigmoid") * -DECAY
    alpha, gate = apply(low_rank(x_a, "a"), "sigmoid"), low_rank(x_g, "g", "sigmoid")
    direction = norm(heads(k * vector("k_k"), h), eps=1e-12, kind="length")
    k = k * (alpha * vector("k_a") + (1 - vector("k_a").double()))
    if first_values is not None:
        v = v + (first_values + v * -1) * apply(low_rank(x_v, "v"), "sigmoid")
    r, k, v_h, alpha, log_decay = (heads(y, h) for y in (r, k, v, alpha, log_decay))
    o = low_rank_delta(r, log_decay, k, v_h, direction * -1, direction * alpha, state)
    bonus = head_product(r * k, weights.get("r_k", (h, width // h))[:, None])  # (h, 1)
    o = norm(o, weights.get("ln_x.weight", (width,)), weights.get("ln_x.bias", (width,)), eps=eps, kind="layer")
    return product((o + v_h * bonus) * gate, weights.get("output.weight", (x.size, width))), v


def _low_rank(x: Register, weights: Weights, name: str, width: int, between: str) -> Register:
    """Write a product of rank r, x₀ + W₂ f(W₁ x); of the gate without x₀."""
    rank = weights.shape(f"{name}1")[0]
    y = product(x, weights.get(f"{name}1", (rank, x.size)), exact=True)
    y = y if between == "identity" else apply(y, between)
    offset: Tensor | None = None if name == "g" else weights.get(f"{name}0", (1, 1, width)).flatten()
    return product(y, weights.get(f"{name}2", (width, rank)), offset, exact=True)


def channel_mixing(x: Register, w: Weights, inner: int, state: LayerState) -> Register:
    """Write W₂ relu(W₁ x')², x' a mixture of a token's input and the one before."""
    (mixed,) = mix(x, w.get("x_k", (1, 1, x.size))[0], state, "mlp_input")
    y = apply(product(mixed, w.get("key.weight", (inner, x.size))), "squared_relu")
    return product(y, w.get("value.weight", (x.size, inner)))
