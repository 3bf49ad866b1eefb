#include "adam.h"

#include <cmath>

#include "tiny.h"

namespace zofftk {

namespace {

constexpr float kTinyScaledGrad = 0x1p-58f, kTinyMoment = 0x1p-80f, kTinyVariance = 0x1p-120f;

}  // namespace

AdamConstants adam_constants(const AdamHyper& hyper) {
  const double step = static_cast<double>(hyper.step);
  const double bias1 = 1.0 - std::pow(hyper.beta1, step);
  const double bias2_sqrt = std::sqrt(1.0 - std::pow(hyper.beta2, step));
  AdamConstants constants{};
  constants.grad_scale = static_cast<float>(hyper.grad_scale);
  constants.decay = static_cast<float>(1.0 - hyper.lr * hyper.weight_decay);
  constants.weight_decay = static_cast<float>(hyper.weight_decay);
  constants.w1 = static_cast<float>(1.0 - hyper.beta1);
  constants.w2 = static_cast<float>(1.0 - hyper.beta2);
  constants.b2 = static_cast<float>(hyper.beta2);
  constants.bias2_sqrt = static_cast<float>(bias2_sqrt);
  constants.eps = static_cast<float>(hyper.eps);
  constants.minus_step_size = static_cast<float>(-(hyper.lr / bias1));
  constants.tiny = {tiny_raw_grad(kTinyScaledGrad, hyper.grad_scale), kTinyScaledGrad, kTinyMoment, kTinyVariance};
  return constants;
}

}  // namespace zofftk
