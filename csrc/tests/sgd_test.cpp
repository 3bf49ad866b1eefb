// SGD with and without momentum.
#include "../sgd.h"

#include "check.h"
#include "step.h"

namespace zofftk::tests {
namespace {

struct Variant {
  const char* name;
  SgdHyper hyper;
};

constexpr Variant kVariants[] = {
    {"SGD", {1e-2, 0.0, 0.0, 0.1, false, false, 1.0}},
    {"SGD with momentum and dampening", {1e-2, 0.9, 0.5, 0.0, false, false, 0.37}},
    {"Nesterov", {1e-2, 0.9, 0.0, 0.1, true, false, 1.0}},
    {"Nesterov, first step", {1e-2, 0.9, 0.0, 0.1, true, true, 0x1p-16}},
};

Step sgd(const SgdHyper& hyper) {
  return [constants = sgd_constants(hyper)](const Kernels& kernels, const StepBuffers& b, int64_t begin, int64_t end) {
    float* const moment = constants.momentum == 0.0f ? nullptr : b.first.floats();
    kernels.sgd({{b.param.floats(), moment, b.grad.data(), b.out, b.grad.dtype(), b.out_dtype}, constants}, begin, end);
  };
}

Formula formula(const SgdHyper& hyper) {
  return [c = sgd_constants(hyper)](Element e, float grad) -> Element {
    float g = grad * c.grad_scale;
    if (c.weight_decay != 0.0f) g = g + c.weight_decay * e.param;
    if (c.momentum != 0.0f) {
      e.first = c.first ? g : c.momentum * e.first + c.w * g;
      g = c.nesterov ? g + c.momentum * e.first : e.first;
    }
    e.param = e.param - c.lr * g;
    return e;
  };
}

}  // namespace

ZOFFTK_TEST(sgd_parity) {
  for (const Variant& variant : kVariants) check_step_parity(variant.name, sgd(variant.hyper));
}

ZOFFTK_TEST(sgd_splits) {
  for (const Variant& variant : kVariants) check_step_splits(variant.name, sgd(variant.hyper));
}

ZOFFTK_TEST(sgd_formula) {
  for (const Variant& variant : kVariants) {
    check_step_formula(variant.name, sgd(variant.hyper), formula(variant.hyper), Input::wild);
  }
}

}  // namespace zofftk::tests
