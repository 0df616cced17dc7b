// Sequences cut into stretches that are worked on side by side: each stretch's sums on their own, from zero, and then, one
// after the other, the state before each. Where a sequence is one stretch, nothing of this happens.
#pragma once

#include "attention/chunk.h"

namespace tarnn {
namespace TARNN_ISA {

/// A task's memory: the keys of a chunk and a state.
template <typename T>
struct KeyScratch {
  Keys<T> keys;
  State<T> state;
  KeyScratch(Scratch& scratch, const Problem& p, const Sizes<T>& n)
      : keys(take_keys(scratch, p, n)), state{scratch.take<T>(n.f_rows() * n.lde), scratch.take<T>(n.ldf), 0} {}
};

template <typename Layout, typename T>
std::size_t bytes_of(const Problem& p, const Sizes<T>& n) {
  Scratch counting(nullptr);
  Layout layout(counting, p, n);
  return counting.used();
}

/// Σ log_decay over a stretch, (f) or one number, by which its beginning reaches its end; and, behind f numbers, Σ of the
/// largest of each position, by which M does.
template <typename T>
void total_decay(const Problem& p, const Sizes<T>& n, const Stretch& s, T* total) {
  const Index x = p.channels ? n.f : 1;
  clear(total, n.f + 1);
  if (!p.log_decay) return;
  for (Index time = s.begin; time < s.end; ++time) {
    if (is_masked(p, s.row, time)) continue;
    const T* d = static_cast<const T*>(p.log_decay.data) + offset(p.log_decay, s.row, s.head, time);
    T most = x ? d[0] : T(0);
    for (Index j = 0; j < x; ++j) {
      const T here = d[j * p.log_decay.stride[3]];
      total[j] += here;
      most = here > most ? here : most;
    }
    total[n.f] += most;
  }
}

/// The sums of a stretch's keys, from zero (a first stretch goes on from the state given), and its decay, as a block.
template <typename T>
void stretch_sums(const Problem& p, const Sizes<T>& n, const Stretch& s, KeyScratch<T>& at, T* block) {
  if (s.first) {
    given_state(p, n, s, at.state);
  } else {
    clear(at.state.S, n.f * n.lde);
    clear(at.state.z, n.ldf);
    at.state.M = p.weighted ? minus_infinity<T> : T(0);
    total_decay(p, n, s, block + n.f * n.e + n.f + 1);
  }
  Ahead ahead;
  for (Index time = s.begin; time < s.end; time += n.c) {
    load_keys_to_absorb(p, n, s, time, smaller(n.c, s.end - time), at.state.M, false, at.keys, &ahead);
    ahead.clear();
    want_keys(p, s, time + n.c, ahead);
    absorb(at.keys, n, at.state, &ahead);
  }
  write_state(at.state, n, block);
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
    const T log_keep = decay[p.channels ? i : 0];
    const T keep = exp_one<T>(p.weighted ? (log_keep + M_before) - finite(M) : log_keep);
    for (Index j = i * n.e; j < (i + 1) * n.e; ++j) sums[j] = keep * before[j] + add * sums[j];
    sums[size + i] = keep * before[size + i] + add * sums[size + i];
  }
  sums[size + n.f] = M;
}

/// The states behind all stretches that have a slot, a block a slot.
template <typename T>
void states_behind(const Problem& p, const Sizes<T>& n, const Stretches& stretches, T* slots) {
  if (stretches.slots == 0) return;
  const Index size = n.state();
  parallel(p, stretches.count, bytes_of<KeyScratch<T>>(p, n), [&](Index i, void* memory) {
    if (stretches.at[i].slot < 0) return;
    Scratch scratch(memory);
    KeyScratch<T> at(scratch, p, n);
    stretch_sums(p, n, stretches.at[i], at, slots + stretches.at[i].slot * size);
  });
  for (Index i = 0; i < stretches.count; ++i)
    if (stretches.at[i].slot >= 0 && !stretches.at[i].first)
      join(p, n, slots + stretches.at[i - 1].slot * size, slots + stretches.at[i].slot * size);
}

/// The state before stretch i.
template <typename T>
void state_before(const Problem& p, const Sizes<T>& n, const Stretches& stretches, Index i, const T* slots, State<T>& to) {
  if (stretches.at[i].first) given_state(p, n, stretches.at[i], to);
  else read_state(slots + stretches.at[i - 1].slot * n.state(), n, to);
}

}  // namespace TARNN_ISA
}  // namespace tarnn
