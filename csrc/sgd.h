// The contract of one SGD step, with momentum or without, as torch.optim.SGD defines it.
//
// For every element, in this order, in float32, each written operation rounded once and none fused:
//
//   g = float(grad) * grad_scale
//   g = g + (weight_decay * p)             where weight_decay is not 0
//   with momentum:
//     b = g                                at the first step (no dampening; what the buffer holds is not read)
//     b = (momentum * b) + (w * g)         later; w = 1 - dampening
//     g = g + (momentum * b)  if nesterov  else  b
//   p = p - (lr * g)
//   out = narrow(p)                        ties to even, subnormals kept, NaN stays NaN
#pragma once
#include "moment.h"

namespace zofftk {

// What the user sets; the factors are formed in double, once.
struct SgdHyper {
  double lr, momentum, dampening, weight_decay;
  bool nesterov, first;
  double grad_scale;
};

struct SgdConstants {
  float grad_scale, weight_decay, momentum, w, lr, tiny_grad;
  bool nesterov, first;
};

SgdConstants sgd_constants(const SgdHyper& hyper);

struct SgdArgs {
  MomentBuffers buffers;  // a moment there is where momentum is not 0
  SgdConstants constants;
};

}  // namespace zofftk
