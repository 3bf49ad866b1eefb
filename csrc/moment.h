// What optimizers with one moment, or none, have in common: their buffers, and how an element is computed.
//
// Their formulas (lion.h, sgd.h) have no fused operation: every product and every sum is rounded to float32 once. A
// product may therefore be taken in double, where it is exact, and rounded then: the same bits without the 150 cycles
// that a float32 multiplication costs where a number is subnormal. A vector with a tiny element goes that way.
//
// Aliasing: param, moment and out do not overlap one another; grad overlaps none of them, except that out may be grad
// itself (same address, same element size). Alignment: that of the element, no more.
#pragma once
#include "dtype.h"

namespace zofftk {

struct MomentBuffers {
  float* param;
  float* moment;  // null: there is none
  const void* grad;
  void* out;
  Dtype grad_dtype, out_dtype;  // out_dtype none: there is no out
};

// Below it (zero excepted) an operand counts as tiny: no factor of 2^-26 or more makes a subnormal of what is not.
constexpr float kTinyOperand = 0x1p-100f;

}  // namespace zofftk
