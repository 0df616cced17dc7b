"""What the kernels do with tiles: rows of tensors, their features, and the factors of decays and log-weights.

A tile has C positions (rows) and features or values (columns). `spec` is a `Spec` of arguments.py: what a kernel is compiled
for. Tensors are `Rows` of arguments.py, or pointers. The factors are those of `kernels/eager/weights.py`; sums of
decays are made term by term, never as a difference of prefix sums. Log-weights, decays and M are natural logarithms: what
is left after they were subtracted is turned into base 2, so that large ones lose no digits.
"""

import triton
import triton.language as tl
from triton.language.target_info import is_hip

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.693359375)  # of few bits, so that a whole number of it is exact
LN2_REST = tl.constexpr(-2.12194440e-4)
LOWEST = tl.constexpr(-1e30)  # a decay that forgets all; −∞ times 0 would be NaN
LEVELS = tl.constexpr(4)  # sizes of blocks in a chunk of 16, the length where decays have channels


@triton.constexpr_function
def exact():
    """How products with all of float32's digits are made. AMD's matrix cores multiply float32 themselves."""
    return "ieee" if is_hip() else "tf32x3"


@triton.jit
def item_of(items, item, g, G, WHOLE: tl.constexpr):
    """An item's batch row, first position and last + 1; where its first chunk's M lies, and its state. WHOLE: its sequence's."""
    at = items + item * 5
    place = item * G + g
    if WHOLE:
        place = tl.load(at + 4).to(tl.int64) * G + g
    return tl.load(at).to(tl.int64), tl.load(at + 1), tl.load(at + 2), tl.load(at + 3).to(tl.int64) * G + g, place


@triton.jit
def chunk_of(chunks, chunk):
    """A chunk's batch row, first position and last + 1."""
    at = chunks + chunk * 4
    return tl.load(at).to(tl.int64), tl.load(at + 1), tl.load(at + 2)


@triton.jit
def address(x, row, head, t):
    """Where position t of a row and head of x begins."""
    return x.data + row * x.b + head * x.h + tl.cast(t, tl.int64) * x.t


@triton.jit
def tile_mask(live, columns, WIDTH: tl.constexpr):
    """Which places of a tile are in live rows, and not beyond the width."""
    mask = live[:, None]
    if tl.constexpr(WIDTH) % columns.shape[0] != 0:
        mask = mask & (columns < WIDTH)[None, :]
    return mask


@triton.jit
def load_rows(x, row, head, t, rows, live, columns, WIDTH: tl.constexpr):
    """x (C, B) from position t on: zeros in rows that aren't live and in columns beyond the width."""
    at = address(x, row, head, t) + rows[:, None] * x.t + columns[None, :]
    return tl.load(at, mask=tile_mask(live, columns, WIDTH), other=0.0)


@triton.jit
def store_rows(x, row, head, t, rows, live, columns, WIDTH: tl.constexpr, values):
    at = address(x, row, head, t) + rows[:, None] * x.t + columns[None, :]
    tl.store(at, values.to(x.data.dtype.element_ty), mask=tile_mask(live, columns, WIDTH))


@triton.jit
def load_state(S, features, values, given, F: tl.constexpr, E: tl.constexpr):
    """A tile of a state (f, e), zeros beyond its sides, or where none is given."""
    mask = (features < F)[:, None] & (values < E)[None, :] & (given != 0)
    return tl.load(S + features[:, None] * E + values[None, :], mask=mask, other=0.0)


@triton.jit
def store_state(S, features, values, F: tl.constexpr, E: tl.constexpr, tile):
    mask = (features < F)[:, None] & (values < E)[None, :]
    tl.store(S + features[:, None] * E + values[None, :], tile, mask=mask)


@triton.jit
def absorbed(state, sums, phi, values, mass, spec: tl.constexpr):
    """S and z with features (C, f) of keys, or of queries in reverse, and their values. mass: 1, or ∂/∂den (C, 1)."""
    low = lowered(phi, spec)
    state = tl.dot(tl.trans(low), values, state, input_precision=spec.precision)
    return state, sums + tl.sum(low.to(tl.float32) * mass, 0)


@triton.jit
def live_rows(mask, t0, stop, rows, spec: tl.constexpr):
    """Which positions from t0 on are keys: within the item, and not masked. `mask` points to the item's row."""
    live = t0 + rows < stop
    if spec.masked:
        live = tl.load(mask + t0 + rows, mask=live, other=0) != 0
    return live


