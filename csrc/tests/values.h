// Numbers to test with, the same in every run and on every platform.
#pragma once
#include <cstdint>
#include <vector>

namespace zofftk::tests {

// Of every size and kind: ordinary, subnormal, huge, zeros of both signs, infinities, NaN.
std::vector<float> wild(int64_t n, uint32_t seed);

// Magnitudes from 2^-10 to 2^-2: no operation of a step meets or makes a subnormal number.
std::vector<float> ordinary(int64_t n, uint32_t seed);

}  // namespace zofftk::tests
