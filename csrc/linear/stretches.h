// Sequences cut into stretches that are worked on side by side: each stretch's sums on their own, from zero, and then, one
// after the other, the state before each. Where a sequence is one stretch, nothing of this happens.
#pragma once

#include "linear/state.h"

namespace tarnn {
namespace TARNN_ISA {

/// The stretches that one task goes through side by side, chunk by chunk: the same positions of neighbouring heads.
struct Bundle {
  const Stretch* first;
  Index step, heads;
  const Stretch& operator[](Index i) const { return first[i * step]; }
};

/// How many heads of x so many heads of a call have.
inline Index heads_of(const View& x, Index heads) { return (heads + x.share - 1) / x.share; }

/// The tasks of a call. Where heads lie side by side in memory, as in (b, t, h·d), one head's rows are a few cache lines of
/// every row of the tensor, and each page of memory is looked up once for every head; so a task takes several heads, as
/// many as their states leave room in the cache, if that makes no thread wait longer for another. What is computed for a
/// head is the same in any bundle.
class Bundles {
 public:
  static constexpr Index most_bytes = 5 << 16;  // of states: backward has room for two heads of 128 × 128

  /// bytes: of the states of a head
  Bundles(const Problem& p, const Stretches& of, Index bytes) : bundles_(of.count) {
    const bool side_by_side = p.k.stride[1] < p.k.stride[2];
    const auto rounds = [&](Index heads) {  // that the slowest thread is busy, in heads
      const Index tasks = of.count / p.g * ((p.g + heads - 1) / heads);
      return (tasks + p.threads - 1) / p.threads * heads;
    };
    heads_ = side_by_side ? smaller(p.g, most_bytes / (bytes + 1)) : 1;
    while (heads_ > 1 && rounds(heads_) > rounds(1)) --heads_;
    if (heads_ < 1) heads_ = 1;
    if (p.together > 1) heads_ = p.together;
    for (Index i = 0, pieces; i < of.count; i += pieces * p.g) {  // a sequence
      for (pieces = 1; !of.at[i + pieces - 1].last; ++pieces) {}
      for (Index head = 0; head < p.g; head += heads_)
        for (Index piece = 0; piece < pieces; ++piece)
          bundles_.get()[count_++] = {of.at + i + head * pieces + piece, pieces, smaller(heads_, p.g - head)};
    }
  }
  Index count() const { return count_; }
  Index heads() const { return heads_; }  // in a bundle, at most
  const Bundle& operator[](Index i) const { return bundles_.get()[i]; }

 private:
  Owned<Bundle> bundles_;
  Index count_ = 0, heads_ = 1;
};

/// f(i, layout) for the first stretch of each sequence and head, where one has several.
template <typename Layout, typename F, typename... A>
void for_each_cut(const Problem& p, const Stretches& of, F f, const A&... arguments) {
  bool cut = false;
  for (Index i = 0; i < of.count; ++i) cut = cut || !of.at[i].first;
  if (!cut) return;
  parallel_with<Layout>(p, of.count, [&](Index i, Layout& at) {
    if (of.at[i].first && !of.at[i].last) f(i, at);
  }, arguments...);
}

/// Of tasks that need no memory; a task has some all the same, or it would count as one that got none.
struct NoScratch {
  explicit NoScratch(Scratch& scratch) { scratch.take<char>(1); }
};

/// A task's memory: the keys of a chunk, and states.
template <typename T>
struct KeyScratch {
  Keys<T> keys;
  State<T>* states;
  Ahead ahead;
  KeyScratch(Scratch& scratch, const Problem& p, const Sizes<T>& n, Index heads)
      : keys(take_keys(scratch, p, n)), states(take_states(scratch, n, heads)) {}
};

/// What to ask for while query head r of a chunk is worked on. Of one head: the next query head of these keys, or the chunk
/// at `next` with new keys. Of a bundle: a part of the chunk at `next`, of all heads, whose rows lie side by side: so memory
/// is read in the order in which it lies.
struct Onward {
  Index row, key_head, key_heads, query_head, query_heads, time, rows = 0;
  bool new_keys = true;
  Onward(const Problem& p, const Bundle& bundle, Index i, Index r, Index now, Index next)
      : row(bundle[0].row), key_head(bundle[0].head), key_heads(bundle.heads), query_head(key_head * p.r),
        query_heads(bundle.heads), time(next) {
    Index parts = 1, part = 0;
    if (bundle.heads > 1) {
      query_heads *= p.r, parts = bundle.heads * (p.r > 0 ? p.r : 1), part = i * p.r + (r > 0 ? r : 0);
    } else if (r + 1 < p.r) {
      query_head += r + 1, time = now, new_keys = false;
    }
    if (time < bundle[0].begin) return;
    const Index all = smaller(p.chunk, bundle[0].end - time), from = p.chunk * part / parts;
    rows = smaller(all, p.chunk * (part + 1) / parts) - from;
    time += from;
  }

