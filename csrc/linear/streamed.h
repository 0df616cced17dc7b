// Causal attention token by token, forward: S stays in the cache, and tokens pass over it in pairs (pass.h).
//
//     S_i = keep_i·S_{i−1} + enter_i·φ(k_i) v_iᵀ      z likewise      o_i = S_iᵀφ(q_i) · factor_i,  1/factor = φ(q_i)·z_i + eps
//
// (eq. 16–20 of Katharopoulos et al. 2020, arXiv 2006.16236.) These are the sums of step.h in its order, so a sequence has the
// bits of its steps, however it is divided into blocks and calls.
#pragma once

#include "linear/stretches.h"
#include "linear/pass.h"

namespace tarnn {
namespace TARNN_ISA {

/// The tokens of a block: features of its keys, weighted, and values, with what decay and log-weights do to each.
template <typename T>
struct Block {
  T *k, *x, *scale;        // (c × f), (c × d) what is projected, (c)
  T *v_tile, *keep, *M;    // (c × e), (c) or (c × f), (c): M in whose units the sums are, finite
  Source<T> from;          // what was projected
  Tokens<const T> v;       // the tile, or the tensor itself
  Index rows;
  Keep decay;
};

template <typename T>
Block<T> take_block(Scratch& scratch, const Problem& p, const Sizes<T>& n) {
  Block<T> block{};
  block.k = scratch.take<T>(n.rows() * n.ldf);
  block.x = scratch.take<T>(n.inputs());
  block.scale = scratch.take<T>(n.ldc);
  block.v_tile = scratch.take<T>(n.rows() * n.lde);
  block.keep = scratch.take<T>(p.channels ? n.rows() * n.ldf : n.ldc);
  block.M = scratch.take<T>(n.ldc);
  block.decay = p.channels ? Keep::row : p.log_decay || p.weighted ? Keep::token : Keep::all;
  return block;
}

/// keep of each token, and `enter`, with which its features are multiplied; M becomes that behind the block.
template <typename T>
void weigh_tokens(const Problem& p, const Sizes<T>& n, const Stretch& s, Index time, T& M, Block<T>& block) {
  if (block.decay == Keep::all) return;
  const Index x = p.channels ? n.f : 1, ld = p.channels ? n.ldf : 1;
  for (Index i = 0; i < block.rows; ++i) {
    const bool masked = is_masked(p, s.row, time + i);
    T* d = block.keep + i * ld;
    const T* given = static_cast<const T*>(p.log_decay.data) + (p.log_decay ? offset(p.log_decay, s.row, s.head, time + i) : 0);
    for (Index j = 0; j < ld; ++j) d[j] = p.log_decay && !masked && j < x ? given[j * p.log_decay.stride[3]] : T(0);
    block.M[i] = 0;
    if (!p.weighted) continue;
    T most = x ? d[0] : T(0);
    for (Index j = 1; j < x; ++j) most = d[j] > most ? d[j] : most;
    const T w = log_weight(p, s, time + i, p.map == Map::exp ? block.scale[i] : T(0), masked);
    const T next = M + most > w ? M + most : w;
    for (Index j = 0; j < x; ++j) d[j] = log_keep(d[j], M, next);
    const T enter = exp_one<T>(w - finite(next));
    scale_rows(block.k + i * n.ldf, n.ldf, 1, n.f, &enter);
    block.M[i] = finite(M = next);
  }
  for (Index j = 0; j < block.rows * ld; j += width<T>) store(block.keep + j, exp_nonpositive(load(block.keep + j)));
}

/// The keys and values of a block; M is the maximum before them, then behind.
template <typename T>
void load_block(const Problem& p, const Sizes<T>& n, const Stretch& s, Index time, Index rows, T& M, Block<T>& block, Ahead& ahead) {
  block.rows = rows;
  block.from = make_features(p, n, s, p.k, s.head, time, rows, block.x, block.k, block.scale, &ahead);
  clear_masked(p, s, time, rows, block.k, n.ldf);
  if (n.projected) clear_masked(p, s, time, rows, block.x, n.projected.ldd);
  weigh_tokens(p, n, s, time, M, block);
  block.v = {block.v_tile, n.lde};
  if (passes_directly<T>(p.v, n.e) && !p.mask) {
    block.v = {static_cast<const T*>(p.v.data) + offset(p.v, s.row, s.head, time), p.v.stride[2]};
    return;
  }
  load_tile(p.v, s.row, s.head, time, rows, n.e, block.v_tile, n.lde);
  clear_masked(p, s, time, rows, block.v_tile, n.lde);
}

// Query heads that read S while the same tokens pass over it: as many as there are registers for.
constexpr Index heads_at_once = tile_sums / 6 > 2 ? 4 : 2;

/// A task's memory: the tokens of a block, and the state of each head in the bundle.
template <typename T>
struct BlockScratch {
  Block<T> block;
  State<T>* states;
  Ahead ahead;
  BlockScratch(Scratch& scratch, const Problem& p, const Sizes<T>& n, Index heads)
      : block(take_block(scratch, p, n)), states(take_states(scratch, n, heads)) {}
};

template <typename T>
struct StreamScratch : BlockScratch<T> {
  State<T> copy;  // for query heads that don't read along with the last ones
  T *q, *scale, *den, *factor, *o;  // of some query heads, one after the other
  T *lanes, *z;
  StreamScratch(Scratch& scratch, const Problem& p, const Sizes<T>& n, Index heads) : BlockScratch<T>(scratch, p, n, heads) {
    const Index several = smaller(heads_at_once, p.r);
    if (p.r > 2) copy = take_state(scratch, n);
    q = scratch.take<T>(several * n.rows() * n.ldf);
    scale = scratch.take<T>(several * n.ldc);
    lanes = scratch.take<T>(n.rows() * width<T>);
    z = scratch.take<T>(n.ldf);
    den = scratch.take<T>(several * n.ldc);
    factor = scratch.take<T>(several * n.ldc);
    o = scratch.take<T>(several * n.rows() * n.lde);
  }
};

/// z of token i from that of the token before; at: its key's features.
template <typename T>
TARNN_INLINE Vec<T> next_z(const Block<T>& block, Index i, Index at, Vec<T> z) {
  const Vec<T> k = load(block.k + at);
  if (block.decay == Keep::all) return z + k;
  return z * (block.decay == Keep::row ? load(block.keep + at) : broadcast<T>(block.keep[i])) + k;
}

/// φ(q_i)·z_i in lanes, while z goes from token to token; N vectors of features, from feature j on.
template <int N, typename T>
void pass_normaliser(const Block<T>& block, const Sizes<T>& n, const T* q, Index j, T* z, T* lanes) {
  constexpr Index w = width<T>;
  Vec<T> sums[N];
  unrolled<N>([&](auto x) TARNN_LAMBDA { sums[x] = load(z + j + x * w); });
  for (Index i = 0; i < block.rows; ++i) {
    Vec<T> total = j ? load(lanes + i * w) : Vec<T>{};
    unrolled<N>([&](auto x) TARNN_LAMBDA {
      const Index at = i * n.ldf + j + x * w;
      sums[x] = next_z(block, i, at, sums[x]);
      total += load(q + at) * sums[x];
    });
    store(lanes + i * w, total);
  }
  unrolled<N>([&](auto x) TARNN_LAMBDA { store(z + j + x * w, sums[x]); });
}

/// Sums of lanes for each of some rows, in the order of `sum`.
template <typename T>
void sum_lanes(const T* lanes, Index rows, T* to) {
  constexpr Index w = width<T>;
  for (Index i = 0; i < rows; i += w) {
    Vec<T> a[w];
    unrolled<w>([&](auto l) TARNN_LAMBDA { a[l] = load(lanes + (i + l) * w); });
    transpose_lanes<T>(a);
    for (Index half = w / 2; half; half /= 2)
      for (Index l = 0; l < half; ++l) a[l] += a[l + half];
    store(to + i, a[0]);
  }
}

/// φ(q_i)·z_i of all tokens; z becomes that behind the block.
template <typename T>
void stream_denominators(const Block<T>& block, const Sizes<T>& n, const T* q, T* z, T* lanes, T* den) {
  Index j = 0;
  if (n.f == 0) clear(lanes, n.rows() * width<T>);
  for (; j + 4 * width<T> <= n.f; j += 4 * width<T>) pass_normaliser<4>(block, n, q, j, z, lanes);
  for (; j < n.f; j += width<T>) pass_normaliser<1>(block, n, q, j, z, lanes);
  sum_lanes(lanes, block.rows, den);
}

/// What passes over S: the block's keys and values, and so far no queries.
template <typename T>
Passing<T> passing(const Block<T>& block, const Sizes<T>& n, const State<T>& state) {
  return {state.S, n.f, n.e, n.lde, {block.k, n.ldf}, block.v, {}, {block.keep, block.decay == Keep::row ? n.ldf : 1}, {}, {}};
}

/// The state behind a block that nobody reads within.
template <typename T>
void stream_keys(const Block<T>& block, const Sizes<T>& n, const State<T>& state, Ahead& ahead) {
  for (Index j = 0; j < n.f; j += width<T>) {
    Vec<T> z = load(state.z + j);
    for (Index i = 0; i < block.rows; ++i) z = next_z(block, i, i * n.ldf + j, z);
    store(state.z + j, z);
  }
  pass_all<0>(block.decay, passing(block, n, state), block.rows, ahead);
}

/// The outputs of R query heads from `first` on; S and z become those behind the block.
template <int R, typename T>
void stream_outputs(const Problem& p, const Sizes<T>& n, const Stretch& s, Index first, Index time, const State<T>& state,
                    StreamScratch<T>& at) {
  const Block<T>& block = at.block;
  const Index rows = block.rows, tile = n.rows() * n.ldf;
  for (Index r = 0; r < R; ++r) {
    T *q = at.q + r * tile, *scale = at.scale + r * n.ldc, *den = at.den + r * n.ldc;
    make_features(p, n, s, p.q, first + r, time, rows, block.x, q, scale, &at.ahead);
    if (r + 1 < R) std::memcpy(at.z, state.z, static_cast<std::size_t>(n.ldf) * sizeof(T));
    stream_denominators(block, n, q, r + 1 < R ? at.z : state.z, at.lanes, den);
    for (Index i = 0; i < rows; ++i)
      at.factor[r * n.ldc + i] = output_factor(p, den[i], p.weighted ? block.M[i] : T(0), p.map == Map::exp ? scale[i] : T(0));
    store_denominators(p, s.row, first + r, time, rows, den);
  }
  const bool direct = passes_directly<T>(p.o, n.e);
  Tokens<T> o = {at.o, n.lde, n.rows() * n.lde};
  if (direct) o = {static_cast<T*>(p.o.data) + offset(p.o, s.row, first, time), p.o.stride[2], p.o.stride[1]};
  Passing<T> all = passing(block, n, state);
  all.q = {at.q, n.ldf, tile}, all.factor = {at.factor, 1, n.ldc}, all.o = o;
  pass_all<R>(block.decay, all, rows, at.ahead);
  for (Index r = 0; r < R && !direct; ++r) store_tile(at.o + r * o.head, n.lde, p.o, s.row, first + r, time, rows, n.e);
}

/// What comes next: of one head, a block at `time`; of a bundle, the part of all its heads' rows that is due beside head i.
struct NextBlock {
  Index row, head, heads, time, rows;
  NextBlock(const Problem& p, const Bundle& bundle, Index i, Index time)
      : row(bundle[0].row), head(bundle[0].head), heads(bundle.heads), time(time + p.chunk * i / heads),
        rows(smaller(p.chunk * (i + 1) / heads, bundle[0].end - time) - p.chunk * i / heads) {
    if (time < bundle[0].begin) rows = 0;
  }
  void want_keys(const View& x, Index n, Ahead& ahead) const { ahead.want(x, row, head, time, rows, n * heads_of(x, heads)); }
  void want_queries(const Problem& p, const View& x, Index n, Ahead& ahead) const {
    const Index together = heads > 1 ? p.r : 1;  // query heads whose rows lie side by side
    for (Index r = 0; r < p.r; r += together) ahead.want(x, row, head * p.r + r, time, rows, n * heads_of(x, heads * together));
  }
};

/// A block of one head in the bundle: its outputs, and the state behind it.
template <typename T>
void stream_block(const Problem& p, const Sizes<T>& n, const Bundle& bundle, Index i, Index time, StreamScratch<T>& at) {
  const Stretch& s = bundle[i];
  State<T>& state = at.states[i];
  if (T* to = kept_state<T>(p, s, time)) write_state(state, n, to);
  load_block(p, n, s, time, smaller(n.c, s.end - time), state.M, at.block, at.ahead);
  const NextBlock next(p, bundle, i, time + n.c);
  at.ahead.clear();
  next.want_keys(p.k, p.d, at.ahead);
  next.want_keys(p.v, p.e, at.ahead);
  next.want_queries(p, p.q, p.d, at.ahead);
  next.want_queries(p, p.o, p.e, at.ahead);
  if (p.r == 0) return stream_keys(at.block, n, state, at.ahead);
  for (Index r = 0, several; r < p.r; r += several) {
    several = heads_at_once;
    while (several > p.r - r) several /= 2;
    const State<T>& own = r + several < p.r ? at.copy : state;
    if (r + several < p.r) {
      std::memcpy(own.S, state.S, static_cast<std::size_t>(n.f * n.lde) * sizeof(T));
      std::memcpy(own.z, state.z, static_cast<std::size_t>(n.ldf) * sizeof(T));
    }
    const Index head = s.head * p.r + r;
    if (several == 1) stream_outputs<1>(p, n, s, head, time, own, at);
    if (several == 2) stream_outputs<2>(p, n, s, head, time, own, at);
    if constexpr (heads_at_once > 2)
      if (several == 4) stream_outputs<4>(p, n, s, head, time, own, at);
  }
}

/// The state before a stretch, with zeros where it is empty.
template <typename T>
void stream_from(const Problem& p, const Sizes<T>& n, const Stretch& s, const T* slots, State<T>& to) {
  state_before(p, n, s, slots, to);
  if (begins_empty(p, s, s.begin)) clear(to.S, n.f * n.lde);
}

/// The bundle's states take in the keys from `begin` to `end`, as they would if queries read them.
template <typename T>
void absorb_keys(const Problem& p, const Sizes<T>& n, const Bundle& bundle, Index begin, Index end, BlockScratch<T>& at) {
  for (Index time = begin; time < end; time += n.c)
    for (Index i = 0; i < bundle.heads; ++i) {
      State<T>& state = at.states[i];
      if (begins_empty(p, bundle[i], time)) clear(state.S, n.f * n.lde);
      load_block(p, n, bundle[i], time, smaller(n.c, bundle[i].end - time), state.M, at.block, at.ahead);
      stream_keys(at.block, n, state, at.ahead);
    }
}

/// The call with blocks for chunks.
inline Problem by_blocks(Problem p) {
  p.chunk = p.block;
  return p;
}

template <typename T>
void streamed_forward(const Problem& call) {
  const Problem p = by_blocks(call);
  const Sizes<T> n(p);
  Owned<T> slots(p.keys.slots * n.state());
  const Bundles bundles(p, p.keys, n.f_rows() * n.lde * static_cast<Index>(sizeof(T)));
  if (p.keys.slots) states_behind(call, Sizes<T>(call), p.keys, slots.get());
  parallel_with<StreamScratch<T>>(p, bundles.count(), [&](Index task, StreamScratch<T>& at) {
    const Bundle& bundle = bundles[task];
    for (Index i = 0; i < bundle.heads; ++i) stream_from(p, n, bundle[i], slots.get(), at.states[i]);
    for (Index time = bundle[0].begin; time < bundle[0].end; time += n.c)
      for (Index i = 0; i < bundle.heads; ++i) stream_block(p, n, bundle, i, time, at);
    for (Index i = 0; i < bundle.heads; ++i)
      if (bundle[i].last) put_state(p, n, bundle[i], at.states[i], p.after);
  }, p, n, bundles.heads());
}

}  // namespace TARNN_ISA
}  // namespace tarnn
