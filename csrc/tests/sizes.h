// Element counts with every tail of every vector width, and blocks around which loops unroll.
#pragma once
#include <cstdint>
#include <vector>

namespace zofftk::tests {

std::vector<int64_t> sizes();

}  // namespace zofftk::tests
