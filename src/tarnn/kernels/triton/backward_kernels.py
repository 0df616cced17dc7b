"""Backward: queries in a sweep forward, keys and values in sweeps in reverse; features are computed again in each.

G (b, h, t, e) = grad_o·r and G_z (b, h, t) are the gradients of numerators and denominators, R (f, e) and R_z (f,) those
of the state behind a chunk. Heads that share keys are gone through within a program, so nothing is added atomically.
"""

import triton
import triton.language as tl

from tarnn.kernels.triton.tiles import (
    LEVELS,
    absorbed,
    accurate_exp,
    anchored,
    behind,
    chunk_factors,
    chunk_keys,
    chunk_of,
    entering,
    exact,
    features,
    finite,
    item_of,
    live_rows,
    load_rows,
    load_state,
    lowered,
    on_diagonal,
    pair_products,
    product,
    projection_of,
    query_factors,
    row_maxima,
    store_rows,
    store_state,
    through_function,
    tile_mask,
    up_to,
)


@triton.jit(do_not_specialize=["T", "S", "G"])
def gradient_rows(grad_o, o, den, scale_q, keys, M_end, chunks, r, gz, T, S, G, R, eps, spec: tl.constexpr):
    """r (b, h, t), what a numerator is multiplied with to be an output, and G_z = −r Σ_e grad_o·o."""
    chunk, h = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    g, H = h // R, G * R
    row, start, stop = chunk_of(chunks, chunk)
    rows = tl.arange(0, spec.C)
    live = start + rows < stop
    at = (row * H + h) * T + start
    factor = tl.full((spec.C,), 1.0, tl.float32)
    through = tl.full((spec.C,), 0.0, tl.float32)
    if spec.normalize:
        total = tl.load(den + at + rows, mask=live, other=0.0)
        factor = tl.where(total == 0, 0.0, 1.0 / (total + eps))
        for e in range(0, spec.E, spec.BE):
            ce = e + tl.arange(0, spec.BE)
            grad = load_rows(grad_o, row, h, start, rows, live, ce, spec.E).to(tl.float32)
            out = load_rows(o, row, h, start, rows, live, ce, spec.E).to(tl.float32)
            through -= tl.sum(grad * out, 1)
    elif spec.weighted:
        M = tl.full((spec.C,), 0.0, tl.float32)
        if spec.function == 4:
            M = tl.load(scale_q + at + rows, mask=live, other=0.0)
        if spec.causal:
            of_keys = (row * G + g) * S + start + rows
            lost = tl.full((spec.C,), 0.0, tl.float32)
            if spec.decay:
                lost = tl.load(keys.d + of_keys, mask=live, other=0.0)
            weight = tl.load(keys.w + of_keys, mask=live, other=float("-inf"))
            M += row_maxima(weight, lost, tl.load(keys.M_in + chunk * G + g), spec)
        else:
            sequence = tl.load(chunks + chunk * 4 + 3).to(tl.int64)
            M += finite(tl.load(M_end + sequence * G + g))
        if spec.function == 4:
            total = tl.load(den + at + rows, mask=live, other=0.0)
            M = tl.where(total == 0, -1e4, M)
        factor = accurate_exp(M)
    tl.store(r + at + rows, factor, mask=live)
    tl.store(gz + at + rows, factor * through, mask=live)


@triton.jit
def gradient_tile(grad_o, row, h, t0, r, rows, live, columns, spec: tl.constexpr):
    """G (C, B), as products read it. `r` points to the chunk's."""
    grad = load_rows(grad_o, row, h, t0, rows, live, columns, spec.E).to(tl.float32)
    return lowered(grad * tl.load(r + rows, mask=live, other=0.0)[:, None], spec)


