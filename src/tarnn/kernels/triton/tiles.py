"""What the kernels do with tiles: rows of tensors, their features, and the factors of decays and log-weights.

A tile has C positions (rows) and features or values (columns). The factors are those of `kernels/eager/weights.py`; sums of
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
def load_rows(x, stride, rows, live, columns, WIDTH: tl.constexpr):
    """x (C, B): zeros in rows that aren't live and in columns beyond the width."""
    mask = live[:, None]
    if tl.constexpr(WIDTH) % columns.shape[0] != 0:
        mask = mask & (columns < WIDTH)[None, :]
    return tl.load(x + rows[:, None] * stride + columns[None, :], mask=mask, other=0.0)


@triton.jit
def store_rows(x, stride, rows, live, columns, WIDTH: tl.constexpr, values):
    mask = live[:, None]
    if tl.constexpr(WIDTH) % columns.shape[0] != 0:
        mask = mask & (columns < WIDTH)[None, :]
    tl.store(x + rows[:, None] * stride + columns[None, :], values.to(x.dtype.element_ty), mask=mask)


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
def live_rows(mask, t0, stop, rows, MASKED: tl.constexpr):
    """Which positions from t0 on are keys: within the item, and not masked. `mask` points to the item's row."""
    live = t0 + rows < stop
    if MASKED:
        live = tl.load(mask + t0 + rows, mask=live, other=0) != 0
    return live


@triton.jit
def lowered(x, LOW: tl.constexpr, PRECISION: tl.constexpr):
    """x as products read it. Tensor cores cut a float32 to tf32, so it is rounded first where that is all they read of it."""
    if PRECISION == "tf32":
        bits = x.to(tl.float32).to(tl.uint32, bitcast=True) + 0x1000
        return bits.to(tl.float32, bitcast=True)
    return x.to(LOW)


