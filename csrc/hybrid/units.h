// Features that are given by their logarithms: exponentials in units of each feature's own maximum, so that none underflows
// where a query needs it, however far apart features lie.
//
// A unit is raised where a number goes beyond it, then by `headroom` more than needed, so that this is rare. A chunk is cut
// into runs, and units are raised at the first token of a run alone: what a query uses depends on no later key.
#pragma once

#include <cmath>

#include "common/maximum.h"

namespace tarnn {
namespace TARNN_ISA {

template <typename T>
constexpr T headroom = T(16);

/// Rows of f logarithms in tiles, each plus its weight: −∞ behind the f.
template <typename T>
void add_weight(T* row, T weight, Index f, Index ld) {
  for (Index j = 0; j < ld; j += width<T>) store(row + j, load(row + j) + weight);
  std::fill(row + f, row + ld, T(-INFINITY));
}

template <typename T>
bool is_within(const T* row, const T* units, Index ld) {
  Vec<T> above{};
  for (Index j = 0; j < ld; j += width<T>) above = load(row + j) > load(units + j) ? broadcast<T>(T(1)) : above;
  return largest<T>(above) == T(0);
}

/// Raises units to a row of logarithms; keep: what sums in the old units are multiplied with.
template <typename T>
void raise(const T* row, T* units, T* keep, Index ld) {
  for (Index j = 0; j < ld; j += width<T>) {
    const Vec<T> x = load(row + j), unit = load(units + j), next = x > unit ? x + headroom<T> : unit;
    store(keep + j, next > unit ? exp_nonpositive(unit - next) : broadcast<T>(T(1)));
    store(units + j, next);
  }
}

/// e^(x − unit) of a key's logarithms, in place.
template <typename T>
void key_in_units(T* row, const T* units, Index ld) {
  for (Index j = 0; j < ld; j += width<T>) {
    const Vec<T> x = load(row + j);
    store(row + j, x == broadcast<T>(-INFINITY) ? Vec<T>{} : exp_nonpositive(x - load(units + j)));
  }
}

/// e^(x + unit − U) of a query's logarithms, in place, and U: the largest x + unit, 0 where there is no key yet.
template <typename T>
T query_in_units(T* row, const T* units, Index ld) {
  Vec<T> most_of = broadcast<T>(-INFINITY);
  for (Index j = 0; j < ld; j += width<T>) {
    const Vec<T> x = load(row + j) + load(units + j);
    store(row + j, x);
    most_of = x > most_of ? x : most_of;
  }
  const T U = finite(largest<T>(most_of));
  exp_in_units(row, ld, U);
  return U;
}

}  // namespace TARNN_ISA
}  // namespace tarnn