@triton.jit(do_not_specialize=["T", "G", "mask_b"])
def gradient_sums(q, scale_q, grad_o, r, gz, keys, mask, mask_b, projection, items, S, z, T, G, R, spec: tl.constexpr):
    """R (item, g, f, e) and R_z (item, g, f): what an item's own queries send to the state before it."""
    item, g, block = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64), tl.program_id(2)
    row, start, stop, first, place = item_of(items, item, g, G, False)
    rows, cf, ce = tl.arange(0, spec.C), tl.arange(0, spec.BF), block * spec.BE + tl.arange(0, spec.BE)
    own = projection_of(projection, row, g)
    state, sums = tl.full((spec.BF, spec.BE), 0.0, tl.float32), tl.full((spec.BF,), 0.0, tl.float32)
    number = tl.cdiv(stop - start, spec.C)
    for step in range(number):
        t0 = start + (number - 1 - step) * spec.C
        inside = t0 + rows < stop
        seen = tl.full((spec.C, spec.BF), 1.0, tl.float32)
        if spec.causal:
            at, chunk = (row * G + g) * T + t0, first + (number - 1 - step) * G
            live = live_rows(mask + row * mask_b, t0, stop, rows, spec)
            factors = chunk_factors(keys, row, g, t0, at, chunk, rows, inside, live, cf, spec)
            _entered, keeps = entering(seen, factors, spec)
            _pair, seen = query_factors(factors, spec)
            state, sums = state * keeps[:, None], sums * keeps
        for head in range(R):
            h = g * R + head
            at_q = (row * G * R + h) * T + t0
            _u, phi = features(q, row, h, t0, scale_q + at_q, rows, inside, cf, own, spec)
            grad = gradient_tile(grad_o, row, h, t0, r + at_q, rows, inside, ce, spec)
            of_den = tl.load(gz + at_q + rows, mask=inside, other=0.0)
            state, sums = absorbed(state, sums, phi * seen, grad, of_den[:, None], spec)
    store_state(S + place * spec.F * spec.E, cf, ce, spec.F, spec.E, state)
    if block == 0:
        tl.store(z + place * spec.F + cf, sums, mask=cf < spec.F)


@triton.jit(do_not_specialize=["T", "G", "mask_b", "GIVEN"])
def query_gradients(
    q, scale_q, keys, v, mask, mask_b, grad_o, r, gz, dq, projection, items, S_in, z_in, T, G, R, GIVEN,
    spec: tl.constexpr,
):  # fmt: skip
    """dq (b, h, t, d) of an item, BF channels of it; of projected features ∂/∂u (b, h, t, f)."""
    item, h, block = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64), tl.program_id(2)
    g, H = h // R, G * R
    row, start, stop, chunk, place = item_of(items, item, g, G, not spec.causal)
    rows, cf, ce = tl.arange(0, spec.C), block * spec.BF + tl.arange(0, spec.BF), tl.arange(0, spec.BE)
    own = projection_of(projection, row, g)
    state = load_state(S_in + place * spec.F * spec.E, cf, ce, GIVEN, spec.F, spec.E)
    sums = tl.load(z_in + place * spec.F + cf, mask=(cf < spec.F) & (GIVEN != 0), other=0.0)
    lower = rows[:, None] >= rows[None, :]
    for t0 in range(start, stop, spec.C):
        inside = t0 + rows < stop
        at_q, at = (row * H + h) * T + t0, (row * G + g) * T + t0
        u, phi = features(q, row, h, t0, scale_q + at_q, rows, inside, cf, own, spec)
        grad = gradient_tile(grad_o, row, h, t0, r + at_q, rows, inside, ce, spec)
        of_den = tl.load(gz + at_q + rows, mask=inside, other=0.0)
        read = product(grad, tl.trans(lowered(state, spec)), spec) + of_den[:, None] * sums[None, :]
        if spec.causal:
            live, _u_k, phi_k, factors = chunk_keys(
                keys, mask + row * mask_b, row, g, t0, stop, at, chunk, rows, cf, own, spec
            )
            values = lowered(load_rows(v, row, g, t0, rows, live, ce, spec.E), spec)
            pair, seen = query_factors(factors, spec)
            of_pairs = tl.where(lower, product(grad, tl.trans(values), spec) + of_den[:, None], 0.0) * pair
            read = read * seen
            if spec.channels:
                read += tl.sum(tl.where(on_diagonal(spec.C), of_pairs, 0.0), 1)[:, None] * phi_k
                for level in tl.static_range(LEVELS):
                    right = lowered(phi_k * behind(factors[4], 1 << level, spec.C), spec)
                    part = lowered(tl.where(anchored(1 << level, spec.C), of_pairs, 0.0), spec)
                    part = tl.dot(part, right, input_precision=spec.precision)
                    read += part * up_to(factors[4], 1 << level, spec.C)
            else:
                read = tl.dot(lowered(of_pairs, spec), lowered(phi_k, spec), read, input_precision=spec.precision)
            phi_k, keeps = entering(phi_k, factors, spec)
            state, sums = absorbed(state * keeps[:, None], sums * keeps, phi_k, values, 1.0, spec)
        grad_u = through_function(u, phi, projection.shift, read, spec.function)
        store_rows(dq, row, h, t0, rows, inside, cf, spec.F, grad_u)
        chunk += G


