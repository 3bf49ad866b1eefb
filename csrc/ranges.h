// Cutting [0, n) into chunks. Integers only, so that it can be tested for sizes no machine could hold.
#pragma once
#include <algorithm>
#include <cstdint>

namespace zofftk {

// Chunks start at multiples of this many elements: a multiple of every vector width.
constexpr int64_t kChunkAlign = 64;

struct Range {
  int64_t begin, end;
};

inline int64_t chunk_count(int64_t n, int64_t chunk) { return n / chunk + (n % chunk != 0); }

inline Range chunk_range(int64_t n, int64_t chunk, int64_t index) {
  const int64_t begin = index * chunk;
  return {begin, begin + std::min(chunk, n - begin)};
}

}  // namespace zofftk
