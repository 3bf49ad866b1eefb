// Lion.
#include "../lion.h"

#include "check.h"
#include "step.h"

namespace zofftk::tests {
namespace {

constexpr LionHyper kHyper{1e-2, 0.9, 0.99, 0.1, 0.37};

Step lion(const LionHyper& hyper) {
  return [constants = lion_constants(hyper)](const Kernels& kernels, const StepBuffers& b, int64_t begin, int64_t end) {
    kernels.lion({{b.param.floats(), b.first.floats(), b.grad.data(), b.out, b.grad.dtype(), b.out_dtype}, constants},
                 begin, end);
  };
}

float sign(float x) { return x > 0.0f ? 1.0f : x < 0.0f ? -1.0f : x == 0.0f ? 0.0f : x; }

Formula formula(const LionHyper& hyper) {
  return [c = lion_constants(hyper)](Element e, float grad) -> Element {
    const float g = grad * c.grad_scale;
    const float direction = c.beta1 * e.first + c.w1 * g;
    return {e.param * c.decay - c.lr * sign(direction), c.beta2 * e.first + c.w2 * g, e.second};
  };
}

}  // namespace

ZOFFTK_TEST(lion_parity) { check_step_parity("Lion", lion(kHyper)); }
ZOFFTK_TEST(lion_splits) { check_step_splits("Lion", lion(kHyper)); }
ZOFFTK_TEST(lion_formula) { check_step_formula("Lion", lion(kHyper), formula(kHyper), Input::wild); }

}  // namespace zofftk::tests
