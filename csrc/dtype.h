// Element types a buffer may hold.
#pragma once
#include <cstdint>

namespace zofftk {

enum class Dtype { none, float32, bfloat16, float16 };

constexpr int64_t element_size(Dtype dtype) {
  return dtype == Dtype::none ? 0 : dtype == Dtype::float32 ? 4 : 2;
}

}  // namespace zofftk
