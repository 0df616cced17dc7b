"""Backward: queries in a sweep forward, keys and values in sweeps in reverse; features are computed again in each.

G (b, h, t, e) = grad_o·r and G_z (b, h, t) are the gradients of numerators and denominators, R (f, e) and R_z (f,) those
of the state behind a chunk. Heads that share keys are gone through within a program, so nothing is added atomically.
"""

import triton
import triton.language as tl

from tarnn.kernels.triton.tiles import (
    LEVELS,
    accurate_exp,
    anchored,
    behind,
    channel_products,
    chunk_factors,
    chunk_of,
    exact,
    features,
    finite,
    item_of,
    key_and_keep,
    live_rows,
    load_channels,
    load_rows,
    load_state,
    lowered,
    on_diagonal,
    pair_and_query,
    product,
    row_maxima,
    store_rows,
    store_state,
    through_function,
    up_to,
)


@triton.jit(do_not_specialize=["T", "S", "G", "E"])
def gradient_rows(
    grad_o, o, den, scale_q, w, d, M_in, M_end, chunks, r, gz, grad_b, grad_h, grad_t, o_b, o_h, o_t, T, S, G, R, E, eps,
    BE: tl.constexpr, C: tl.constexpr, MAP: tl.constexpr, DECAY: tl.constexpr,
    WEIGHTED: tl.constexpr, CAUSAL: tl.constexpr, NORMALIZE: tl.constexpr,
):  # fmt: skip
    """r (b, h, t), what a numerator is multiplied with to be an output, and G_z = −r Σ_e grad_o·o."""
    chunk, h = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    g, H = h // R, G * R
    row, start, stop = chunk_of(chunks, chunk)
    rows = tl.arange(0, C)
    live = start + rows < stop
    at = (row * H + h) * T + start
    factor = tl.full((C,), 1.0, tl.float32)
    through = tl.zeros((C,), tl.float32)
    if NORMALIZE:
        total = tl.load(den + at + rows, mask=live, other=0.0)
        factor = tl.where(total == 0, 0.0, 1.0 / (total + eps))
        grad_o += row * grad_b + h * grad_h + start.to(tl.int64) * grad_t
        o += row * o_b + h * o_h + start.to(tl.int64) * o_t
        for e in range(0, E, BE):
            ce = e + tl.arange(0, BE)
            mask = live[:, None] & (ce < E)[None, :]
            given = tl.load(grad_o + rows[:, None] * grad_t + ce[None, :], mask=mask, other=0.0).to(tl.float32)
            out = tl.load(o + rows[:, None] * o_t + ce[None, :], mask=mask, other=0.0).to(tl.float32)
            through -= tl.sum(given * out, 1)
    elif WEIGHTED:
        M = tl.zeros((C,), tl.float32)
        if MAP[2] == 4:
            M = tl.load(scale_q + at + rows, mask=live, other=0.0)
        if CAUSAL:
            of_keys = (row * G + g) * S + start + rows
            lost = tl.zeros((C,), tl.float32)
            if DECAY:
                lost = tl.load(d + of_keys, mask=live, other=0.0)
            weight = tl.load(w + of_keys, mask=live, other=float("-inf"))
            M += row_maxima(weight, lost, tl.load(M_in + chunk * G + g), C, DECAY)
        else:
            sequence = tl.load(chunks + chunk * 4 + 3).to(tl.int64)
            M += finite(tl.load(M_end + sequence * G + g))
        factor = accurate_exp(M)
    tl.store(r + at + rows, factor, mask=live)
    tl.store(gz + at + rows, factor * through, mask=live)


@triton.jit
def gradient_tile(grad_o, grad_t, r, at, rows, live, columns, E: tl.constexpr):
    """G (C, B)."""
    given = load_rows(grad_o, grad_t, rows, live, columns, E).to(tl.float32)
    return given * tl.load(r + at + rows, mask=live, other=0.0)[:, None]


