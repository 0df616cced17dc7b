"""Forward: the sums of each item (a stretch of one sequence), their prefix, and the outputs.

An item is a row of `items`: the batch row, its first and last position, its first chunk, its sequence. One item per
sequence: only `outputs` runs, with the state in registers from end to end. More: `state_sums` of each item, then
`prefix`, then `outputs` of each from its own state.
"""

import triton
import triton.language as tl

from tarnn.kernels.triton.tiles import (
    absorbed,
    accurate_exp,
    chunk_keys,
    entering,
    features,
    finite,
    item_of,
    load_rows,
    load_state,
    lowered,
    pair_products,
    product,
    projection_of,
    query_factors,
    row_maxima,
    store_rows,
    store_state,
)


@triton.jit(do_not_specialize=["T", "G", "mask_b"])
def state_sums(keys, v, mask, mask_b, projection, items, S, z, kept, T, G, spec: tl.constexpr):
    """S (item, g, f, e) and z (item, g, f) of an item's own keys, in units of the M behind it; kept (item, g, f): what
    the state before it is multiplied with on its way through."""
    item, g, block = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64), tl.program_id(2)
    row, start, stop, chunk, place = item_of(items, item, g, G, False)
    rows, cf, ce = tl.arange(0, spec.C), tl.arange(0, spec.BF), block * spec.BE + tl.arange(0, spec.BE)
    own = projection_of(projection, row, g)
    state, sums = tl.full((spec.BF, spec.BE), 0.0, tl.float32), tl.full((spec.BF,), 0.0, tl.float32)
    through = tl.full((spec.BF,), 1.0, tl.float32)
    for t0 in range(start, stop, spec.C):
        at = (row * G + g) * T + t0
        live, _u, phi, factors = chunk_keys(keys, mask + row * mask_b, row, g, t0, stop, at, chunk, rows, cf, own, spec)
        values = lowered(load_rows(v, row, g, t0, rows, live, ce, spec.E), spec)
        phi, keeps = entering(phi, factors, spec)
        state, sums = absorbed(state * keeps[:, None], sums * keeps, phi, values, 1.0, spec)
        through = through * keeps
        chunk += G
    store_state(S + place * spec.F * spec.E, cf, ce, spec.F, spec.E, state)
    if block == 0:
        tl.store(z + place * spec.F + cf, sums, mask=cf < spec.F)
        if spec.weighing:
            tl.store(kept + place * spec.F + cf, through, mask=cf < spec.F)