@triton.jit
def lowered(x, spec: tl.constexpr):
    """x as products read it. Tensor cores cut a float32 to tf32, so it is rounded first where that is all they read of it."""
    if spec.precision == "tf32":
        bits = x.to(tl.float32).to(tl.uint32, bitcast=True) + 0x1000
        return bits.to(tl.float32, bitcast=True)
    return x.to(spec.low)


@triton.jit
def product(a, b, spec: tl.constexpr):
    """a·b, where few rows of a sum over many columns. One instruction's rows and columns are then most of the result, and
    every warp would hold all of a: so the sum is cut, each warp adds a part of it, and the parts are added."""
    ROWS: tl.constexpr = a.shape[0]
    LENGTH: tl.constexpr = a.shape[1]
    COLUMNS: tl.constexpr = b.shape[1]
    if ROWS * COLUMNS <= 1024 and LENGTH * a.dtype.primitive_bitwidth >= 4096:
        cut_a = tl.permute(tl.reshape(a, (ROWS, LENGTH // 32, 32)), (1, 0, 2))
        cut_b = tl.reshape(b, (LENGTH // 32, 32, COLUMNS))
        result = tl.sum(tl.dot(cut_a, cut_b, input_precision=spec.precision), 0)
    else:
        result = tl.dot(a, b, input_precision=spec.precision)
    return result


# --- features


@triton.jit
def exp(x):
    return tl.exp2(x * LOG2E)


@triton.jit
def accurate_exp(x):
    """e^x with all digits for a large x too, whose product with log₂e is rounded to fewer."""
    whole = tl.floor(x * LOG2E + 0.5)
    rest = (x - whole * LN2) - whole * LN2_REST
    return tl.exp2(whole) * exp(tl.minimum(tl.maximum(rest, -1.0), 1.0))


@triton.jit
def projection_of(projection, row, g):
    """The projection of a row and group: pointers to its Ω and β, factor, square, offset, shift."""
    omega, bias, factor, square, offset, shift = projection
    return address(omega, row, g, 0), address(bias, row, g, 0), factor, square, offset, shift


@triton.jit
def arguments(x, row, head, t, rows, live, columns, projection, spec: tl.constexpr):
    """u (C, B) in float32: x, or factor·Ωx + β − square·|x|² + offset. Ωx in tf32x3, whatever the dtype: u is an exponent.

    BD channels at a time, in a loop that is not unrolled: so Ω is read again for each chunk, and not kept in registers.
    """
    omega, bias, factor, square, offset, _shift = projection
    if spec.projected:
        u = tl.full((rows.shape[0], columns.shape[0]), 0.0, tl.float32)
        length = tl.full(rows.shape, 0.0, tl.float32)
        for d0 in range(0, spec.D, spec.BD):
            d = d0 + tl.arange(0, spec.BD)
            part = load_rows(x, row, head, t, rows, live, d, spec.D).to(tl.float32)
            inside = (columns < spec.F)[None, :] & (d < spec.D)[:, None]
            turned = tl.load(omega + columns[None, :] * spec.D + d[:, None], mask=inside, other=0.0)  # (d, f)
            u = tl.dot(part, turned, u, input_precision=exact())
            length += tl.sum(part * part, 1)
        u = factor * u + offset
        if spec.biased:
            u += tl.load(bias + columns, mask=columns < spec.F, other=0.0)[None, :]
        u -= square * length[:, None]
    else:
        u = load_rows(x, row, head, t, rows, live, columns, spec.F).to(tl.float32)
    return u


@triton.jit
def function_of(u, scale, FUNCTION: tl.constexpr):
    """φ(u) but for its shift; of exp, e^(u − scale)."""
    if FUNCTION == 0:
        value = u
    elif FUNCTION == 1:
        value = tl.maximum(u, 0.0) + tl.exp2(tl.minimum(u * LOG2E, 0.0))
    elif FUNCTION == 2:
        value = tl.maximum(u, 0.0)
    elif FUNCTION == 3:
        value = tl.maximum(u, 0.0) * tl.maximum(u, 0.0)
    else:
        value = exp(u - scale)
    return value


@triton.jit
def features(x, row, head, t, scale, rows, live, columns, projection, spec: tl.constexpr):
    """Arguments u and features φ(u) (C, B) of rows of queries or keys; zeros where there is no feature."""
    top = tl.full(rows.shape, 0.0, tl.float32)
    if spec.function == 4:
        top = tl.load(scale + rows, mask=live, other=0.0)
    u = arguments(x, row, head, t, rows, live, columns, projection, spec)
    phi = function_of(u, top[:, None], spec.function) + projection[5]
    return u, tl.where(tile_mask(live, columns, spec.F), phi, 0.0)


@triton.jit
def through_function(u, value, shift, grad, FUNCTION: tl.constexpr):
    """∂/∂u from ∂/∂φ, φ(u) being `value`."""
    if FUNCTION == 1:
        grad = grad * tl.minimum(value - shift, 1.0)
    elif FUNCTION == 2:
        grad = tl.where(u > 0, grad, 0.0)
    elif FUNCTION == 3:
        grad = grad * (2.0 * tl.maximum(u, 0.0))
    elif FUNCTION == 4:
        grad = grad * (value - shift)
    return grad


# --- decays and log-weights of a chunk: one number per position


@triton.jit
def finite(M):
    return tl.where(M == float("-inf"), 0.0, M)


@triton.jit
def terms(d, C: tl.constexpr):
    """(l, j): d_l where j < l. Their sums over l are all decay behind j."""
    place = tl.arange(0, C)
    return tl.where(place[:, None] > place[None, :], d[:, None], 0.0)


@triton.jit
def seen_weights(w, d, spec: tl.constexpr):
    """(i, j): w_j + Σ_{j<l≤i} d_l, −∞ where j > i."""
    place = tl.arange(0, spec.C)
    weights = tl.full((spec.C, spec.C), 0.0, tl.float32)
    if spec.decay:
        weights = tl.cumsum(terms(d, spec.C), 0)
    if spec.weighted:
        weights += w[None, :]
    return tl.where(place[:, None] >= place[None, :], weights, float("-inf"))


@triton.jit
def row_maxima(w, d, M_in, spec: tl.constexpr):
    """M_i, with 0 for −∞."""
    before = M_in + tl.full((spec.C,), 0.0, tl.float32)
    if spec.decay:
        before = M_in + tl.cumsum(d, 0)
    return finite(tl.maximum(before, tl.max(seen_weights(w, d, spec), 1)))


@triton.jit
def query_factors(factors, spec: tl.constexpr):
    """pair (C, C), 0 above the diagonal; seen (C, f): the state before the chunk as queries see it. Of a chunk's factors."""
    w, d, M_in, _M_out, channels = factors
    pair, seen = tl.full((spec.C, spec.C), 1.0, tl.float32), tl.full((spec.C, spec.BF), 1.0, tl.float32)
    if spec.factored:
        pair = seen_weights(w, d, spec)
        query = tl.full((spec.C,), 0.0, tl.float32)
        if spec.decay:
            query = tl.cumsum(d, 0)
        if spec.weighted:
            M = finite(tl.maximum(M_in + query, tl.max(pair, 1)))
            pair -= M[:, None]
            query += M_in - M
        pair, seen = exp(pair), seen * exp(query)[:, None]
    if spec.channels:
        seen = seen * up_to(channels, spec.C, spec.C)
    return pair, seen


@triton.jit
def entering(phi, factors, spec: tl.constexpr):
    """Rows (C, f) of keys as they enter the state behind the chunk, and what it keeps (f,) of the state before."""
    w, d, M_in, M_out, channels = factors
    keeps = tl.full((spec.BF,), 1.0, tl.float32)
    if spec.factored:
        key = tl.full((spec.C,), 0.0, tl.float32)
        keep = tl.sum(key, 0)
        if spec.decay:
            key = tl.sum(terms(d, spec.C), 0)
            keep = tl.sum(d, 0)
        if spec.weighted:
            key += w - finite(M_out)
            keep += M_in - finite(M_out)
        phi, keeps = phi * exp(key)[:, None], keeps * exp(keep)
    if spec.channels:
        phi, keeps = phi * behind(channels, spec.C, spec.C), keeps * tl.exp2(tl.sum(channels, 0))
    return phi, keeps


@triton.jit
def chunk_factors(keys, row, g, t0, at, chunk, rows, inside, live, columns, spec: tl.constexpr):
    """Log-weights w and decays d (C), M before and behind a chunk, decays with channels (C, f); zeros for what is absent."""
    lost, weight, M_a, M_b = tl.full((spec.C,), 0.0, tl.float32), tl.full((spec.C,), 0.0, tl.float32), 0.0, 0.0
    channels = tl.full((spec.C, spec.BF), 0.0, tl.float32)
    if spec.decay:
        lost = tl.load(keys.d + at + rows, mask=inside, other=0.0)
    if spec.weighted:
        weight = tl.load(keys.w + at + rows, mask=inside, other=float("-inf"))
        M_a, M_b = tl.load(keys.M_in + chunk), tl.load(keys.M_out + chunk)
    if spec.channels:
        channels = load_rows(keys.decay, row, g, t0, rows, live, columns, spec.F).to(tl.float32)
        if spec.decay:  # the largest channel is in the pair's factor already
            channels -= finite(lost)[:, None]
            channels = tl.where((lost == float("-inf"))[:, None], 0.0, channels)
            channels = tl.where((columns < spec.F)[None, :], channels, 0.0)
        channels = tl.maximum(channels * LOG2E, LOWEST)
    return weight, lost, M_a, M_b, channels


@triton.jit
def chunk_keys(keys, mask, row, g, t0, stop, at, chunk, rows, columns, projection, spec: tl.constexpr):
    """A chunk's keys: which positions are keys, their arguments and features, and the factors of the chunk."""
    live = live_rows(mask, t0, stop, rows, spec)
    u, phi = features(keys.x, row, g, t0, keys.scale + at, rows, live, columns, projection, spec)
    return live, u, phi, chunk_factors(keys, row, g, t0, at, chunk, rows, t0 + rows < stop, live, columns, spec)


# --- decays with channels: one number per position and feature
#
# A pair i > j is anchored at the block boundary between them: at the one size of blocks, 1, 2, 4, …, where both are in one
# pair of neighbours, j in the left one and i in the right. Its decay is what lies between boundary and i, and between j and
# boundary. Both exponents are ≤ 0, so each size is one product of tiles that can't overflow.


@triton.jit
def up_to(channels, SIZE: tl.constexpr, C: tl.constexpr):
    """2^Σ over the positions of i's block of this size, up to i."""
    blocks = tl.reshape(channels, (C // SIZE, SIZE, channels.shape[1]))
    return tl.exp2(tl.reshape(tl.cumsum(blocks, 1), (C, channels.shape[1])))


@triton.jit
def behind(channels, SIZE: tl.constexpr, C: tl.constexpr):
    """2^Σ over the positions of j's block of this size that are behind j."""
    place = tl.arange(0, C)
    after = tl.minimum(place + 1, C - 1)[:, None] + tl.zeros((C, channels.shape[1]), tl.int32)
    next_ones = tl.where(((place + 1) % SIZE != 0)[:, None], tl.gather(channels, after, 0), 0.0)
    blocks = tl.reshape(next_ones, (C // SIZE, SIZE, channels.shape[1]))
    return tl.exp2(tl.reshape(tl.cumsum(blocks, 1, reverse=True), (C, channels.shape[1])))


@triton.jit
def anchored(SIZE: tl.constexpr, C: tl.constexpr):
    """The pairs (i, j) whose boundary is one between blocks of this size."""
    place = tl.arange(0, C)
    i, j = place[:, None] // SIZE, place[None, :] // SIZE
    return (i == j + 1) & (j % 2 == 0)


@triton.jit
def on_diagonal(C: tl.constexpr):
    place = tl.arange(0, C)
    return place[:, None] == place[None, :]


@triton.jit
def pair_products(phi_q, phi_k, factors, spec: tl.constexpr):
    """Σ_f φ(q_i)_f φ(k_j)_f 2^(D_ij)_f for j ≤ i, else 0. Without channels 2^(D_ij)_f is 1."""
    place = tl.arange(0, spec.C)
    if spec.channels:
        channels = factors[4]
        products = tl.where(on_diagonal(spec.C), tl.sum(phi_q * phi_k, 1)[:, None], 0.0)
        for level in tl.static_range(LEVELS):
            left = lowered(phi_q * up_to(channels, 1 << level, spec.C), spec)
            right = lowered(phi_k * behind(channels, 1 << level, spec.C), spec)
            part = product(left, tl.trans(right), spec)
            products = tl.where(anchored(1 << level, spec.C), part, products)
    else:
        products = product(lowered(phi_q, spec), tl.trans(lowered(phi_k, spec)), spec)
    return tl.where(place[:, None] >= place[None, :], products, 0.0)
