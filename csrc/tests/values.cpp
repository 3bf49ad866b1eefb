#include "values.h"

#include <limits>
#include <random>

#include "../half.h"

namespace zofftk::tests {

namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kSpecial[] = {0.0f,    -0.0f,   kInfinity, -kInfinity,  std::numeric_limits<float>::quiet_NaN(),
                              1e-40f,  -1e-40f, 1e-45f,    3.4e38f,     1e-30f,
                              65519.f, 65520.f, 6e-8f,     0x1p-25f};

float ordinary_of(uint32_t bits) {
  const uint32_t sign = bits & 0x80000000u, mantissa = bits & 0x007FFFFFu;
  return float_of(sign | ((117u + (bits >> 28) % 8u) << 23) | mantissa);
}

}  // namespace

std::vector<float> wild(int64_t n, uint32_t seed) {
  std::mt19937 random(seed);
  std::vector<float> values;
  for (int64_t i = 0; i < n; ++i) {
    const uint32_t kind = random() % 10u, bits = random();
    values.push_back(kind < 5u ? ordinary_of(bits) : kind < 8u ? float_of(bits) : kSpecial[bits % std::size(kSpecial)]);
  }
  return values;
}

std::vector<float> ordinary(int64_t n, uint32_t seed) {
  std::mt19937 random(seed);
  std::vector<float> values;
  for (int64_t i = 0; i < n; ++i) values.push_back(ordinary_of(random()));
  return values;
}

}  // namespace zofftk::tests