@triton.jit(do_not_specialize=["T", "B", "G", "mask_b", "GIVEN", "KEEP_STATE"])
def key_gradients(
    q, scale_q, keys, v, mask, mask_b, grad_o, r, gz, dk, dw, projection, items, S_behind, z_behind, S_before, z_before,
    T, B, G, R, GIVEN, KEEP_STATE, KEEP_WEIGHT: tl.constexpr, spec: tl.constexpr,
):  # fmt: skip
    """dk (b, g, s, d) of an item, BF channels of it (of projected features ∂/∂u), and their share of ∂/∂w.

    KEEP_STATE: the gradient of the state before is wanted too, of an item that is a whole sequence.
    """
    item, g, block = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64), tl.program_id(2)
    row, start, stop, first, place = item_of(items, item, g, G, not spec.causal)
    rows, cf, ce = tl.arange(0, spec.C), block * spec.BF + tl.arange(0, spec.BF), tl.arange(0, spec.BE)
    own = projection_of(projection, row, g)
    state = load_state(S_behind + place * spec.F * spec.E, cf, ce, GIVEN, spec.F, spec.E)
    sums = tl.load(z_behind + place * spec.F + cf, mask=(cf < spec.F) & (GIVEN != 0), other=0.0)
    lower = rows[:, None] >= rows[None, :]
    number = tl.cdiv(stop - start, spec.C)
    for step in range(number):
        t0 = start + (number - 1 - step) * spec.C
        inside = t0 + rows < stop
        at, chunk = (row * G + g) * T + t0, first + (number - 1 - step) * G
        live, u, phi, factors = chunk_keys(keys, mask + row * mask_b, row, g, t0, stop, at, chunk, rows, cf, own, spec)
        values = lowered(load_rows(v, row, g, t0, rows, live, ce, spec.E), spec)
        entered = product(values, tl.trans(lowered(state, spec)), spec) + sums[None, :]
        entered, keeps = entering(entered, factors, spec)
        if spec.causal:
            state, sums = state * keeps[:, None], sums * keeps
            pair, seen = query_factors(factors, spec)
            for head in range(R):
                h = g * R + head
                at_q = (row * G * R + h) * T + t0
                _u_q, phi_q = features(q, row, h, t0, scale_q + at_q, rows, inside, cf, own, spec)
                grad = gradient_tile(grad_o, row, h, t0, r + at_q, rows, inside, ce, spec)
                of_den = tl.load(gz + at_q + rows, mask=inside, other=0.0)
                of_pairs = tl.where(lower, product(grad, tl.trans(values), spec) + of_den[:, None], 0.0) * pair
                if spec.channels:
                    entered += tl.sum(tl.where(on_diagonal(spec.C), of_pairs, 0.0), 0)[:, None] * phi_q
                    for level in tl.static_range(LEVELS):
                        left = lowered(phi_q * up_to(factors[4], 1 << level, spec.C), spec)
                        part = lowered(tl.where(anchored(1 << level, spec.C), of_pairs, 0.0), spec)
                        part = tl.dot(tl.trans(part), left, input_precision=spec.precision)
                        entered += part * behind(factors[4], 1 << level, spec.C)
                else:
                    turned = tl.trans(lowered(of_pairs, spec))
                    entered = tl.dot(turned, lowered(phi_q, spec), entered, input_precision=spec.precision)
                state, sums = absorbed(state, sums, phi_q * seen, grad, of_den[:, None], spec)
        entered = tl.where(live[:, None], entered, 0.0)
        if KEEP_WEIGHT:
            share = dw + ((block * B + row) * G + g) * T + t0
            tl.store(share + rows, tl.sum(phi * entered, 1), mask=inside)
        grad_u = through_function(u, phi, projection.shift, entered, spec.function)
        store_rows(dk, row, g, t0, rows, inside, cf, spec.F, grad_u)
    if KEEP_STATE != 0:
        store_state(S_before + place * spec.F * spec.E, cf, ce, spec.F, spec.E, state)
        tl.store(z_before + place * spec.F + cf, sums, mask=cf < spec.F)


