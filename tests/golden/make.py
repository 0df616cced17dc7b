"""Values of small cases, from the formulas alone, in 40 digits: mpmath and Python's loops, neither torch nor tarnn.

    python tests/golden/make.py        # writes values.json beside it, which tests/test_golden.py compares with ours

Sources: linear attention, Katharopoulos et al. 2020, eq. 4–7; softmax, Vaswani et al. 2017, eq. 1; FAVOR+, Choromanski et
al. 2021, eq. 5; FAVOR++, Likhosherstov et al. 2022, theorem 3.1; DPFP, Schlag et al. 2021, eq. 37; rotary positions, Su
et al. 2021, eq. 34, with the halves as pairs; sinusoids, Vaswani et al. 2017, section 3.5; SwiGLU, Shazeer 2020, eq. 6;
logistic mixtures, Salimans et al. 2017, eq. 2.
"""

import json
from collections.abc import Callable
from itertools import product
from math import prod
from pathlib import Path
from typing import Any

from mpmath import cos as cosine, exp, log, mp, mpf, sin as sine, sqrt

mp.dps = 40
HEADS, KEY_HEADS, T, D, E = 4, 2, 5, 3, 2
Array = dict[tuple[int, ...], Any]  # numbers by index


def numbers(seed: int, *shape: int, size: int = 16) -> Array:
    """Sixteenths in [−2, 2) that look drawn: exact in any format."""
    found, state = {}, 1 + 7919 * seed
    for index in product(*map(range, shape)):
        state = (state * 16807) % 2147483647
        found[index] = mpf((state >> 8) % (4 * size) - 2 * size) / size
    return found


def shape_of(array: Array) -> list[int]:
    return [1 + max(index[i] for index in array) for i in range(len(next(iter(array))))]


def as_json(array: Array) -> Any:
    """Nested lists of float64, or of truth values."""
    shape, flat = (shape_of(array), [x if isinstance(x := array[at], bool) else float(x) for at in sorted(array)])
    assert len(flat) == prod(shape)
    for size in reversed(shape[1:]):
        flat = [flat[i : i + size] for i in range(0, len(flat), size)]
    return flat


MAPS: dict[str, Callable[[Any], Any]] = {
    "identity": lambda x: x,
    "elu": lambda x: x + 1 if x > 0 else exp(x),
    "relu": lambda x: max(x, mpf(0)),
    "squared_relu": lambda x: max(x, mpf(0)) ** 2,
    "exp": exp,
}


def linear_attention(
    q: Array,
    k: Array,
    v: Array,
    *,
    feature_map: str = "elu",
    causal: bool = True,
    normalize: bool = True,
    key_mask: Array | None = None,
    log_decay: Array | None = None,
    key_log_weight: Array | None = None,
) -> Array:
    """o_i = Σ_j w_ij v_j / Σ_j w_ij, w_ij = Σ_c e^(weight_j + D_ijc) φ(q_i)_c φ(k_j)_c, D the decays in (j, i]."""
    phi, out = MAPS[feature_map], {}
    for h, i in product(range(HEADS), range(T)):
        g, weights = h // (HEADS // KEY_HEADS), []
        for j in range(T):
            seen = (not causal or j <= i) and (key_mask is None or key_mask[0, j])
            weight = mpf(0)
            for c in range(D) if seen else ():
                exponent = mpf(0) if key_log_weight is None else key_log_weight[0, g, j]
                for m in range(j + 1, i + 1):
                    if log_decay is not None and (key_mask is None or key_mask[0, m]):
                        index = {1: (g,), 3: (0, g, m), 4: (0, g, m, c)}[len(next(iter(log_decay)))]
                        exponent += log_decay[index]
                weight += exp(exponent) * phi(q[0, h, i, c]) * phi(k[0, g, j, c])
            weights.append(weight)
        total = sum(weights) if normalize else mpf(1)
        for e in range(E):
            above = sum(w * v[0, g, j, e] for j, w in enumerate(weights))
            out[0, h, i, e] = above / total if total else mpf(0)
    return out


def softmax_attention(q: Array, k: Array, v: Array, causal: bool, key_mask: Array | None = None) -> Array:
    out = {}
    for h, i in product(range(HEADS), range(T)):
        g = h // (HEADS // KEY_HEADS)
        seen = [j for j in range(T) if (not causal or j <= i) and (key_mask is None or key_mask[0, j])]
        weights = {j: exp(sum(q[0, h, i, c] * k[0, g, j, c] for c in range(D)) / sqrt(mpf(D))) for j in seen}
        for e in range(E):
            above = sum(w * v[0, g, j, e] for j, w in weights.items())
            out[0, h, i, e] = above / sum(weights.values()) if weights else mpf(0)
    return out


