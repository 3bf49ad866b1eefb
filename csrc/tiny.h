// Magnitudes below which an operand counts as tiny: processors spend some 150 cycles on every float32 multiplication
// that meets a subnormal number, so what could lead to one goes another way.
#pragma once
#include <algorithm>
#include <cmath>

namespace zofftk {

// The bound for a raw gradient whose scaled value is to be compared with `scaled`.
inline float tiny_raw_grad(float scaled, double grad_scale) {
  const double bound = static_cast<double>(scaled) / (grad_scale == 0.0 ? 1.0 : std::fabs(grad_scale));
  return std::isnan(bound) ? scaled : static_cast<float>(std::clamp(bound, 0x1p-100, 1.0));
}

}  // namespace zofftk
