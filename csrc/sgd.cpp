#include "sgd.h"

#include "tiny.h"

namespace zofftk {

SgdConstants sgd_constants(const SgdHyper& hyper) {
  SgdConstants constants{};
  constants.grad_scale = static_cast<float>(hyper.grad_scale);
  constants.weight_decay = static_cast<float>(hyper.weight_decay);
  constants.momentum = static_cast<float>(hyper.momentum);
  constants.w = static_cast<float>(1.0 - hyper.dampening);
  constants.lr = static_cast<float>(hyper.lr);
  constants.tiny_grad = tiny_raw_grad(kTinyOperand, hyper.grad_scale);
  constants.nesterov = hyper.nesterov;
  constants.first = hyper.first;
  return constants;
}

}  // namespace zofftk