def final_state(k: Array, v: Array) -> tuple[Array, Array]:
    """S and z after the last position, of elu(x) + 1."""
    phi = MAPS["elu"]
    S = {
        (0, g, c, e): sum(phi(k[0, g, j, c]) * v[0, g, j, e] for j in range(T))
        for g, c, e in product(range(KEY_HEADS), range(D), range(E))
    }
    z = {(0, g, c): sum(phi(k[0, g, j, c]) for j in range(T)) for g, c in product(range(KEY_HEADS), range(D))}
    return S, z


def gradients(f: Callable[[list[Array]], Array], inputs: list[Array], grad: Array) -> list[Array]:
    """∂ Σ grad·f / ∂ each number, by differences of 10⁻¹⁵ to both sides, which in 40 digits leave 25."""
    step, found = mpf(10) ** -15, []
    for n, x in enumerate(inputs):
        slopes = {}
        for index in x:
            sides = []
            for sign in (1, -1):
                moved = [y | {index: y[index] + sign * step} if i == n else y for i, y in enumerate(inputs)]
                o = f(moved)
                sides.append(sum(grad[at] * o[at] for at in o))
            slopes[index] = (sides[0] - sides[1]) / (2 * step)
        found.append(slopes)
    return found


def attention_cases() -> dict[str, Any]:
    q, k, v = numbers(1, 1, HEADS, T, D), numbers(2, 1, KEY_HEADS, T, D), numbers(3, 1, KEY_HEADS, T, E)
    mask: Array = {(0, j): j not in (1, 4) for j in range(T)}
    weight = numbers(4, 1, KEY_HEADS, T)
    decays = {
        "head": numbers(5, KEY_HEADS),
        "token": numbers(6, 1, KEY_HEADS, T),
        "channel": numbers(7, 1, KEY_HEADS, T, D),
    }
    decays = {name: {at: -abs(x) for at, x in decay.items()} for name, decay in decays.items()}
    calls: dict[str, dict[str, Any]] = {name: {"feature_map": name} for name in MAPS if name != "identity"}
    calls |= {f"{name}, full": {"feature_map": name, "causal": False} for name in ("elu", "relu", "exp")}
    calls |= {f"decay per {name}": {"log_decay": decay} for name, decay in decays.items()}
    calls |= {
        "identity, not normalised": {"feature_map": "identity", "normalize": False},
        "masked": {"key_mask": mask},
        "masked, full": {"key_mask": mask, "causal": False},
        "log-weights": {"key_log_weight": weight},
        "log-weights, full": {"key_log_weight": weight, "causal": False},
        "all at once": {"key_mask": mask, "key_log_weight": weight, "log_decay": decays["channel"]},
    }
    found = []
    for name, options in calls.items():
        o = linear_attention(q, k, v, **options)
        shown = {n: as_json(x) if isinstance(x, dict) else x for n, x in options.items()}
        found.append({"name": name, "options": shown, "o": as_json(o)})
    grad, names = numbers(8, 1, HEADS, T, E), ("log_decay", "key_log_weight")
    slopes = gradients(
        lambda xs: linear_attention(*xs[:3], **dict(zip(names, xs[3:]))), [q, k, v, decays["channel"], weight], grad
    )
    S, z = final_state(k, v)
    softmax = [
        {"causal": causal, "key_mask": m and as_json(m), "o": as_json(softmax_attention(q, k, v, causal, m))}
        for causal, m in ((True, None), (False, None), (False, mask))
    ]
    return {
        "inputs": [as_json(x) for x in (q, k, v)],
        "linear": found,
        "softmax": softmax,
        "state": {"S": as_json(S), "z": as_json(z)},
        "gradients": {
            "log_decay": as_json(decays["channel"]),
            "key_log_weight": as_json(weight),
            "grad": as_json(grad),
            "found": [as_json(x) for x in slopes],
        },
    }


