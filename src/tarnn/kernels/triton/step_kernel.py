"""One token for all rows and heads in one launch: a product of a vector and a matrix, so in plain multiplications."""

import triton
import triton.language as tl

from tarnn.kernels.triton.tiles import accurate_exp, address, exp, finite, function_of, projection_of


@triton.jit
def vector(x, columns, projection, spec: tl.constexpr):
    """φ(x) (f,) and its log-scale: 0 but for exp."""
    omega, bias, factor, square, offset, shift = projection
    live = columns < spec.F
    if spec.projected:
        u, length = tl.full(columns.shape, 0.0, tl.float32), tl.full((), 0.0, tl.float32)
        for d0 in range(0, spec.D, spec.BD):
            d = d0 + tl.arange(0, spec.BD)
            part = tl.load(x + d, mask=d < spec.D, other=0.0).to(tl.float32)
            inside = live[:, None] & (d < spec.D)[None, :]
            rows = tl.load(omega + columns[:, None] * spec.D + d[None, :], mask=inside, other=0.0)
            u += tl.sum(rows * part[None, :], 1)
            length += tl.sum(part * part, 0)
        u = factor * u + offset - square * length
        if spec.biased:
            u += tl.load(bias + columns, mask=live, other=0.0)
    else:
        u = tl.load(x + columns, mask=live, other=0.0).to(tl.float32)
    scale = tl.full((), 0.0, tl.float32)
    if spec.function == 4:
        scale = tl.max(tl.where(live, u, float("-inf")), 0)
    return tl.where(live, function_of(u, scale, spec.function) + shift, 0.0), scale


@triton.jit
def one_token(
    q, k, v, decay, log_weight, S, z, M, projection, o, S_new, z_new, M_new, G, R, eps,
    GIVEN: tl.constexpr, HAS_M: tl.constexpr, spec: tl.constexpr,
):  # fmt: skip
    """S ← keep·S + φ(k) vᵀ, z likewise, and o (b, h, e) of all heads that share it.

    A program holds all of one state's features, and all of its values, BE at a time: so it alone reads and writes z and M,
    and in place is safe, with a barrier between loads and stores: small tiles are read by several warps, each for itself.
    """
    b, g = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    place, cf = b * G + g, tl.arange(0, spec.BF)
    live = cf < spec.F
    own = projection_of(projection, b, g)
    phi_k, weight = vector(address(k, b, g, 0), cf, own, spec)
    keep = tl.full((spec.BF,), 0.0, tl.float32)
    if spec.decay:
        if spec.channels:
            keep = tl.load(address(decay, b, g, 0) + cf, mask=live, other=0.0).to(tl.float32)
        else:
            keep += tl.load(address(decay, b, g, 0)).to(tl.float32)
    top = tl.full((), 0.0, tl.float32)
    if spec.weighted:
        if GIVEN:
            weight += tl.load(address(log_weight, b, g, 0)).to(tl.float32)
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
    sums = keep * tl.load(z + place * spec.F + cf, mask=live, other=0.0) + phi_k
    tl.debug_barrier()
    tl.store(z_new + place * spec.F + cf, sums, mask=live)
    for e in range(0, spec.E, spec.BE):
        ce = e + tl.arange(0, spec.BE)
        inside = live[:, None] & (ce < spec.E)[None, :]
        tile = place * spec.F * spec.E + cf[:, None] * spec.E + ce[None, :]
        values = tl.load(address(v, b, g, 0) + ce, mask=ce < spec.E, other=0.0).to(tl.float32)
        state = tl.load(S + tile, mask=inside, other=0.0)
        state = keep[:, None] * state + phi_k[:, None] * values[None, :]
        tl.debug_barrier()
        tl.store(S_new + tile, state, mask=inside)
        for head in range(R):
            h = g * R + head
            phi_q, scale = vector(address(q, b, h, 0), cf, own, spec)
            out, den = tl.sum(phi_q[:, None] * state, 0), tl.sum(phi_q * sums, 0)
            if spec.normalize:
                out = out * tl.where(den == 0, 0.0, 1.0 / (den + eps))
            elif spec.weighted:
                if spec.function == 4:
                    scale = tl.where(den == 0, -1e4, scale)
                out = out * accurate_exp(top + scale)
            at = o + (b * G * R + h) * spec.E + ce
            tl.store(at, out.to(o.dtype.element_ty), mask=ce < spec.E)