@triton.jit(do_not_specialize=["G", "F", "E", "GIVEN", "REVERSE"])
def prefix(
    sums, kept, before, begin, after, sequences, G, F, E, GIVEN, REVERSE,
    B: tl.constexpr, KEPT: tl.constexpr, SCALED: tl.constexpr,
):  # fmt: skip
    """Sums (item, g, f, e) of items become those of all items before each; in reverse, of all behind. `after` (n, g, f, e)
    is the total. `begin` (n, g) scales the state before the first item, and in reverse its gradient."""
    n, g = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    i = tl.program_id(2) * B + tl.arange(0, B)
    live = i < F * E
    first, end = tl.load(sequences + n * 4), tl.load(sequences + n * 4 + 1)
    total = tl.load(before + (n * G + g) * F * E + i, mask=live & (GIVEN != 0), other=0.0)
    if SCALED:
        total *= tl.where(REVERSE != 0, 1.0, tl.load(begin + n * G + g))
    for step in range(end - first):
        item = tl.where(REVERSE != 0, end - 1 - step, first + step)
        place = item.to(tl.int64) * G + g
        own = tl.load(sums + place * F * E + i, mask=live, other=0.0)
        tl.store(sums + place * F * E + i, total, mask=live)
        if KEPT:
            total *= tl.load(kept + place * F + i // E, mask=live, other=0.0)
        total += own
    if SCALED:
        total *= tl.where(REVERSE != 0, tl.load(begin + n * G + g), 1.0)
    tl.store(after + (n * G + g) * F * E + i, total, mask=live)


@triton.jit(do_not_specialize=["T", "G", "mask_b", "GIVEN", "KEEP_STATE", "KEEP_DEN"])
def outputs(
    q, scale_q, keys, v, mask, mask_b, o, den, projection, M_end, items, S_in, z_in, S_out, z_out, T, G, R,
    GIVEN, KEEP_STATE, KEEP_DEN, eps, spec: tl.constexpr,
):  # fmt: skip
    """o (b, h, t, e) and den (b, h, t) of an item's queries, from the state before it; where not causal, from that of all
    keys. KEEP_STATE: the state behind is wanted too, of an item that is a whole sequence."""
    item, h, block = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64), tl.program_id(2)
    g, H = h // R, G * R
    row, start, stop, chunk, place = item_of(items, item, g, G, not spec.causal)
    rows, cf, ce = tl.arange(0, spec.C), tl.arange(0, spec.BF), block * spec.BE + tl.arange(0, spec.BE)
    own = projection_of(projection, row, g)
    state = load_state(S_in + place * spec.F * spec.E, cf, ce, GIVEN, spec.F, spec.E)
    sums = tl.load(z_in + place * spec.F + cf, mask=(cf < spec.F) & (GIVEN != 0), other=0.0)
    for t0 in range(start, stop, spec.C):
        inside = t0 + rows < stop
        at_q, at = (row * H + h) * T + t0, (row * G + g) * T + t0
        _u_q, phi_q = features(q, row, h, t0, scale_q + at_q, rows, inside, cf, own, spec)
        M_rows = tl.full((spec.C,), 0.0, tl.float32)
        if spec.function == 4:
            M_rows = tl.load(scale_q + at_q + rows, mask=inside, other=0.0)
        if spec.causal:
            live, _u_k, phi_k, factors = chunk_keys(
                keys, mask + row * mask_b, row, g, t0, stop, at, chunk, rows, cf, own, spec
            )
            values = lowered(load_rows(v, row, g, t0, rows, live, ce, spec.E), spec)
            pair, seen = query_factors(factors, spec)
            products = pair_products(phi_q, phi_k, factors, spec) * pair
            low_q = lowered(phi_q * seen, spec)
            out = product(low_q, lowered(state, spec), spec)
            out = tl.dot(lowered(products, spec), values, out, input_precision=spec.precision)
            total = tl.sum(low_q.to(tl.float32) * sums[None, :], 1) + tl.sum(products, 1)
            if spec.weighted and not spec.normalize:
                M_rows += row_maxima(factors[0], factors[1], factors[2], spec)
            phi_k, keeps = entering(phi_k, factors, spec)
            state, sums = absorbed(state * keeps[:, None], sums * keeps, phi_k, values, 1.0, spec)
        else:
            low_q = lowered(phi_q, spec)
            out = product(low_q, lowered(state, spec), spec)
            total = tl.sum(low_q.to(tl.float32) * sums[None, :], 1)
            if spec.weighted and not spec.normalize:
                M_rows += finite(tl.load(M_end + place))
        if spec.normalize:
            out = out * tl.where(total == 0, 0.0, 1.0 / (total + eps))[:, None]
        elif spec.weighted:
            if spec.function == 4:  # a query that meets no key: e^−10,000 is 0
                M_rows = tl.where(total == 0, -1e4, M_rows)
            out = out * accurate_exp(M_rows)[:, None]
        store_rows(o, row, h, t0, rows, inside, ce, spec.E, out)
        if (KEEP_DEN != 0) & (block == 0):
            tl.store(den + at_q + rows, total, mask=inside)
        chunk += G
    if (KEEP_STATE != 0) & (h % R == 0):
        store_state(S_out + place * spec.F * spec.E, cf, ce, spec.F, spec.E, state)
        if block == 0:
            tl.store(z_out + place * spec.F + cf, sums, mask=cf < spec.F)