def feature_cases() -> dict[str, Any]:
    n, m, d = 3, 4, 3
    x, omega, A = numbers(11, n, d), numbers(12, m, d), mpf(-3) / 16
    scaled = {at: value / mpf(d) ** mpf("0.25") for at, value in x.items()}
    products = {(i, j): sum(omega[j, c] * scaled[i, c] for c in range(d)) for i, j in product(range(n), range(m))}
    half = [sum(scaled[i, c] ** 2 for c in range(d)) / 2 for i in range(n)]
    square = [sum(omega[j, c] ** 2 for c in range(d)) for j in range(m)]
    rows = [(i, j) for i, j in product(range(n), range(m))]
    positive = {(i, j): exp(products[i, j] - half[i]) / sqrt(mpf(m)) for i, j in rows}
    hyperbolic = {
        (i, j + m * (sign < 0)): exp(sign * products[i, j] - half[i]) / sqrt(mpf(2 * m))
        for sign in (1, -1)
        for i, j in rows
    }
    optimal = {
        (i, j): (1 - 4 * A) ** (mpf(d) / 4)
        / sqrt(mpf(m))
        * exp(A * square[j] + sqrt(1 - 4 * A) * products[i, j] - half[i])
        for i, j in rows
    }
    trigonometric = {
        (i, j + m * (f is cosine)): exp(half[i]) / sqrt(mpf(m)) * f(products[i, j])
        for f in (sine, cosine)
        for i, j in rows
    }
    relu = {
        (i, j): (max(mpf(0), sum(omega[j, c] * x[i, c] for c in range(d))) + mpf("0.001")) / sqrt(mpf(m))
        for i, j in rows
    }
    r = [[max(sign * x[i, c], mpf(0)) for sign in (1, -1) for c in range(d)] for i in range(n)]
    dpfp = {
        (i, shift * 2 * d + c): r[i][c] * r[i][(c - shift - 1) % (2 * d)]
        for i, shift, c in product(range(n), range(2), range(2 * d))
    }
    return {
        "x": as_json(x),
        "omega": as_json(omega),
        "A": float(A),
        "positive": as_json(positive),
        "hyperbolic": as_json(hyperbolic),
        "optimal": as_json(optimal),
        "trigonometric": as_json(trigonometric),
        "relu": as_json(relu),
        "dpfp": as_json(dpfp),
    }


def position_cases() -> dict[str, Any]:
    positions, d, base = [0, 1, 7, 1000, 123457], 6, 10000
    x = numbers(21, len(positions), d)
    turned, waves = {}, {}
    for i, p in enumerate(positions):
        for c in range(d // 2):
            angle = p * mpf(base) ** (-mpf(2 * c) / d)
            a, b = x[i, c], x[i, c + d // 2]
            turned[i, c] = a * cosine(angle) - b * sine(angle)
            turned[i, c + d // 2] = a * sine(angle) + b * cosine(angle)
            waves[i, c], waves[i, c + d // 2] = sine(angle), cosine(angle)
    return {"positions": positions, "x": as_json(x), "rotary": as_json(turned), "sinusoidal": as_json(waves)}


def swiglu_case() -> dict[str, Any]:
    n, hidden, inner = 3, 4, 5
    x, gate, up, down = (
        numbers(31 + i, *s) for i, s in enumerate([(n, hidden), (inner, hidden), (inner, hidden), (hidden, inner)])
    )
    out = {}
    for i in range(n):
        mixed = []
        for j in range(inner):
            a, b = (sum(w[j, c] * x[i, c] for c in range(hidden)) for w in (gate, up))
            mixed.append(a / (1 + exp(-a)) * b)
        out |= {(i, c): sum(down[c, j] * mixed[j] for j in range(inner)) for c in range(hidden)}
    return {name: as_json(a) for name, a in (("x", x), ("gate", gate), ("up", up), ("down", down), ("out", out))}


def mixture_case() -> dict[str, Any]:
    """Three components; narrow, wide and far ones; the first and the last bin are open."""
    values, theta = [0, 1, 77, 128, 254, 255], numbers(41, 4, 9)
    theta |= {(1, 6): mpf(-6), (1, 7): mpf(-5), (1, 8): mpf(3), (2, 3): mpf(-1), (2, 4): mpf(1)}
    sigmoid = lambda u: 1 / (1 + exp(-u))  # noqa: E731
    out = {}
    mp.dps = 400  # differences of sigmoids that are 1 but for e^(−500)
    for row, (n, value) in product(range(4), enumerate(values)):
        total, norm = mpf(0), sum(exp(theta[row, m]) for m in range(3))
        for m in range(3):
            mean, scale, x = theta[row, 3 + m], exp(theta[row, 6 + m]), mpf(2 * value) / 255 - 1
            above = mpf(1) if value == 255 else sigmoid((x + mpf(1) / 255 - mean) / scale)
            below = mpf(0) if value == 0 else sigmoid((x - mpf(1) / 255 - mean) / scale)
            total += exp(theta[row, m]) / norm * (above - below)
        out[row, n] = log(total)
    mp.dps = 40
    return {"values": values, "parameters": as_json(theta), "log_prob": as_json(out)}


def main() -> None:
    cases = {
        "attention": attention_cases(),
        "features": feature_cases(),
        "positions": position_cases(),
        "swiglu": swiglu_case(),
        "logistic_mixture": mixture_case(),
    }
    lines = ",\n".join(f'"{name}": {json.dumps(case)}' for name, case in cases.items())
    Path(__file__).with_name("values.json").write_text(f"{{\n{lines}\n}}\n")


if __name__ == "__main__":
    main()