  void want_of_keys(const View& x, Index n, Ahead& ahead) const {
    if (new_keys) ahead.want(x, row, key_head, time, rows, n * heads_of(x, key_heads));
  }
  void want_of_queries(const View& x, Index n, Ahead& ahead) const {
    ahead.want(x, row, query_head, time, rows, n * heads_of(x, query_heads));
  }
};

/// Asks for the keys and values that come next.
inline void want_keys(const Problem& p, const Onward& next, Ahead& ahead) {
  next.want_of_keys(p.k, p.d, ahead);
  next.want_of_keys(p.v, p.e, ahead);
}

/// Σ log_decay over a stretch, (f) or one number, by which its beginning reaches its end; and, behind f numbers, Σ of the
/// largest of each position, by which M does.
template <typename T>
void total_decay(const Problem& p, const Sizes<T>& n, const Stretch& s, T* total) {
  const Index x = p.channels ? n.f : smaller(1, n.f);
  clear(total, n.f + 1);
  if (!p.log_decay) return;
  for (Index time = s.begin; time < s.end; ++time) {
    if (is_masked(p, s.row, time)) continue;
    const T* d = static_cast<const T*>(p.log_decay.data) + offset(p.log_decay, s.row, s.head, time);
    T most = x || !p.channels ? d[0] : T(0);
    for (Index j = 0; j < x; ++j) {
      const T here = d[j * p.log_decay.stride[3]];
      total[j] += here;
      most = here > most ? here : most;
    }
    total[n.f] += most;
  }
}

/// Where the state before a segment of a stretch is kept for the backward pass, as `write_state` does; null at other positions.
template <typename T>
T* kept_state(const Problem& p, const Stretch& s, Index time) {
  if (!p.kept || time == s.begin || (time - s.begin) % p.segment) return nullptr;
  return static_cast<T*>(p.kept.data) + offset(p.kept, s.row, s.head, time / p.segment - 1);
}

/// A chunk's keys, which a state takes in. empty: its S is not there yet.
template <typename T>
void load_and_absorb(const Problem& p, const Sizes<T>& n, const Stretch& s, Index time, Index rows, KeyScratch<T>& at,
                     State<T>& state, const Onward& next, bool empty) {
  load_keys(p, n, s, time, rows, state.M, at.keys, &at.ahead);
  at.ahead.clear();
  want_keys(p, next, at.ahead);
  absorb(at.keys, n, state, &at.ahead, empty);
}

/// The bundle's states take in the keys from `begin` to `end`, whole chunks but for the stretch's last.
template <typename T, typename At>
void absorb_keys(const Problem& p, const Sizes<T>& n, const Bundle& bundle, Index begin, Index end, At& at) {
  for (Index time = begin; time < end; time += n.c)
    for (Index i = 0; i < bundle.heads; ++i)
      load_and_absorb(p, n, bundle[i], time, smaller(n.c, bundle[i].end - time), at, at.states[i],
                      Onward(p, bundle, i, p.r - 1, time, time + n.c), begins_empty(p, bundle[i], time));
}

/// The sums of a bundle's keys, from zero (a first stretch goes on from the state given), and its decay, as blocks.
template <typename T, typename At>
void stretch_sums(const Problem& p, const Sizes<T>& n, const Bundle& bundle, At& at, T* slots) {
  for (Index i = 0; i < bundle.heads; ++i) {
    if (bundle[i].first) {
      given_state(p, n, bundle[i], at.states[i]);
    } else {
      clear(at.states[i].S, n.f * n.lde);
      clear(at.states[i].z, n.ldf);
      at.states[i].M = p.weighted ? minus_infinity<T> : T(0);
      total_decay(p, n, bundle[i], slots + bundle[i].slot * n.state() + n.f * n.e + n.f + 1);
    }
  }
  absorb_keys(p, n, bundle, bundle[0].begin, bundle[0].end, at);
  for (Index i = 0; i < bundle.heads; ++i) write_state(at.states[i], n, slots + bundle[i].slot * n.state());
}

/// sums ← what the state `before` a stretch, decayed over it, and the stretch's own sums make together.
template <typename T>
void join(const Problem& p, const Sizes<T>& n, const T* before, T* sums) {
  const Index size = n.f * n.e;
  const T* decay = sums + size + n.f + 1;
  const T M_before = before[size + n.f], M_sums = sums[size + n.f];
  const T decayed = M_before + decay[n.f], M = !p.weighted ? T(0) : decayed > M_sums ? decayed : M_sums;
  const T add = p.weighted ? exp_one<T>(M_sums - finite(M)) : T(1);
  for (Index i = 0; i < n.f; ++i) {
    const T d = decay[p.channels ? i : 0], keep = exp_one<T>(p.weighted ? log_keep(d, M_before, M) : d);
    for (Index j = i * n.e; j < (i + 1) * n.e; ++j) sums[j] = keep * before[j] + add * sums[j];
    sums[size + i] = keep * before[size + i] + add * sums[size + i];
  }
  sums[size + n.f] = M;
}

/// The states behind all stretches that have a slot, a block per slot.
template <typename T, typename At = KeyScratch<T>>
void states_behind(const Problem& p, const Sizes<T>& n, const Stretches& stretches, T* slots) {
  if (stretches.slots == 0) return;
  const Bundles bundles(p, stretches, n.f_rows() * n.lde * static_cast<Index>(sizeof(T)));
  parallel_with<At>(p, bundles.count(), [&](Index i, At& at) {
    if (bundles[i][0].slot >= 0) stretch_sums(p, n, bundles[i], at, slots);
  }, p, n, bundles.heads());
  const Index size = n.state();
  for_each_cut<NoScratch>(p, stretches, [&](Index i, NoScratch&) {
    for (; !stretches.at[i].last && stretches.at[i + 1].slot >= 0; ++i)
      join(p, n, slots + stretches.at[i].slot * size, slots + stretches.at[i + 1].slot * size);
  });
}

/// The state before a stretch.
template <typename T>
void state_before(const Problem& p, const Sizes<T>& n, const Stretch& s, const T* slots, State<T>& to) {
  if (s.first) given_state(p, n, s, to);
  else read_state(slots + (&s)[-1].slot * n.state(), n, to);
}

}  // namespace TARNN_ISA
}  // namespace tarnn
