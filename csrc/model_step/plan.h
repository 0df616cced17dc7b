// The plan of a fused step: whole numbers that say what a model is made of, and where in a block of bytes its weights lie.
// Python writes it (kernels/cpu/model_step.py); the same numbers are read here in the same order.
#pragma once

#include <vector>

#include "model_step/stack.h"

namespace tarnn {

/// Of the order and meaning of a plan's numbers; `VERSION` in kernels/cpu/model_step.py is the same. Whoever changes one changes both.
constexpr Index plan_version = 7;

/// The model that a plan describes: all of a Stack but what goes in and out. Throws std::runtime_error for a plan of another
/// version, cut short or too long, and for a number that is not possible or would lead beyond the block: whatever the plan
/// says, a step reads nothing outside of it.
Stack read_plan(const Index* numbers, Index count, const void* block, Index bytes, std::vector<Layer>& layers,
                std::vector<Rotation>& rotations);

}  // namespace tarnn