@triton.jit(do_not_specialize=["T", "G", "mask_b"])
def gradient_sums(
    q, grad_o, r, gz, w, d, decay, mask, scale_q, omega, bias, M_in, M_out, items, S, z,
    q_b, q_h, q_t, grad_b, grad_h, grad_t, decay_b, decay_h, decay_t, mask_b, omega_b, omega_h, bias_b, bias_h,
    T, G, R, factor, square, offset, shift,
    F: tl.constexpr, E: tl.constexpr, BF: tl.constexpr, BE: tl.constexpr, C: tl.constexpr, MAP: tl.constexpr,
    DECAY: tl.constexpr, CHANNELS: tl.constexpr, WEIGHTED: tl.constexpr, MASKED: tl.constexpr, CAUSAL: tl.constexpr,
    LOW: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """R (item, g, f, e) and R_z (item, g, f): what an item's own queries send to the state before it."""
    item, g, block = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64), tl.program_id(2)
    H = G * R
    row, start, stop, first, place = item_of(items, item, g, G, False)
    rows, cf, ce = tl.arange(0, C), tl.arange(0, BF), block * BE + tl.arange(0, BE)
    omega += row * omega_b + g * omega_h
    bias += row * bias_b + g * bias_h
    projection = (omega, bias, factor, square, offset, shift)
    state, sums = tl.zeros((BF, BE), tl.float32), tl.zeros((BF,), tl.float32)
    number = tl.cdiv(stop - start, C)
    for step in range(number):
        t0 = start + (number - 1 - step) * C
        inside = t0 + rows < stop
        query, through = tl.full((C,), 1.0, tl.float32), tl.full((C, BF), 1.0, tl.float32)
        if CAUSAL and (DECAY or WEIGHTED or CHANNELS):
            at = (row * G + g) * T + t0
            chunk = first + (number - 1 - step) * G
            weight, lost, M_a, M_b = chunk_factors(w, d, M_in, M_out, at, chunk, rows, inside, C, DECAY, WEIGHTED)
            if DECAY or WEIGHTED:
                _pair, query = pair_and_query(weight, lost, M_a, C, DECAY, WEIGHTED)
                _key, keep = key_and_keep(weight, lost, M_a, M_b, C, DECAY, WEIGHTED)
                state, sums = state * keep, sums * keep
            if CHANNELS:
                live = live_rows(mask + row * mask_b, t0, stop, rows, MASKED)
                begin = decay + row * decay_b + g * decay_h + t0.to(tl.int64) * decay_t
                channels = load_channels(begin, decay_t, rows, live, cf, lost, F, DECAY)
                keeps = tl.exp2(tl.sum(channels, 0))
                state, sums, through = state * keeps[:, None], sums * keeps, up_to(channels, C, C)
        for head in range(R):
            h = g * R + head
            at_q = (row * H + h) * T + t0
            begin_q = q + row * q_b + h * q_h + t0.to(tl.int64) * q_t
            _u, phi = features(begin_q, q_t, scale_q + at_q, rows, inside, cf, projection, F, MAP)
            begin_g = grad_o + row * grad_b + h * grad_h + t0.to(tl.int64) * grad_t
            grad = gradient_tile(begin_g, grad_t, r, at_q, rows, inside, ce, E)
            low = lowered(phi * through * query[:, None], LOW, PRECISION)
            state = tl.dot(tl.trans(low), lowered(grad, LOW, PRECISION), state, input_precision=PRECISION)
            of_den = tl.load(gz + at_q + rows, mask=inside, other=0.0)
            sums += tl.sum(low.to(tl.float32) * of_den[:, None], 0)
    store_state(S + place * F * E, cf, ce, F, E, state)
    if block == 0:
        tl.store(z + place * F + cf, sums, mask=cf < F)


