// Adam and AdamW.
#include "../adam.h"

#include <cmath>

#include "check.h"
#include "step.h"

namespace zofftk::tests {
namespace {

struct Variant {
  const char* name;
  AdamHyper hyper;
};

constexpr Variant kVariants[] = {
    {"AdamW", {7, 1e-3, 0.9, 0.999, 1e-8, 0.1, true, 1.0}},
    {"Adam with decay and a scale", {1, 1e-3, 0.9, 0.999, 1e-8, 0.1, false, 0.37}},
    {"AdamW, average from the gradient", {3, 0.1, 0.3, 0.9, 0.0, 0.0, true, 0x1p-16}},
};

Step adam(const AdamHyper& hyper) {
  return [constants = adam_constants(hyper), decoupled = hyper.decoupled](const Kernels& kernels, const StepBuffers& b,
                                                                          int64_t begin, int64_t end) {
    kernels.adam({b.param.floats(), b.first.floats(), b.second.floats(), b.grad.data(), b.out, b.grad.dtype(),
                  b.out_dtype, decoupled, constants},
                 begin, end);
  };
}

Formula formula(const AdamHyper& hyper) {
  return [c = adam_constants(hyper), decoupled = hyper.decoupled](Element e, float grad) -> Element {
    float g = grad * c.grad_scale;
    if (decoupled) {
      e.param = e.param * c.decay;
    } else {
      g = std::fma(c.weight_decay, e.param, g);
    }
    const float d = g - e.first;
    e.first = c.w1 < 0.5f ? std::fma(c.w1, d, e.first) : std::fma(c.w1 - 1.0f, d, g);
    e.second = std::fma(c.w2 * g, g, c.b2 * e.second);
    const float denom = std::sqrt(e.second) / c.bias2_sqrt + c.eps;
    e.param = e.param + (c.minus_step_size * e.first) / denom;
    return e;
  };
}

}  // namespace

ZOFFTK_TEST(adam_parity) {
  for (const Variant& variant : kVariants) check_step_parity(variant.name, adam(variant.hyper));
}

ZOFFTK_TEST(adam_splits) { check_step_splits(kVariants[0].name, adam(kVariants[0].hyper)); }

ZOFFTK_TEST(adam_formula) {
  // Ordinary values: elements with a tiny operand are rounded elsewhere, see adam.h.
  for (const Variant& variant : kVariants) {
    check_step_formula(variant.name, adam(variant.hyper), formula(variant.hyper), Input::ordinary);
  }
}

}  // namespace zofftk::tests
