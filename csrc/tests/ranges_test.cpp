// Chunks cover [0, n) once, also where n is near the greatest integer.
#include "../ranges.h"

#include <limits>
#include <string>

#include "check.h"

namespace zofftk::tests {

ZOFFTK_TEST(chunks_cover_everything_once) {
  constexpr int64_t greatest = std::numeric_limits<int64_t>::max();
  for (const int64_t n : {int64_t{0}, int64_t{1}, int64_t{64}, int64_t{65}, int64_t{1} << 40, greatest - 1, greatest}) {
    for (const int64_t chunk : {int64_t{64}, int64_t{32768}, int64_t{1} << 62}) {
      const std::string what = std::to_string(n) + " in chunks of " + std::to_string(chunk);
      const int64_t count = chunk_count(n, chunk);
      ZOFFTK_CHECK((count == 0) == (n == 0), what);
      if (count == 0) continue;
      ZOFFTK_CHECK(chunk_range(n, chunk, 0).begin == 0, what);
      ZOFFTK_CHECK(chunk_range(n, chunk, count - 1).end == n, what);
      ZOFFTK_CHECK(chunk_range(n, chunk, count - 1).begin < n, what);
      if (count == 1) continue;
      ZOFFTK_CHECK(chunk_range(n, chunk, count - 2).end == chunk_range(n, chunk, count - 1).begin, what);
      ZOFFTK_CHECK(chunk_range(n, chunk, 0).end == chunk, what);
    }
  }
}

}  // namespace zofftk::tests
