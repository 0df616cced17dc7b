// Packed weights: the matrices of products.
#pragma once

#include "kernels.h"

namespace tarnn {

/// How weights are stored. int8: whole numbers from −127 to 127 and a factor per output. int4: from −8 to 7, and a factor per
/// output and 32 inputs.
enum class Format { float32, bfloat16, int8, int4 };

constexpr Index panel = 64;  // outputs of a product that lie side by side in memory

constexpr Index group = 32;  // inputs that share a factor, of int4
constexpr Index factor_bytes = 2 * panel, group_bytes = factor_bytes + group * panel / 2;  // of a panel: a group's factors, and all of it

constexpr Index step = 64;  // bytes of inputs of an output that go together: panels of bfloat16 and int8 are whole steps

/// bfloat16 numbers of whole steps.
inline constexpr Index whole_steps(Index n) { return (n + step / 2 - 1) / (step / 2) * (step / 2); }

inline constexpr Index whole_panels(Index n) { return (n + panel - 1) / panel * panel; }

/// Bytes of a rounded row: bfloat16 numbers for weights of these, else levels.
inline constexpr Index bytes_of_row(Format format, Index n) { return format == Format::bfloat16 ? 2 * whole_steps(n) : whole_panels(n); }

/// Bytes of a panel.
inline constexpr Index bytes_of_panel(Format format, Index inputs) {
  if (format == Format::int8) return panel * ((inputs + step - 1) / step * step);
  if (format == Format::bfloat16) return panel * 2 * whole_steps(inputs);
  if (format == Format::int4) return (inputs + group - 1) / group * group_bytes;
  return panel * inputs * 4;
}

/// y = W x + bias. W lies in panels of 64 outputs: input after input, of each input its 64 weights; of bfloat16 two and of int8 four inputs
/// at a time, of each output its weights side by side; of int4, see products.h. Missing outputs and inputs are zeros.
struct Matrix {
  Format format;
  Index inputs, outputs;
  const void* at;
  const float* bias;   // of whole panels, as the next two
  const float* scale;  // int8: what each output's whole numbers are multiplied with
  const float* sums;   // int8, int4: Σ of each output's weights, scale included
  Index panels() const { return (outputs + panel - 1) / panel; }
  bool takes_bytes() const { return format == Format::int8 || format == Format::int4; }
};

}  // namespace tarnn
