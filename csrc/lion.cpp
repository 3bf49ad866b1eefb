#include "lion.h"

#include "tiny.h"

namespace zofftk {

LionConstants lion_constants(const LionHyper& hyper) {
  LionConstants constants{};
  constants.grad_scale = static_cast<float>(hyper.grad_scale);
  constants.beta1 = static_cast<float>(hyper.beta1);
  constants.w1 = static_cast<float>(1.0 - hyper.beta1);
  constants.beta2 = static_cast<float>(hyper.beta2);
  constants.w2 = static_cast<float>(1.0 - hyper.beta2);
  constants.decay = static_cast<float>(1.0 - hyper.lr * hyper.weight_decay);
  constants.lr = static_cast<float>(hyper.lr);
  constants.tiny_grad = tiny_raw_grad(kTinyOperand, hyper.grad_scale);
  return constants;
}

}  // namespace zofftk