@triton.jit(do_not_specialize=["T", "G", "mask_b", "GIVEN"])
def query_gradients(
    q, k, v, grad_o, r, gz, dq, w, d, decay, mask, scale_q, scale_k, omega, bias, M_in, M_out, items, S_in, z_in,
    q_b, q_h, q_t, k_b, k_h, k_t, v_b, v_h, v_t, grad_b, grad_h, grad_t, dq_b, dq_h, dq_t, decay_b, decay_h, decay_t,
    mask_b, omega_b, omega_h, bias_b, bias_h, T, G, R, GIVEN, factor, square, offset, shift,
    F: tl.constexpr, E: tl.constexpr, BF: tl.constexpr, BE: tl.constexpr, C: tl.constexpr, MAP: tl.constexpr,
    DECAY: tl.constexpr, CHANNELS: tl.constexpr, WEIGHTED: tl.constexpr, MASKED: tl.constexpr, CAUSAL: tl.constexpr,
    LOW: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dq (b, h, t, d) of an item, BF channels of it; of projected features ∂/∂u (b, h, t, f)."""
    item, h, block = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64), tl.program_id(2)
    g, H = h // R, G * R
    row, start, stop, chunk, place = item_of(items, item, g, G, not CAUSAL)
    rows, cf, ce = tl.arange(0, C), block * BF + tl.arange(0, BF), tl.arange(0, BE)
    q += row * q_b + h * q_h + start.to(tl.int64) * q_t
    k += row * k_b + g * k_h + start.to(tl.int64) * k_t
    v += row * v_b + g * v_h + start.to(tl.int64) * v_t
    grad_o += row * grad_b + h * grad_h + start.to(tl.int64) * grad_t
    dq += row * dq_b + h * dq_h + start.to(tl.int64) * dq_t
    decay += row * decay_b + g * decay_h + start.to(tl.int64) * decay_t
    omega += row * omega_b + g * omega_h
    bias += row * bias_b + g * bias_h
    projection = (omega, bias, factor, square, offset, shift)
    at_q, at = (row * H + h) * T + start, (row * G + g) * T + start
    state = load_state(S_in + place * F * E, cf, ce, GIVEN, F, E)
    sums = tl.load(z_in + place * F + cf, mask=(cf < F) & (GIVEN != 0), other=0.0)
    lower = rows[:, None] >= rows[None, :]
    for t0 in range(start, stop, C):
        inside = t0 + rows < stop
        u, phi = features(q, q_t, scale_q + at_q, rows, inside, cf, projection, F, MAP)
        grad = lowered(gradient_tile(grad_o, grad_t, r, at_q, rows, inside, ce, E), LOW, PRECISION)
        of_den = tl.load(gz + at_q + rows, mask=inside, other=0.0)
        read = product(grad, tl.trans(lowered(state, LOW, PRECISION)), PRECISION) + of_den[:, None] * sums[None, :]
        if CAUSAL:
            live = live_rows(mask + row * mask_b, t0, stop, rows, MASKED)
            _u_k, phi_k = features(k, k_t, scale_k + at, rows, live, cf, projection, F, MAP)
            values = lowered(load_rows(v, v_t, rows, live, ce, E), LOW, PRECISION)
            of_pairs = product(grad, tl.trans(values), PRECISION) + of_den[:, None]
            of_pairs = tl.where(lower, of_pairs, 0.0)
            weight, lost, M_a, M_b = chunk_factors(w, d, M_in, M_out, at, chunk, rows, inside, C, DECAY, WEIGHTED)
            seen_k, keeps = phi_k, tl.full((BF,), 1.0, tl.float32)
            if DECAY or WEIGHTED:
                pair, query = pair_and_query(weight, lost, M_a, C, DECAY, WEIGHTED)
                key, keep = key_and_keep(weight, lost, M_a, M_b, C, DECAY, WEIGHTED)
                of_pairs, read = of_pairs * pair, read * query[:, None]
                seen_k, keeps = seen_k * key[:, None], keeps * keep
            if CHANNELS:
                channels = load_channels(decay, decay_t, rows, live, cf, lost, F, DECAY)
                read = read * up_to(channels, C, C)
                read += tl.sum(tl.where(on_diagonal(C), of_pairs, 0.0), 1)[:, None] * phi_k
                for level in tl.static_range(LEVELS):
                    right = lowered(phi_k * behind(channels, 1 << level, C), LOW, PRECISION)
                    part = lowered(tl.where(anchored(1 << level, C), of_pairs, 0.0), LOW, PRECISION)
                    part = tl.dot(part, right, input_precision=PRECISION)
                    read += part * up_to(channels, 1 << level, C)
                seen_k, keeps = seen_k * behind(channels, C, C), keeps * tl.exp2(tl.sum(channels, 0))
            else:
                read = tl.dot(
                    lowered(of_pairs, LOW, PRECISION), lowered(phi_k, LOW, PRECISION), read, input_precision=PRECISION
                )
            if DECAY or WEIGHTED or CHANNELS:
                state, sums = state * keeps[:, None], sums * keeps
            low = lowered(seen_k, LOW, PRECISION)
            state = tl.dot(tl.trans(low), values, state, input_precision=PRECISION)
            sums += tl.sum(low.to(tl.float32), 0)
        store_rows(dq, dq_t, rows, inside, cf, F, through_function(u, phi, shift, read, MAP[2]))
        q += C * q_t
        k += C * k_t
        v += C * v_t
        grad_o += C * grad_t
        dq += C * dq_t
        decay += C * decay_t
        at_q += C
        at += C
        chunk += G


@triton.jit(do_not_specialize=["T", "B", "G", "mask_b", "GIVEN", "KEEP_STATE"])
def key_gradients(
    q, k, v, grad_o, r, gz, dk, dw, w, d, decay, mask, scale_q, scale_k, omega, bias, M_in, M_out, items,
    S_behind, z_behind, S_before, z_before,
    q_b, q_h, q_t, k_b, k_h, k_t, v_b, v_h, v_t, grad_b, grad_h, grad_t, dk_b, dk_h, dk_t, decay_b, decay_h, decay_t,
    mask_b, omega_b, omega_h, bias_b, bias_h, T, B, G, R, GIVEN, KEEP_STATE, factor, square, offset, shift,
    F: tl.constexpr, E: tl.constexpr, BF: tl.constexpr, BE: tl.constexpr, C: tl.constexpr, MAP: tl.constexpr,
    DECAY: tl.constexpr, CHANNELS: tl.constexpr, WEIGHTED: tl.constexpr, MASKED: tl.constexpr, CAUSAL: tl.constexpr,
    KEEP_WEIGHT: tl.constexpr, LOW: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dk (b, g, s, d) of an item, BF channels of it (of projected features ∂/∂u), and their share of ∂/∂w.

    KEEP_STATE: the gradient of the state before is wanted too, of an item that is a whole sequence.
    """
    item, g, block = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64), tl.program_id(2)
    H = G * R
    row, start, stop, first, place = item_of(items, item, g, G, not CAUSAL)
    rows, cf, ce = tl.arange(0, C), block * BF + tl.arange(0, BF), tl.arange(0, BE)
    omega += row * omega_b + g * omega_h
    bias += row * bias_b + g * bias_h
    projection = (omega, bias, factor, square, offset, shift)
    state = load_state(S_behind + place * F * E, cf, ce, GIVEN, F, E)
    sums = tl.load(z_behind + place * F + cf, mask=(cf < F) & (GIVEN != 0), other=0.0)
    lower = rows[:, None] >= rows[None, :]
    number = tl.cdiv(stop - start, C)
    for step in range(number):
        t0 = start + (number - 1 - step) * C
        t = t0.to(tl.int64)
        inside = t0 + rows < stop
        live = live_rows(mask + row * mask_b, t0, stop, rows, MASKED)
        at = (row * G + g) * T + t0
        chunk = first + (number - 1 - step) * G
        begin_k = k + row * k_b + g * k_h + t * k_t
        u, phi = features(begin_k, k_t, scale_k + at, rows, live, cf, projection, F, MAP)
        values = lowered(load_rows(v + row * v_b + g * v_h + t * v_t, v_t, rows, live, ce, E), LOW, PRECISION)
        weight, lost, M_a, M_b = chunk_factors(w, d, M_in, M_out, at, chunk, rows, inside, C, DECAY, WEIGHTED)
        entered = product(values, tl.trans(lowered(state, LOW, PRECISION)), PRECISION) + sums[None, :]
        query, through = tl.full((C,), 1.0, tl.float32), tl.full((C, BF), 1.0, tl.float32)
        if DECAY or WEIGHTED:
            key, keep = key_and_keep(weight, lost, M_a, M_b, C, DECAY, WEIGHTED)
            entered = entered * key[:, None]
            if CAUSAL:
                pair, query = pair_and_query(weight, lost, M_a, C, DECAY, WEIGHTED)
                state, sums = state * keep, sums * keep
        if CHANNELS:
            begin = decay + row * decay_b + g * decay_h + t * decay_t
            channels = load_channels(begin, decay_t, rows, live, cf, lost, F, DECAY)
            entered = entered * behind(channels, C, C)
            keeps = tl.exp2(tl.sum(channels, 0))
            state, sums, through = state * keeps[:, None], sums * keeps, up_to(channels, C, C)
        if CAUSAL:
            for head in range(R):
                h = g * R + head
                at_q = (row * H + h) * T + t0
                begin_q = q + row * q_b + h * q_h + t * q_t
                _u_q, phi_q = features(begin_q, q_t, scale_q + at_q, rows, inside, cf, projection, F, MAP)
                begin_g = grad_o + row * grad_b + h * grad_h + t * grad_t
                grad = lowered(gradient_tile(begin_g, grad_t, r, at_q, rows, inside, ce, E), LOW, PRECISION)
                of_den = tl.load(gz + at_q + rows, mask=inside, other=0.0)
                of_pairs = product(grad, tl.trans(values), PRECISION) + of_den[:, None]
                of_pairs = tl.where(lower, of_pairs, 0.0)
                if DECAY or WEIGHTED:
                    of_pairs = of_pairs * pair
                if CHANNELS:
                    entered += tl.sum(tl.where(on_diagonal(C), of_pairs, 0.0), 0)[:, None] * phi_q
                    for level in tl.static_range(LEVELS):
                        left = lowered(phi_q * up_to(channels, 1 << level, C), LOW, PRECISION)
                        part = lowered(tl.where(anchored(1 << level, C), of_pairs, 0.0), LOW, PRECISION)
                        part = tl.dot(tl.trans(part), left, input_precision=PRECISION)
                        entered += part * behind(channels, 1 << level, C)
                else:
                    turned = tl.trans(lowered(of_pairs, LOW, PRECISION))
                    entered = tl.dot(turned, lowered(phi_q, LOW, PRECISION), entered, input_precision=PRECISION)
                low = lowered(phi_q * through * query[:, None], LOW, PRECISION)
                state = tl.dot(tl.trans(low), grad, state, input_precision=PRECISION)
                sums += tl.sum(low.to(tl.float32) * of_den[:, None], 0)
        entered = tl.where(live[:, None], entered, 0.0)
        if KEEP_WEIGHT:
            share = dw + ((block * B + row) * G + g) * T + t0
            tl.store(share + rows, tl.sum(phi * entered, 1), mask=inside)
        grad_u = through_function(u, phi, shift, entered, MAP[2])
        store_rows(dk + row * dk_b + g * dk_h + t * dk_t, dk_t, rows, inside, cf, F, grad_u)
    if KEEP_STATE != 0:
        store_state(S_before + place * F * E, cf, ce, F, E, state)
        tl.store(z_before + place * F + cf, sums, mask=cf < F)


