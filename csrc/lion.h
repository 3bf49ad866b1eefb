// The contract of one Lion step (Chen et al. 2023, "Symbolic Discovery of Optimization Algorithms", Algorithm 2).
//
// For every element, in this order, in float32, each written operation rounded once and none fused:
//
//   g = float(grad) * grad_scale
//   c = (beta1 * m) + (w1 * g)             w1 = 1 - beta1
//   p = (p * decay) - lr * sign(c)         decay = 1 - lr * weight_decay; sign(0) is 0, sign(NaN) is NaN
//   m = (beta2 * m) + (w2 * g)             w2 = 1 - beta2
//   out = narrow(p)                        ties to even, subnormals kept, NaN stays NaN
#pragma once
#include "moment.h"

namespace zofftk {

// What the user sets; the factors are formed in double, once.
struct LionHyper {
  double lr, beta1, beta2, weight_decay, grad_scale;
};

struct LionConstants {
  float grad_scale, beta1, w1, beta2, w2, decay, lr, tiny_grad;
};

LionConstants lion_constants(const LionHyper& hyper);

struct LionArgs {
  MomentBuffers buffers;
  LionConstants constants;
};

}  // namespace zofftk
