// Accumulation of gradients, and sums of squares.
#include <cmath>
#include <cstring>

#include "../half.h"
#include "../pool.h"
#include "../ranges.h"
#include "check.h"
#include "chunks.h"
#include "guarded.h"
#include "sizes.h"
#include "supported.h"
#include "values.h"

namespace zofftk::tests {
namespace {

constexpr Dtype kDtypes[] = {Dtype::float32, Dtype::bfloat16, Dtype::float16};

// As kernels.h says: element i goes to lane i mod 32, then a fixed tree.
double square_sum(const std::vector<float>& values, int64_t begin, int64_t end) {
  double lanes[32] = {};
  for (int64_t i = begin; i < end; ++i) {
    const double wide = values[static_cast<size_t>(i)];
    lanes[(i - begin) % 32] += wide * wide;
  }
  for (int half = 16; half > 0; half /= 2) {
    for (int k = 0; k < half; ++k) lanes[k] += lanes[k + half];
  }
  return lanes[0];
}

bool same(double a, double b) { return std::memcmp(&a, &b, sizeof a) == 0 || (std::isnan(a) && std::isnan(b)); }

void check_square_sums(const Isa& isa, const Guarded& source, int64_t block, int threads) {
  const std::vector<float> values = source.values();
  const int64_t n = source.size(), blocks = chunk_count(n, block);
  std::vector<double> sums(static_cast<size_t>(blocks), -1.0);
  const SquareSumArgs args{source.data(), source.dtype(), n, block, sums.data()};
  parallel_for(blocks, threads, [&](int64_t index) { isa.kernels->square_sums(args, index, index + 1); });
  for (int64_t index = 0; index < blocks; ++index) {
    const Range r = chunk_range(n, block, index);
    ZOFFTK_CHECK(same(sums[static_cast<size_t>(index)], square_sum(values, r.begin, r.end)),
                 std::string(isa.name) + ", n " + std::to_string(n) + ", block " + std::to_string(index));
  }
}

}  // namespace

ZOFFTK_TEST(accumulation) {
  for (const Dtype dtype : kDtypes) {
    for (const int64_t n : sizes()) {
      const Guarded added(dtype, wild(n, 5u), n % 5);
      std::vector<float> expected = wild(n, 6u);
      const std::vector<float> wide = added.values();
      for (size_t i = 0; i < expected.size(); ++i) expected[i] += wide[i];
      for (const Isa* isa : supported_isas()) {
        const Guarded sum(Dtype::float32, wild(n, 6u), n % 3);
        const Chunks chunks(64);
        parallel_ranges(n, 3, [&](int64_t begin, int64_t end) {
          isa->kernels->accumulate({sum.floats(), added.data(), dtype}, begin, end);
        });
        ZOFFTK_CHECK(sum.guards_hold() && sum.bits() == Guarded(Dtype::float32, expected, 0).bits(), isa->name);
      }
    }
  }
}

ZOFFTK_TEST(square_sums_in_the_written_order) {
  for (const Isa* isa : supported_isas()) {
    for (const Dtype dtype : kDtypes) {
      for (const int64_t n : sizes()) {
        const Guarded mixed(dtype, wild(n, 7u), n % 5), finite(dtype, ordinary(n, 8u), n % 5);
        for (const int64_t block : {64, 100}) {
          check_square_sums(*isa, mixed, block, 1);
          check_square_sums(*isa, finite, block, 3);
        }
      }
    }
  }
}

}  // namespace zofftk::tests
