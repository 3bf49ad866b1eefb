// The contract of one Adam step over flat buffers: a stateless function of addresses and constants.
//
// For every element, in this order, in float32, each line one rounding per written operation:
//
//   g = float(grad) * grad_scale
//   decoupled:  p = p * decay              coupled (L2):  g = fma(weight_decay, p, g)
//   d = g - m
//   m = fma(w1, d, m)  if w1 < 0.5  else  fma(w1 - 1, d, g)
//   v = fma(w2 * g, g, b2 * v)
//   denom = sqrt(v) / bias2_sqrt + eps
//   p = p + (-step_size * m) / denom
//   out = narrow(p)                        ties to even, subnormals kept, NaN stays NaN
//
// An element with a tiny operand (`Tiny` below) takes the same formula with double intermediates, because
// processors spend some 150 cycles on every float32 multiplication that meets a subnormal number. Which way an
// element goes depends on its own values only, so its bits do not depend on neighbours, tails or threads.
//
// Aliasing: param, exp_avg, exp_avg_sq and out do not overlap one another; grad overlaps none of them, except that
// out may be grad itself (same address, same element size). Alignment: that of the element, no more.
#pragma once
#include <cstdint>

#include "dtype.h"

namespace zofftk {

// What the user sets; bias corrections and products are formed from these in double, once.
struct AdamHyper {
  int64_t step;  // counts from 1
  double lr, beta1, beta2, eps, weight_decay;
  bool decoupled;  // true: AdamW, false: Adam with L2 regularisation
  double grad_scale;
};

// Magnitudes below which (zero excepted) an operand counts as tiny; that of the raw gradient, times grad_scale, is
// that of the scaled one, whose square times 1 - beta2 is still a normal number. At or above them no operation of the formula
// yields a subnormal for ordinary hyperparameters; where one does all the same, it is slow and still right.
struct Tiny {
  float grad, scaled_grad, moment, variance;
};

struct AdamConstants {
  float grad_scale, decay, weight_decay, w1, w2, b2, bias2_sqrt, eps, minus_step_size;
  Tiny tiny;
};

AdamConstants adam_constants(const AdamHyper& hyper);

struct AdamArgs {
  float* param;
  float* exp_avg;
  float* exp_avg_sq;
  const void* grad;
  void* out;
  Dtype grad_dtype, out_dtype;  // out_dtype none: there is no out
  bool decoupled;
  AdamConstants constants;
};

}  // namespace zofftk