@triton.jit
def product(a, b, PRECISION: tl.constexpr):
    """a·b, where few rows of a sum over many columns. One instruction's rows and columns are then most of the result, and
    every warp would hold all of a: so the sum is cut, each warp adds a part of it, and the parts are added."""
    ROWS: tl.constexpr = a.shape[0]
    LENGTH: tl.constexpr = a.shape[1]
    COLUMNS: tl.constexpr = b.shape[1]
    if ROWS * COLUMNS <= 1024 and LENGTH * a.dtype.primitive_bitwidth >= 4096:
        cut_a = tl.permute(tl.reshape(a, (ROWS, LENGTH // 32, 32)), (1, 0, 2))
        cut_b = tl.reshape(b, (LENGTH // 32, 32, COLUMNS))
        found = tl.sum(tl.dot(cut_a, cut_b, input_precision=PRECISION), 0)
    else:
        found = tl.dot(a, b, input_precision=PRECISION)
    return found


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


# A feature map is two tuples: `projection` is (Ω of a row and head, its β, factor, square, offset, shift), and MAP, known when
# a kernel is compiled, is (D, BD, FUNCTION, PROJECTED, BIAS): channels of x, as many of them as are read at once, the
# function's number in `kernels.features.NAMES`, and whether there is an Ω and a β.


@triton.jit
def arguments(x, stride, rows, live, columns, projection, F: tl.constexpr, MAP: tl.constexpr):
    """u (C, B) in float32: x, or factor·Ωx + β − square·|x|² + offset. Ωx in tf32x3, whatever the dtype: u is an exponent.

    BD channels at a time, in a loop that is not unrolled: so Ω is read again for each chunk, and not kept in registers.
    """
    omega, bias, factor, square, offset, _shift = projection
    D: tl.constexpr = MAP[0]
    BD: tl.constexpr = MAP[1]
    if MAP[3]:
        u = tl.zeros((rows.shape[0], columns.shape[0]), tl.float32)
        length = tl.zeros(rows.shape, tl.float32)
        for d0 in range(0, D, BD):
            d = d0 + tl.arange(0, BD)
            given = load_rows(x, stride, rows, live, d, D).to(tl.float32)
            inside = (columns < F)[None, :] & (d < D)[:, None]
            turned = tl.load(omega + columns[None, :] * D + d[:, None], mask=inside, other=0.0)  # (d, f)
            u = tl.dot(given, turned, u, input_precision=exact())
            length += tl.sum(given * given, 1)
        u = factor * u + offset
        if MAP[4]:
            u += tl.load(bias + columns, mask=columns < F, other=0.0)[None, :]
        u -= square * length[:, None]
    else:
        u = load_rows(x, stride, rows, live, columns, F).to(tl.float32)
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
def features(x, stride, scale, rows, live, columns, projection, F: tl.constexpr, MAP: tl.constexpr):
    """Arguments u and features φ(u) (C, B) of rows of queries or keys; zeros where there is no feature."""
    top = tl.zeros(rows.shape, tl.float32)
    if MAP[2] == 4:
        top = tl.load(scale + rows, mask=live, other=0.0)
    u = arguments(x, stride, rows, live, columns, projection, F, MAP)
    mask = live[:, None]
    if tl.constexpr(F) % columns.shape[0] != 0:
        mask = mask & (columns < F)[None, :]
    return u, tl.where(mask, function_of(u, top[:, None], MAP[2]) + projection[5], 0.0)


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
def seen_weights(w, d, C: tl.constexpr, DECAY: tl.constexpr, WEIGHTED: tl.constexpr):
    """(i, j): w_j + Σ_{j<l≤i} d_l, −∞ where j > i."""
    place = tl.arange(0, C)
    found = tl.zeros((C, C), tl.float32)
    if DECAY:
        found = tl.cumsum(terms(d, C), 0)
    if WEIGHTED:
        found += w[None, :]
    return tl.where(place[:, None] >= place[None, :], found, float("-inf"))


@triton.jit
def row_maxima(w, d, M_in, C: tl.constexpr, DECAY: tl.constexpr):
    """M_i, with 0 for −∞."""
    before = M_in + tl.zeros((C,), tl.float32)
    if DECAY:
        before = M_in + tl.cumsum(d, 0)
    return finite(tl.maximum(before, tl.max(seen_weights(w, d, C, DECAY, True), 1)))


@triton.jit
def pair_and_query(w, d, M_in, C: tl.constexpr, DECAY: tl.constexpr, WEIGHTED: tl.constexpr):
    """pair (C, C), 0 above the diagonal; query (C)."""
    pair = seen_weights(w, d, C, DECAY, WEIGHTED)
    query = tl.zeros((C,), tl.float32)
    if DECAY:
        query = tl.cumsum(d, 0)
    if WEIGHTED:
        M = finite(tl.maximum(M_in + query, tl.max(pair, 1)))
        pair -= M[:, None]
        query += M_in - M
    return exp(pair), exp(query)


@triton.jit
def chunk_factors(
    w, d, M_in, M_out, at, chunk, rows, inside, C: tl.constexpr, DECAY: tl.constexpr, WEIGHTED: tl.constexpr
):
    """w and d (C) and M before and behind the chunk; zeros where there is none of it."""
    lost, weight, M_a, M_b = tl.zeros((C,), tl.float32), tl.zeros((C,), tl.float32), 0.0, 0.0
    if DECAY:
        lost = tl.load(d + at + rows, mask=inside, other=0.0)
    if WEIGHTED:
        weight = tl.load(w + at + rows, mask=inside, other=float("-inf"))
        M_a, M_b = tl.load(M_in + chunk), tl.load(M_out + chunk)
    return weight, lost, M_a, M_b


@triton.jit
def key_and_keep(w, d, M_in, M_out, C: tl.constexpr, DECAY: tl.constexpr, WEIGHTED: tl.constexpr):
    """key (C), keep ()."""
    key = tl.zeros((C,), tl.float32)
    keep = tl.sum(key, 0)
    if DECAY:
        key = tl.sum(terms(d, C), 0)
        keep = tl.sum(d, 0)
    if WEIGHTED:
        key += w - finite(M_out)
        keep += M_in - finite(M_out)
    return exp(key), exp(keep)


# --- decays with channels: one number per position and feature
#
# A pair i > j is anchored at the block boundary between them: at the one size of blocks, 1, 2, 4, …, where both are in one
# pair of neighbours, j in the left one and i in the right. Its decay is what lies between boundary and i, and between j and
# boundary. Both exponents are ≤ 0, so each size is one product of tiles that can't overflow.


@triton.jit
def load_channels(x, stride, rows, live, columns, d, F: tl.constexpr, RELATIVE: tl.constexpr):
    """(C, B) in base 2; relative to d, the largest channel, where that one is in the pair's factor already."""
    found = load_rows(x, stride, rows, live, columns, F).to(tl.float32)
    if RELATIVE:
        found -= finite(d)[:, None]
        found = tl.where((d == float("-inf"))[:, None], 0.0, found)
        found = tl.where((columns < F)[None, :], found, 0.0)
    return tl.maximum(found * LOG2E, LOWEST)


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
def channel_products(phi_q, phi_k, channels, C: tl.constexpr, LOW: tl.constexpr, PRECISION: tl.constexpr):
    """Σ_f φ(q_i)_f φ(k_j)_f 2^(D_ij)_f for j ≤ i, else 0."""
    products = tl.where(on_diagonal(C), tl.sum(phi_q * phi_k, 1)[:, None], 0.0)
    for level in tl.static_range(LEVELS):
        left = lowered(phi_q * up_to(channels, 1 << level, C), LOW, PRECISION)
        right = lowered(phi_k * behind(channels, 1 << level, C), LOW, PRECISION)
        part = product(left, tl.trans(right), PRECISION)
        products = tl.where(anchored(1 << level, C), part, products)
    return products
