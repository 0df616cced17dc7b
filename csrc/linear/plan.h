// How sequences are cut into stretches, the tasks of one call: by shape alone, never by the number of threads, so that the
// same call gives the same bits on every machine.
#pragma once

#include <algorithm>
#include <vector>

#include "linear/problem.h"

namespace tarnn {

/// How many tasks a call is cut into, at least, where its sequences and heads are fewer. Each cut of causal attention costs
/// arithmetic, the sums of its keys once more: two cores lose a fifth, so eight cores are kept busy and no more. Other
/// attention needs those sums anyway.
inline Index tasks_of(bool causal, Index length) { return causal || length < 16384 ? 8 : 64; }

struct Plan {
  std::vector<Stretch> stretches;
  Index slots = 0;
  Stretches view() const { return {stretches.data(), static_cast<Index>(stretches.size()), slots}; }
};

/// bounds: of n sequences, n + 1 positions; packed: all in row 0, else each in a row of its own from 0 to `bounds[1]`.
/// A sequence is cut where sequences × heads are fewer than `tasks`, into stretches of at least `least` positions, whole
/// `unit`s. keep_last: the state behind the last stretch has a slot too.
inline Plan plan(const std::vector<Index>& bounds, bool packed, Index sequences, Index heads, Index unit, Index tasks,
                 Index least, bool keep_last) {
  Plan out;
  const Index pieces = (tasks + sequences * heads - 1) / std::max<Index>(1, sequences * heads);
  for (Index sequence = 0; sequence < sequences; ++sequence) {
    const Index begin = packed ? bounds[sequence] : 0, end = packed ? bounds[sequence + 1] : bounds[1];
    const Index cuts = std::max<Index>(1, std::min(pieces, (end - begin) / std::max<Index>(1, least)));
    const Index length = ((end - begin + cuts - 1) / cuts + unit - 1) / unit * unit;
    for (Index head = 0; head < heads; ++head)
      for (Index at = begin; at < end || at == begin; at += std::max<Index>(1, length)) {
        const bool last = at + length >= end;
        const Index slot = keep_last || !last ? out.slots++ : -1;
        out.stretches.push_back({packed ? 0 : sequence, sequence, head, at, last ? end : at + length, at == begin, last, slot});
        if (last) break;
      }
  }
  return out;
}

}  // namespace tarnn