@triton.jit(do_not_specialize=["T", "G", "mask_b", "GIVEN"])
def value_gradients(
    q, scale_q, keys, mask, mask_b, grad_o, r, dv, projection, items, S_behind, T, G, R, GIVEN, spec: tl.constexpr
):
    """dv (b, g, s, e) of an item, BE channels of it."""
    item, g, block = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64), tl.program_id(2)
    row, start, stop, first, place = item_of(items, item, g, G, not spec.causal)
    rows, cf, ce = tl.arange(0, spec.C), tl.arange(0, spec.BF), block * spec.BE + tl.arange(0, spec.BE)
    own = projection_of(projection, row, g)
    state = load_state(S_behind + place * spec.F * spec.E, cf, ce, GIVEN, spec.F, spec.E)
    sums = tl.full((spec.BF,), 0.0, tl.float32)  # not used here
    number = tl.cdiv(stop - start, spec.C)
    for step in range(number):
        t0 = start + (number - 1 - step) * spec.C
        inside = t0 + rows < stop
        at, chunk = (row * G + g) * T + t0, first + (number - 1 - step) * G
        live, _u, phi, factors = chunk_keys(keys, mask + row * mask_b, row, g, t0, stop, at, chunk, rows, cf, own, spec)
        entered, keeps = entering(phi, factors, spec)
        out = product(lowered(entered, spec), lowered(state, spec), spec)
        if spec.causal:
            state = state * keeps[:, None]
            pair, seen = query_factors(factors, spec)
            for head in range(R):
                h = g * R + head
                at_q = (row * G * R + h) * T + t0
                _u_q, phi_q = features(q, row, h, t0, scale_q + at_q, rows, inside, cf, own, spec)
                grad = gradient_tile(grad_o, row, h, t0, r + at_q, rows, inside, ce, spec)
                products = tl.trans(lowered(pair_products(phi_q, phi, factors, spec) * pair, spec))
                out = tl.dot(products, grad, out, input_precision=spec.precision)
                state, sums = absorbed(state, sums, phi_q * seen, grad, 0.0, spec)
        out = tl.where(live[:, None], out, 0.0)
        store_rows(dv, row, g, t0, rows, inside, ce, spec.E, out)


