"""One token for all rows and heads in one launch: a product of a vector and a matrix, so in plain multiplications."""

import triton
import triton.language as tl

from tarnn.kernels.triton.tiles import accurate_exp, exp, finite, function_of


@triton.jit
def vector(x, columns, projection, F: tl.constexpr, MAP: tl.constexpr):
    """φ(x) (f,) and its log-scale: 0 but for exp."""
    omega, bias, factor, square, offset, shift = projection
    D: tl.constexpr = MAP[0]
    BD: tl.constexpr = MAP[1]
    live = columns < F
    if MAP[3]:
        u, length = tl.zeros(columns.shape, tl.float32), tl.full((), 0.0, tl.float32)
        for d0 in range(0, D, BD):
            d = d0 + tl.arange(0, BD)
            given = tl.load(x + d, mask=d < D, other=0.0).to(tl.float32)
            inside = live[:, None] & (d < D)[None, :]
            rows = tl.load(omega + columns[:, None] * D + d[None, :], mask=inside, other=0.0)
            u += tl.sum(rows * given[None, :], 1)
            length += tl.sum(given * given, 0)
        u = factor * u + offset - square * length
        if MAP[4]:
            u += tl.load(bias + columns, mask=live, other=0.0)
    else:
        u = tl.load(x + columns, mask=live, other=0.0).to(tl.float32)
    scale = tl.full((), 0.0, tl.float32)
    if MAP[2] == 4:
        scale = tl.max(tl.where(live, u, float("-inf")), 0)
    return tl.where(live, function_of(u, scale, MAP[2]) + shift, 0.0), scale


@triton.jit
def one_token(
    q, k, v, decay, log_weight, S, z, M, omega, bias, o, S_new, z_new, M_new,
    q_b, q_h, k_b, k_h, v_b, v_h, decay_b, decay_h, weight_b, weight_h, omega_b, omega_h, bias_b, bias_h,
    G, R, eps, factor, square, offset, shift,
    F: tl.constexpr, E: tl.constexpr, BF: tl.constexpr, BE: tl.constexpr, MAP: tl.constexpr,
    DECAY: tl.constexpr, CHANNELS: tl.constexpr, WEIGHTED: tl.constexpr, GIVEN: tl.constexpr,
    HAS_M: tl.constexpr, NORMALIZE: tl.constexpr,
):  # fmt: skip
    """S ← keep·S + φ(k) vᵀ, z likewise, and o (b, h, e) of all heads that share it.

    A program holds all of one state's features, and all of its values, BE at a time: so it alone reads and writes z and M,
    and in place is safe, with a barrier between loads and stores: small tiles are read by several warps, each for itself.
    """
    b, g = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    place, cf = b * G + g, tl.arange(0, BF)
    live = cf < F
    omega += b * omega_b + g * omega_h
    bias += b * bias_b + g * bias_h
    projection = (omega, bias, factor, square, offset, shift)
    phi_k, weight = vector(k + b * k_b + g * k_h, cf, projection, F, MAP)
    keep = tl.zeros((BF,), tl.float32)
    if DECAY:
        decay += b * decay_b + g * decay_h
        if CHANNELS:
            keep = tl.load(decay + cf, mask=live, other=0.0).to(tl.float32)
        else:
            keep += tl.load(decay).to(tl.float32)
    top = tl.full((), 0.0, tl.float32)
    if WEIGHTED:
        if GIVEN:
            weight += tl.load(log_weight + b * weight_b + g * weight_h).to(tl.float32)
        before = tl.full((), 0.0, tl.float32)
        if HAS_M:
            before = tl.load(M + place)
        tl.debug_barrier()  # all threads have read what one of them writes now: in place, M_new is M
        M_now = tl.maximum(before + tl.max(tl.where(live, keep, float("-inf")), 0), weight)
        tl.store(M_new + place, M_now)
        top = finite(M_now)
        keep += before - top
        phi_k = phi_k * exp(weight - top)
    keep = exp(keep)
    sums = keep * tl.load(z + place * F + cf, mask=live, other=0.0) + phi_k
    tl.debug_barrier()
    tl.store(z_new + place * F + cf, sums, mask=live)
    for e in range(0, E, BE):
        ce = e + tl.arange(0, BE)
        inside = live[:, None] & (ce < E)[None, :]
        tile = place * F * E + cf[:, None] * E + ce[None, :]
        values = tl.load(v + b * v_b + g * v_h + ce, mask=ce < E, other=0.0).to(tl.float32)
        state = tl.load(S + tile, mask=inside, other=0.0)
        state = keep[:, None] * state + phi_k[:, None] * values[None, :]
        tl.debug_barrier()
        tl.store(S_new + tile, state, mask=inside)
        for head in range(R):
            h = g * R + head
            phi_q, scale = vector(q + b * q_b + h * q_h, cf, projection, F, MAP)
            out, den = tl.sum(phi_q[:, None] * state, 0), tl.sum(phi_q * sums, 0)
            if NORMALIZE:
                out = out * tl.where(den == 0, 0.0, 1.0 / (den + eps))
            elif WEIGHTED:
                out = out * accurate_exp(top + scale)
            at = o + (b * G * R + h) * E + ce
            tl.store(at, out.to(o.dtype.element_ty), mask=ce < E)
