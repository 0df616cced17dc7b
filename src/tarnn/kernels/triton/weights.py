"""Before the sums: the scale of each row's features, each key's log-weight, and the maximum M before and behind each chunk."""

import triton
import triton.language as tl

from tarnn.kernels.triton.tiles import arguments, chunk_of, exp, finite, live_rows, projection_of, terms, tile_mask


@triton.jit(do_not_specialize=["T", "H"])
def row_scales(x, scale, projection, T, H, R, spec: tl.constexpr):
    """scale (b, h, t): the largest exponent of a row's features, which is taken out of all of them."""
    t0, h, b = tl.program_id(0) * spec.C, tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    rows, columns = tl.arange(0, spec.C), tl.arange(0, spec.BF)
    live = t0 + rows < T
    u = arguments(x, b, h, t0, rows, live, columns, projection_of(projection, b, h // R), spec)
    u = tl.where((columns < spec.F)[None, :], u, float("-inf"))
    tl.store(scale + (b * H + h) * T + t0 + rows, tl.max(u, 1), mask=live)


@triton.jit(
    do_not_specialize=[
        "T",
        "G",
        "decay_b",
        "decay_h",
        "decay_t",
        "log_weight_b",
        "log_weight_h",
        "log_weight_t",
        "mask_b",
    ],
    do_not_specialize_on_alignment=["decay", "log_weight", "mask"],
)
def chunk_weights(
    decay, decay_b, decay_h, decay_t, log_weight, log_weight_b, log_weight_h, log_weight_t, scale_k, mask, mask_b,
    w, d, top, total, chunks, T, G, GIVEN: tl.constexpr, spec: tl.constexpr,
):  # fmt: skip
    """Per key w and d (b, g, s): −∞ and 0 where masked. Per chunk (c, g): max_j w_j + D_cj, and the sum of d."""
    chunk, g = tl.program_id(0), tl.program_id(1).to(tl.int64)
    row, start, stop = chunk_of(chunks, chunk)
    rows = tl.arange(0, spec.C)
    live = live_rows(mask + row * mask_b, start, stop, rows, spec)
    at = (row * G + g) * T + start + rows
    weight = tl.full((spec.C,), 0.0, tl.float32)
    lost = tl.full((spec.C,), 0.0, tl.float32)
    if spec.decay:
        decay += row * decay_b + g * decay_h + start.to(tl.int64) * decay_t
        if spec.channels:
            columns = tl.arange(0, spec.BF)
            inside = tile_mask(live, columns, spec.F)
            channels = tl.load(decay + rows[:, None] * decay_t + columns[None, :], mask=inside, other=0.0).to(
                tl.float32
            )
            lost = tl.max(tl.where((columns < spec.F)[None, :], channels, float("-inf")), 1)
        else:
            lost = tl.load(decay + rows * decay_t, mask=live, other=0.0).to(tl.float32)
        lost = tl.where(live, lost, 0.0)
        tl.store(d + at, lost, mask=start + rows < stop)
    if spec.weighted:
        if GIVEN:
            log_weight += row * log_weight_b + g * log_weight_h + start.to(tl.int64) * log_weight_t
            weight = tl.load(log_weight + rows * log_weight_t, mask=live, other=0.0).to(tl.float32)
        if spec.function == 4:
            weight += tl.load(scale_k + at, mask=live, other=0.0)
        weight = tl.where(live, weight, float("-inf"))
        tl.store(w + at, weight, mask=start + rows < stop)
        if spec.decay:
            weight += tl.sum(terms(lost, spec.C), 0)
        tl.store(top + chunk.to(tl.int64) * G + g, tl.max(weight, 0))
        tl.store(total + chunk.to(tl.int64) * G + g, tl.sum(lost, 0))


@triton.jit(do_not_specialize=["G"])
def running_maximum(
    top, total, M, sequences, M_in, M_out, M_end, begin, G,
    B: tl.constexpr, GIVEN: tl.constexpr, FRESH: tl.constexpr, spec: tl.constexpr,
):  # fmt: skip
    """M before and behind each chunk (c, g) and behind each sequence (n, g); B chunks at a time.

    Where not causal there is one M, that of all keys. `begin` (n, g): what the given state is multiplied with, to be in
    units of the first M. FRESH: there was no state before, so no M.
    """
    n, g = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    first, end = tl.load(sequences + n * 4 + 2), tl.load(sequences + n * 4 + 3)
    rows = tl.arange(0, B)
    before = tl.full((), 0.0, tl.float32)
    if FRESH:
        before = tl.full((), float("-inf"), tl.float32)
    if GIVEN:
        before = tl.load(M + n * G + g)
    current = before
    for chunk in range(first, end, B):
        live = chunk + rows < end
        at = (chunk + rows).to(tl.int64) * G + g
        local = tl.load(top + at, mask=live, other=float("-inf"))
        lost = tl.load(total + at, mask=live, other=0.0)
        # as within a chunk: `local` is the weight of what enters at a place, `lost` the decay of what was there before
        place = tl.arange(0, B)
        until = tl.cumsum(terms(lost, B), 0) + local[None, :]
        until = tl.max(tl.where(place[:, None] >= place[None, :], until, float("-inf")), 1)
        out = tl.maximum(current + tl.cumsum(lost, 0), until)
        if spec.causal:
            tl.store(M_out + at, out, mask=live)
            tl.store(M_in + at + G, out, mask=chunk + rows + 1 < end)
        current = tl.max(tl.where(place == tl.minimum(B, end - chunk) - 1, out, float("-inf")), 0)
    if spec.causal:
        tl.store(M_in + first.to(tl.int64) * G + g, before, mask=first < end)
        tl.store(begin + n * G + g, 1.0)
    else:
        for chunk in range(first, end, B):
            at = (chunk + rows).to(tl.int64) * G + g
            tl.store(M_in + at, current + tl.full((B,), 0.0, tl.float32), mask=chunk + rows < end)
            tl.store(M_out + at, current + tl.full((B,), 0.0, tl.float32), mask=chunk + rows < end)
        tl.store(begin + n * G + g, exp(before - finite(current)))
    tl.store(M_end + n * G + g, current)
