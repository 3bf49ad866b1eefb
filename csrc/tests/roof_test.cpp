// Loops at the speed of memory add one to everything and touch nothing else.
#include "../roof.h"

#include "check.h"
#include "guarded.h"
#include "supported.h"
#include "values.h"

namespace zofftk::tests {
namespace {

constexpr int64_t kCount = 2048;  // whole pages, so that the buffers begin at multiples of 64 bytes

void check_roof(const Roof& roof) {
  const std::vector<float> values = ordinary(kCount, 3u);
  const Guarded a(Dtype::float32, values, 0), b(Dtype::float32, values, 0), c(Dtype::float32, values, 0);
  const Guarded grad(Dtype::bfloat16, values, 0), out(Dtype::bfloat16, kCount, 0);
  const auto* const grads = static_cast<const uint16_t*>(grad.data());
  auto* const outs = static_cast<uint16_t*>(out.data());
  roof.run({a.floats(), b.floats(), c.floats(), grads, outs}, 0, kCount);
  for (int64_t i = 0; i < kCount; ++i) {
    const float expected = values[static_cast<size_t>(i)] + 1.0f;
    for (const Guarded* state : {&a, &b, &c}) ZOFFTK_CHECK(state->floats()[i] == expected, roof.name);
    ZOFFTK_CHECK(outs[i] == static_cast<uint16_t>(grads[i] + 1u), roof.name);
  }
  for (const Guarded* buffer : {&a, &b, &c, &grad, &out}) ZOFFTK_CHECK(buffer->guards_hold(), roof.name);
}

}  // namespace

ZOFFTK_TEST(roof_loops) {
  for (const Roof& roof : compiled_roofs()) {
    for (const Isa* isa : supported_isas()) {
      if (isa->name == std::string(roof.needs)) check_roof(roof);
    }
  }
}

}  // namespace zofftk::tests
