"""Forward: the sums of each item (a stretch of one sequence), their prefix, and the outputs.

An item is a row of `items`: the batch row, its first and last position, its first chunk, its sequence. One item per
sequence: only `outputs` runs, with the state in registers from end to end. More: `state_sums` of each item, then
`prefix`, then `outputs` of each from its own state.
"""

import triton
import triton.language as tl

from tarnn.kernels.triton.tiles import (
    accurate_exp,
    behind,
    channel_products,
    chunk_factors,
    features,
    finite,
    item_of,
    key_and_keep,
    live_rows,
    load_channels,
    load_rows,
    load_state,
    lowered,
    pair_and_query,
    product,
    row_maxima,
    store_rows,
    store_state,
    up_to,
)


@triton.jit(do_not_specialize=["T", "G", "mask_b"])
def state_sums(
    k, v, w, d, decay, mask, scale, omega, bias, M_in, M_out, items, S, z, kept,
    k_b, k_h, k_t, v_b, v_h, v_t, decay_b, decay_h, decay_t, mask_b, omega_b, omega_h, bias_b, bias_h,
    T, G, factor, square, offset, shift,
    F: tl.constexpr, E: tl.constexpr, BF: tl.constexpr, BE: tl.constexpr, C: tl.constexpr, MAP: tl.constexpr,
    DECAY: tl.constexpr, CHANNELS: tl.constexpr, WEIGHTED: tl.constexpr, MASKED: tl.constexpr,
    LOW: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """S (item, g, f, e) and z (item, g, f) of an item's own keys, in units of the M behind it; kept (item, g, f): what
    the state before it is multiplied with on its way through."""
    item, g, block = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64), tl.program_id(2)
    row, start, stop, chunk, place = item_of(items, item, g, G, False)
    rows, cf, ce = tl.arange(0, C), tl.arange(0, BF), block * BE + tl.arange(0, BE)
    k += row * k_b + g * k_h + start.to(tl.int64) * k_t
    v += row * v_b + g * v_h + start.to(tl.int64) * v_t
    decay += row * decay_b + g * decay_h + start.to(tl.int64) * decay_t
    omega += row * omega_b + g * omega_h
    bias += row * bias_b + g * bias_h
    projection = (omega, bias, factor, square, offset, shift)
    at = (row * G + g) * T + start
    state, sums, through = tl.zeros((BF, BE), tl.float32), tl.zeros((BF,), tl.float32), tl.full((BF,), 1.0, tl.float32)
    for t0 in range(start, stop, C):
        inside = t0 + rows < stop
        live = live_rows(mask + row * mask_b, t0, stop, rows, MASKED)
        _u, phi = features(k, k_t, scale + at, rows, live, cf, projection, F, MAP)
        values = lowered(load_rows(v, v_t, rows, live, ce, E), LOW, PRECISION)
        weight, lost, M_a, M_b = chunk_factors(w, d, M_in, M_out, at, chunk, rows, inside, C, DECAY, WEIGHTED)
        if DECAY or WEIGHTED:
            key, keep = key_and_keep(weight, lost, M_a, M_b, C, DECAY, WEIGHTED)
            phi = phi * key[:, None]
            state, sums, through = state * keep, sums * keep, through * keep
        if CHANNELS:
            channels = load_channels(decay, decay_t, rows, live, cf, lost, F, DECAY)
            phi = phi * behind(channels, C, C)
            keeps = tl.exp2(tl.sum(channels, 0))
            state, sums, through = state * keeps[:, None], sums * keeps, through * keeps
        low = lowered(phi, LOW, PRECISION)
        state = tl.dot(tl.trans(low), values, state, input_precision=PRECISION)
        sums += tl.sum(low.to(tl.float32), 0)
        k += C * k_t
        v += C * v_t
        decay += C * decay_t
        at += C
        chunk += G
    store_state(S + place * F * E, cf, ce, F, E, state)
    if block == 0:
        tl.store(z + place * F + cf, sums, mask=cf < F)
        if DECAY or WEIGHTED or CHANNELS:
            tl.store(kept + place * F + cf, through, mask=cf < F)


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
    q, k, v, o, den, w, d, decay, mask, scale_q, scale_k, omega, bias, M_in, M_out, M_end, items, S_in, z_in, S_out, z_out,
    q_b, q_h, q_t, k_b, k_h, k_t, v_b, v_h, v_t, o_b, o_h, o_t, decay_b, decay_h, decay_t, mask_b,
    omega_b, omega_h, bias_b, bias_h, T, G, R, GIVEN, KEEP_STATE, KEEP_DEN, eps, factor, square, offset, shift,
    F: tl.constexpr, E: tl.constexpr, BF: tl.constexpr, BE: tl.constexpr, C: tl.constexpr, MAP: tl.constexpr,
    DECAY: tl.constexpr, CHANNELS: tl.constexpr, WEIGHTED: tl.constexpr, MASKED: tl.constexpr, CAUSAL: tl.constexpr,
    NORMALIZE: tl.constexpr, LOW: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """o (b, h, t, e) and den (b, h, t) of an item's queries, from the state before it; where not causal, from that of all
    keys. KEEP_STATE: the state behind is wanted too, of an item that is a whole sequence."""
    item, h, block = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64), tl.program_id(2)
    g, H = h // R, G * R
    row, start, stop, chunk, place = item_of(items, item, g, G, not CAUSAL)
    rows, cf, ce = tl.arange(0, C), tl.arange(0, BF), block * BE + tl.arange(0, BE)
    q += row * q_b + h * q_h + start.to(tl.int64) * q_t
    k += row * k_b + g * k_h + start.to(tl.int64) * k_t
    v += row * v_b + g * v_h + start.to(tl.int64) * v_t
    decay += row * decay_b + g * decay_h + start.to(tl.int64) * decay_t
    omega += row * omega_b + g * omega_h
    bias += row * bias_b + g * bias_h
    projection = (omega, bias, factor, square, offset, shift)
    at_q, at = (row * H + h) * T + start, (row * G + g) * T + start
    o += row * o_b + h * o_h + start.to(tl.int64) * o_t
    state = load_state(S_in + place * F * E, cf, ce, GIVEN, F, E)
    sums = tl.load(z_in + place * F + cf, mask=(cf < F) & (GIVEN != 0), other=0.0)
    lower = rows[:, None] >= rows[None, :]
    for t0 in range(start, stop, C):
        inside = t0 + rows < stop
        _u_q, phi_q = features(q, q_t, scale_q + at_q, rows, inside, cf, projection, F, MAP)
        phi_q = lowered(phi_q, LOW, PRECISION).to(tl.float32)
        M_rows = tl.zeros((C,), tl.float32)
        if MAP[2] == 4:
            M_rows = tl.load(scale_q + at_q + rows, mask=inside, other=0.0)
        if CAUSAL:
            live = live_rows(mask + row * mask_b, t0, stop, rows, MASKED)
            _u_k, phi_k = features(k, k_t, scale_k + at, rows, live, cf, projection, F, MAP)
            values = lowered(load_rows(v, v_t, rows, live, ce, E), LOW, PRECISION)
            weight, lost, M_a, M_b = chunk_factors(w, d, M_in, M_out, at, chunk, rows, inside, C, DECAY, WEIGHTED)
            seen_q, seen_k, keeps = phi_q, phi_k, tl.full((BF,), 1.0, tl.float32)
            if CHANNELS:
                channels = load_channels(decay, decay_t, rows, live, cf, lost, F, DECAY)
                products = channel_products(phi_q, phi_k, channels, C, LOW, PRECISION)
                seen_q, seen_k = phi_q * up_to(channels, C, C), phi_k * behind(channels, C, C)
                keeps = tl.exp2(tl.sum(channels, 0))
            else:
                turned = tl.trans(lowered(phi_k, LOW, PRECISION))
                products = product(lowered(phi_q, LOW, PRECISION), turned, PRECISION)
            products = tl.where(lower, products, 0.0)
            low_q = lowered(seen_q, LOW, PRECISION)
            out = product(low_q, lowered(state, LOW, PRECISION), PRECISION)
            total = tl.sum(low_q.to(tl.float32) * sums[None, :], 1)
            if DECAY or WEIGHTED:
                pair, query = pair_and_query(weight, lost, M_a, C, DECAY, WEIGHTED)
                products, out, total = products * pair, out * query[:, None], total * query
                key, keep = key_and_keep(weight, lost, M_a, M_b, C, DECAY, WEIGHTED)
                seen_k, keeps = seen_k * key[:, None], keeps * keep
                if WEIGHTED and not NORMALIZE:
                    M_rows += row_maxima(weight, lost, M_a, C, DECAY)
            out = tl.dot(lowered(products, LOW, PRECISION), values, out, input_precision=PRECISION)
            total += tl.sum(products, 1)
            if DECAY or WEIGHTED or CHANNELS:
                state, sums = state * keeps[:, None], sums * keeps
            low_k = lowered(seen_k, LOW, PRECISION)
            state = tl.dot(tl.trans(low_k), values, state, input_precision=PRECISION)
            sums += tl.sum(low_k.to(tl.float32), 0)
        else:
            low_q = lowered(phi_q, LOW, PRECISION)
            out = product(low_q, lowered(state, LOW, PRECISION), PRECISION)
            total = tl.sum(phi_q * sums[None, :], 1)
            if WEIGHTED and not NORMALIZE:
                M_rows += finite(tl.load(M_end + place))
        if NORMALIZE:
            out = out * tl.where(total == 0, 0.0, 1.0 / (total + eps))[:, None]
        elif WEIGHTED:
            out = out * accurate_exp(M_rows)[:, None]
        store_rows(o, o_t, rows, inside, ce, E, out)
        if (KEEP_DEN != 0) & (block == 0):
            tl.store(den + at_q + rows, total, mask=inside)
        q += C * q_t
        k += C * k_t
        v += C * v_t
        decay += C * decay_t
        o += C * o_t
        at_q += C
        at += C
        chunk += G
    if (KEEP_STATE != 0) & (h % R == 0):
        store_state(S_out + place * F * E, cf, ce, F, E, state)
        if block == 0:
            tl.store(z_out + place * F + cf, sums, mask=cf < F)
