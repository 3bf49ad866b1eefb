// Conversion between float32 and the 16-bit types: all 16-bit numbers, and what lies on and around every tie.
#include "../half.h"

#include <cmath>

#include "check.h"
#include "guarded.h"
#include "sizes.h"
#include "supported.h"
#include "values.h"

namespace zofftk::tests {
namespace {

constexpr Dtype kHalves[] = {Dtype::bfloat16, Dtype::float16};

void convert(const Isa& isa, const Guarded& target, const Guarded& source) {
  isa.kernels->convert({target.data(), source.data(), target.dtype(), source.dtype()}, 0, source.size());
  ZOFFTK_CHECK(target.guards_hold() && source.guards_hold(), isa.name);
}

// What a 16-bit pattern stands for, by the definition of the format.
float value_of(Dtype dtype, uint32_t pattern) {
  const int mantissa_bits = dtype == Dtype::bfloat16 ? 7 : 10, bias = dtype == Dtype::bfloat16 ? 127 : 15;
  const uint32_t exponent = (pattern & 0x7FFFu) >> mantissa_bits, top = 0x7FFFu >> mantissa_bits;
  const uint32_t mantissa = pattern & ((1u << mantissa_bits) - 1u);
  const double sign = pattern & 0x8000u ? -1.0 : 1.0;
  if (exponent == top) return static_cast<float>(mantissa == 0 ? sign * INFINITY : NAN);
  const uint32_t significand = exponent == 0 ? mantissa : mantissa | (1u << mantissa_bits);
  const int power = static_cast<int>(exponent == 0 ? 1u : exponent) - bias - mantissa_bits;
  return static_cast<float>(sign * std::ldexp(static_cast<double>(significand), power));
}

// Positive float32 values on and beside the middle between neighbours, and which neighbour each rounds to.
struct Ties {
  std::vector<float> values;
  std::vector<uint16_t> rounded;
};

Ties ties(Dtype dtype) {
  const uint32_t infinity = dtype == Dtype::bfloat16 ? 0x7F80u : 0x7C00u;
  Ties t;
  for (uint32_t low = 0; low + 1 < infinity; ++low) {
    const float below = value_of(dtype, low), above = value_of(dtype, low + 1);
    const float middle = static_cast<float>((static_cast<double>(below) + static_cast<double>(above)) / 2.0);
    const uint32_t even = low % 2 == 0 ? low : low + 1;
    const uint32_t expected[] = {low, even, low + 1};
    const float around[] = {std::nextafter(middle, below), middle, std::nextafter(middle, above)};
    for (int k = 0; k < 3; ++k) {
      t.values.push_back(around[k]);
      t.rounded.push_back(static_cast<uint16_t>(expected[k]));
    }
  }
  return t;
}

}  // namespace

ZOFFTK_TEST(widening_of_every_16_bit_number) {
  for (const Dtype dtype : kHalves) {
    std::vector<float> values;
    const Guarded source(dtype, 1 << 16, 0), target(Dtype::float32, 1 << 16, 0);
    for (uint32_t pattern = 0; pattern < 1u << 16; ++pattern) {
      static_cast<uint16_t*>(source.data())[pattern] = static_cast<uint16_t>(pattern);
      values.push_back(value_of(dtype, pattern));
    }
    const Guarded expected(Dtype::float32, values, 0);
    for (const Isa* isa : supported_isas()) {
      convert(*isa, target, source);
      ZOFFTK_CHECK(target.bits() == expected.bits(), isa->name);
    }
  }
}

ZOFFTK_TEST(narrowing_rounds_to_nearest_and_ties_to_even) {
  for (const Dtype dtype : kHalves) {
    const Ties t = ties(dtype);
    const Guarded source(Dtype::float32, t.values, 0), target(dtype, source.size(), 0);
    for (const Isa* isa : supported_isas()) {
      convert(*isa, target, source);
      const auto* const got = static_cast<const uint16_t*>(target.data());
      for (size_t i = 0; i < t.values.size(); ++i) {
        ZOFFTK_CHECK(got[i] == t.rounded[i], std::string(isa->name) + " rounds the float32 with the bits " +
                                                 std::to_string(bits_of(t.values[i])) + " to " +
                                                 std::to_string(got[i]));
      }
    }
  }
}

ZOFFTK_TEST(conversion_parity) {
  const Isa& scalar = find_isa("scalar");
  for (const Dtype dtype : kHalves) {
    for (const int64_t n : sizes()) {
      for (const auto& [to, from] : {std::pair{dtype, Dtype::float32}, std::pair{Dtype::float32, dtype}}) {
        const Guarded source(from, wild(n, 1u), n % 5), target(to, n, n % 3), expected(to, n, 0);
        convert(scalar, expected, source);
        for (const Isa* isa : vector_isas()) {
          convert(*isa, target, source);
          ZOFFTK_CHECK(target.bits() == expected.bits(), std::string(isa->name) + ", n " + std::to_string(n));
        }
      }
    }
  }
}

}  // namespace zofftk::tests