@triton.jit(do_not_specialize=["T", "G", "mask_b", "GIVEN"])
def value_gradients(
    q, k, grad_o, r, dv, w, d, decay, mask, scale_q, scale_k, omega, bias, M_in, M_out, items, S_behind,
    q_b, q_h, q_t, k_b, k_h, k_t, grad_b, grad_h, grad_t, dv_b, dv_h, dv_t, decay_b, decay_h, decay_t,
    mask_b, omega_b, omega_h, bias_b, bias_h, T, G, R, GIVEN, factor, square, offset, shift,
    F: tl.constexpr, E: tl.constexpr, BF: tl.constexpr, BE: tl.constexpr, C: tl.constexpr, MAP: tl.constexpr,
    DECAY: tl.constexpr, CHANNELS: tl.constexpr, WEIGHTED: tl.constexpr, MASKED: tl.constexpr, CAUSAL: tl.constexpr,
    LOW: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dv (b, g, s, e) of an item, BE channels of it."""
    item, g, block = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64), tl.program_id(2)
    H = G * R
    row, start, stop, first, place = item_of(items, item, g, G, not CAUSAL)
    rows, cf, ce = tl.arange(0, C), tl.arange(0, BF), block * BE + tl.arange(0, BE)
    omega += row * omega_b + g * omega_h
    bias += row * bias_b + g * bias_h
    projection = (omega, bias, factor, square, offset, shift)
    state = load_state(S_behind + place * F * E, cf, ce, GIVEN, F, E)
    lower = rows[:, None] >= rows[None, :]
    number = tl.cdiv(stop - start, C)
    for step in range(number):
        t0 = start + (number - 1 - step) * C
        t = t0.to(tl.int64)
        inside = t0 + rows < stop
        live = live_rows(mask + row * mask_b, t0, stop, rows, MASKED)
        at = (row * G + g) * T + t0
        chunk = first + (number - 1 - step) * G
        begin_k = k + row * k_b + g * k_h + t * k_t
        _u, phi = features(begin_k, k_t, scale_k + at, rows, live, cf, projection, F, MAP)
        weight, lost, M_a, M_b = chunk_factors(w, d, M_in, M_out, at, chunk, rows, inside, C, DECAY, WEIGHTED)
        seen_k, query, through = phi, tl.full((C,), 1.0, tl.float32), tl.full((C, BF), 1.0, tl.float32)
        keeps = tl.full((BF,), 1.0, tl.float32)
        if DECAY or WEIGHTED:
            key, keep = key_and_keep(weight, lost, M_a, M_b, C, DECAY, WEIGHTED)
            seen_k, keeps = seen_k * key[:, None], keeps * keep
            if CAUSAL:
                pair, query = pair_and_query(weight, lost, M_a, C, DECAY, WEIGHTED)
        if CHANNELS:
            begin = decay + row * decay_b + g * decay_h + t * decay_t
            channels = load_channels(begin, decay_t, rows, live, cf, lost, F, DECAY)
            seen_k, through = seen_k * behind(channels, C, C), up_to(channels, C, C)
            keeps = keeps * tl.exp2(tl.sum(channels, 0))
        out = product(lowered(seen_k, LOW, PRECISION), lowered(state, LOW, PRECISION), PRECISION)
        if CAUSAL:
            if DECAY or WEIGHTED or CHANNELS:
                state = state * keeps[:, None]
            for head in range(R):
                h = g * R + head
                at_q = (row * H + h) * T + t0
                begin_q = q + row * q_b + h * q_h + t * q_t
                _u_q, phi_q = features(begin_q, q_t, scale_q + at_q, rows, inside, cf, projection, F, MAP)
                begin_g = grad_o + row * grad_b + h * grad_h + t * grad_t
                grad = lowered(gradient_tile(begin_g, grad_t, r, at_q, rows, inside, ce, E), LOW, PRECISION)
                if CHANNELS:
                    products = channel_products(phi_q, phi, channels, C, LOW, PRECISION)
                else:
                    turned = tl.trans(lowered(phi, LOW, PRECISION))
                    products = product(lowered(phi_q, LOW, PRECISION), turned, PRECISION)
                products = tl.where(lower, products, 0.0)
                if DECAY or WEIGHTED:
                    products = products * pair
                out = tl.dot(tl.trans(lowered(products, LOW, PRECISION)), grad, out, input_precision=PRECISION)
                low = lowered(phi_q * through * query[:, None], LOW, PRECISION)
                state = tl.dot(tl.trans(low), grad, state, input_precision=PRECISION)
        out = tl.where(live[:, None], out, 0.0)
        store_rows(dv + row * dv_b + g * dv_h + t * dv_t, dv_t, rows, inside, ce, E, out)


@triton.jit(do_not_specialize=["T", "B", "G", "mask_b"])
def decay_gradients(
    q, k, v, grad_o, r, gz, shares, w, d, decay, mask, scale_q, scale_k, omega, bias, M_in, M_out, items,
    S_in, z_in, S_behind, z_behind,
    q_b, q_h, q_t, k_b, k_h, k_t, v_b, v_h, v_t, grad_b, grad_h, grad_t, decay_b, decay_h, decay_t,
    mask_b, omega_b, omega_h, bias_b, bias_h, T, B, G, R, factor, square, offset, shift,
    F: tl.constexpr, E: tl.constexpr, BF: tl.constexpr, BE: tl.constexpr, C: tl.constexpr, MAP: tl.constexpr,
    DECAY: tl.constexpr, CHANNELS: tl.constexpr, WEIGHTED: tl.constexpr, MASKED: tl.constexpr,
    LOW: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """All that passes each position of an item of one chunk: shares (blocks, b, h, t), with channels (b, h, t, f).

    From keys before it to queries from it on, from the state before to those queries, from those keys to the state
    behind, and from state to state: sums of these, never a difference of larger ones.
    """
    item, h, block = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64), tl.program_id(2)
    g, H = h // R, G * R
    row, start, stop, chunk, place = item_of(items, item, g, G, False)
    t = start.to(tl.int64)
    rows, cf = tl.arange(0, C), block * BF + tl.arange(0, BF)
    inside = start + rows < stop
    live = live_rows(mask + row * mask_b, start, stop, rows, MASKED)
    omega += row * omega_b + g * omega_h
    bias += row * bias_b + g * bias_h
    projection = (omega, bias, factor, square, offset, shift)
    at_q, at = (row * H + h) * T + start, (row * G + g) * T + start
    begin_q = q + row * q_b + h * q_h + t * q_t
    _u_q, phi_q = features(begin_q, q_t, scale_q + at_q, rows, inside, cf, projection, F, MAP)
    begin_k = k + row * k_b + g * k_h + t * k_t
    _u_k, phi_k = features(begin_k, k_t, scale_k + at, rows, live, cf, projection, F, MAP)
    of_den = tl.load(gz + at_q + rows, mask=inside, other=0.0)
    sums = tl.load(z_in + place * F + cf, mask=cf < F, other=0.0)
    sums_after = tl.load(z_behind + place * F + cf, mask=cf < F, other=0.0)
    weight, lost, M_a, M_b = chunk_factors(w, d, M_in, M_out, at, chunk, rows, inside, C, DECAY, WEIGHTED)
    of_pairs = of_den[:, None] + tl.zeros((C, C), tl.float32)
    read = of_den[:, None] * sums[None, :]
    entered = sums_after[None, :] + tl.zeros((C, BF), tl.float32)
    across = sums * sums_after
    for e in range(0, E, BE):
        ce = e + tl.arange(0, BE)
        values = load_rows(v + row * v_b + g * v_h + t * v_t, v_t, rows, live, ce, E)
        values = lowered(values, LOW, PRECISION)
        begin_g = grad_o + row * grad_b + h * grad_h + t * grad_t
        grad = lowered(gradient_tile(begin_g, grad_t, r, at_q, rows, inside, ce, E), LOW, PRECISION)
        before = load_state(S_in + place * F * E, cf, ce, 1, F, E)
        after = load_state(S_behind + place * F * E, cf, ce, 1, F, E)
        of_pairs = tl.dot(grad, tl.trans(values), of_pairs, input_precision=PRECISION)
        read = tl.dot(grad, tl.trans(lowered(before, LOW, PRECISION)), read, input_precision=PRECISION)
        entered = tl.dot(values, tl.trans(lowered(after, LOW, PRECISION)), entered, input_precision=PRECISION)
        across += tl.sum(before * after, 1)
    of_pairs = tl.where(rows[:, None] >= rows[None, :], of_pairs, 0.0)
    if DECAY or WEIGHTED:
        pair, query = pair_and_query(weight, lost, M_a, C, DECAY, WEIGHTED)
        key, keep = key_and_keep(weight, lost, M_a, M_b, C, DECAY, WEIGHTED)
        of_pairs, across = of_pairs * pair, across * keep
        read, entered = read * query[:, None], entered * key[:, None]
    if CHANNELS:
        begin = decay + row * decay_b + g * decay_h + t * decay_t
        channels = load_channels(begin, decay_t, rows, live, cf, lost, F, DECAY)
        read, entered = read * up_to(channels, C, C), entered * behind(channels, C, C)
        across = across * tl.exp2(tl.sum(channels, 0))
    read, entered = phi_q * read, phi_k * entered
    if h % R != 0:  # the state's way through, and the keys' into it, count once for all heads that share them
        entered, across = entered * 0.0, across * 0.0
    up, down = (tl.where(rows[None, :] >= rows[:, None], 1.0, 0.0), tl.where(rows[None, :] < rows[:, None], 1.0, 0.0))
    if CHANNELS:
        passing = tl.dot(up, read, input_precision=exact()) + tl.dot(down, entered, input_precision=exact())
        passing += across[None, :]
        for level in tl.static_range(LEVELS):
            left, right = phi_q * up_to(channels, 1 << level, C), phi_k * behind(channels, 1 << level, C)
            part = lowered(tl.where(anchored(1 << level, C), of_pairs, 0.0), LOW, PRECISION)
            of_left = left * tl.dot(part, lowered(right, LOW, PRECISION), input_precision=PRECISION)
            of_right = right * tl.dot(tl.trans(part), lowered(left, LOW, PRECISION), input_precision=PRECISION)
            same = (rows[:, None] >> level) == (rows[None, :] >> level)
            passing += tl.dot(tl.where(same, up, 0.0), of_left, input_precision=exact())
            passing += tl.dot(tl.where(same, down, 0.0), of_right, input_precision=exact())
        passing = tl.where(live[:, None], passing, 0.0)
        store_rows(shares + ((row * H + h) * T + start) * F, F, rows, inside, cf, F, passing)
    else:
        products = tl.dot(
            lowered(phi_q, LOW, PRECISION), tl.trans(lowered(phi_k, LOW, PRECISION)), input_precision=PRECISION
        )
        flow = tl.where(rows[:, None] > rows[None, :], products * of_pairs, 0.0)  # (i, j), j < i
        flow = tl.dot(up, flow, input_precision=exact())  # (l, j): to queries from l on
        passing = tl.sum(tl.where(rows[:, None] > rows[None, :], flow, 0.0), 1)
        passing += tl.sum(up * tl.sum(read, 1)[None, :], 1) + tl.sum(down * tl.sum(entered, 1)[None, :], 1)
        passing = tl.where(live, passing + tl.sum(across, 0), 0.0)
        tl.store(shares + ((block * B + row) * H + h) * T + start + rows, passing, mask=inside)