@triton.jit(do_not_specialize=["T", "B", "G", "mask_b"])
def decay_gradients(
    q, scale_q, keys, v, mask, mask_b, grad_o, r, gz, shares, projection, items, S_in, z_in, S_behind, z_behind,
    T, B, G, R, spec: tl.constexpr,
):  # fmt: skip
    """All that passes each position of an item of one chunk: shares (blocks, b, h, t), with channels (b, h, t, f).

    From keys before it to queries from it on, from the state before to those queries, from those keys to the state
    behind, and from state to state: sums of these, never a difference of larger ones.
    """
    item, h, block = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64), tl.program_id(2)
    g, H = h // R, G * R
    row, start, stop, chunk, place = item_of(items, item, g, G, False)
    rows, cf = tl.arange(0, spec.C), block * spec.BF + tl.arange(0, spec.BF)
    inside = start + rows < stop
    own = projection_of(projection, row, g)
    at_q, at = (row * H + h) * T + start, (row * G + g) * T + start
    _u_q, phi_q = features(q, row, h, start, scale_q + at_q, rows, inside, cf, own, spec)
    live, _u_k, phi_k, factors = chunk_keys(
        keys, mask + row * mask_b, row, g, start, stop, at, chunk, rows, cf, own, spec
    )
    of_den = tl.load(gz + at_q + rows, mask=inside, other=0.0)
    sums = tl.load(z_in + place * spec.F + cf, mask=cf < spec.F, other=0.0)
    sums_after = tl.load(z_behind + place * spec.F + cf, mask=cf < spec.F, other=0.0)
    of_pairs = of_den[:, None] + tl.full((spec.C, spec.C), 0.0, tl.float32)
    read = of_den[:, None] * sums[None, :]
    entered = sums_after[None, :] + tl.full((spec.C, spec.BF), 0.0, tl.float32)
    across = sums * sums_after
    for e in range(0, spec.E, spec.BE):
        ce = e + tl.arange(0, spec.BE)
        values = lowered(load_rows(v, row, g, start, rows, live, ce, spec.E), spec)
        grad = gradient_tile(grad_o, row, h, start, r + at_q, rows, inside, ce, spec)
        before = load_state(S_in + place * spec.F * spec.E, cf, ce, 1, spec.F, spec.E)
        after = load_state(S_behind + place * spec.F * spec.E, cf, ce, 1, spec.F, spec.E)
        of_pairs = tl.dot(grad, tl.trans(values), of_pairs, input_precision=spec.precision)
        read = tl.dot(grad, tl.trans(lowered(before, spec)), read, input_precision=spec.precision)
        entered = tl.dot(values, tl.trans(lowered(after, spec)), entered, input_precision=spec.precision)
        across += tl.sum(before * after, 1)
    pair, seen = query_factors(factors, spec)
    of_pairs = tl.where(rows[:, None] >= rows[None, :], of_pairs, 0.0) * pair
    entered, keeps = entering(entered, factors, spec)
    read, entered, across = phi_q * read * seen, phi_k * entered, across * keeps
    if h % R != 0:  # the state's way through, and the keys' into it, count once for all heads that share them
        entered, across = entered * 0.0, across * 0.0
    up, down = (tl.where(rows[None, :] >= rows[:, None], 1.0, 0.0), tl.where(rows[None, :] < rows[:, None], 1.0, 0.0))
    if spec.channels:
        passing = tl.dot(up, read, input_precision=exact()) + tl.dot(down, entered, input_precision=exact())
        passing += across[None, :]
        for level in tl.static_range(LEVELS):
            left, right = phi_q * up_to(factors[4], 1 << level, spec.C), phi_k * behind(factors[4], 1 << level, spec.C)
            part = lowered(tl.where(anchored(1 << level, spec.C), of_pairs, 0.0), spec)
            of_left = left * tl.dot(part, lowered(right, spec), input_precision=spec.precision)
            of_right = right * tl.dot(tl.trans(part), lowered(left, spec), input_precision=spec.precision)
            same = (rows[:, None] >> level) == (rows[None, :] >> level)
            passing += tl.dot(tl.where(same, up, 0.0), of_left, input_precision=exact())
            passing += tl.dot(tl.where(same, down, 0.0), of_right, input_precision=exact())
        to = shares + ((row * H + h) * T + start + rows)[:, None] * spec.F + cf[None, :]
        tl.store(to, tl.where(live[:, None], passing, 0.0), mask=tile_mask(inside, cf, spec.F))
    else:
        flow = pair_products(phi_q, phi_k, factors, spec) * of_pairs
        flow = tl.where(rows[:, None] > rows[None, :], flow, 0.0)  # (i, j), j < i
        flow = tl.dot(up, flow, input_precision=exact())  # (l, j): to queries from l on
        passing = tl.sum(tl.where(rows[:, None] > rows[None, :], flow, 0.0), 1)
        passing += tl.sum(up * tl.sum(read, 1)[None, :], 1) + tl.sum(down * tl.sum(entered, 1)[None, :], 1)
        passing = tl.where(live, passing + tl.sum(across, 0), 0.0)
        tl.store(shares + ((block * B + row) * H + h) * T + start + rows, passing, mask=inside)
