// Tasks run in the default floating-point mode, whatever that of their caller or of the thread that made their
// worker, and the caller's comes back.
#include "../float_mode.h"

#include <atomic>
#include <string>

#include "../pool.h"
#include "check.h"

#if defined(__x86_64__)

namespace zofftk::tests {
namespace {

constexpr unsigned kControlBits = 0xFFC0u;  // the others record what happened
constexpr unsigned kDefault = 0x1F80u;
constexpr unsigned kFlushAndRoundUp = kDefault | 0x8000u | 0x0040u | 0x4000u;

unsigned mode_here() { return _mm_getcsr() & kControlBits; }

class CallerMode {
 public:
  CallerMode() : saved_(_mm_getcsr()) { _mm_setcsr(kFlushAndRoundUp); }
  ~CallerMode() { _mm_setcsr(saved_); }
  CallerMode(const CallerMode&) = delete;
  CallerMode& operator=(const CallerMode&) = delete;

 private:
  unsigned saved_;
};

}  // namespace

ZOFFTK_TEST(float_mode_is_set_and_restored) {
  const CallerMode caller;
  unsigned inside = 0, after_inner = 0;
  {
    const FloatMode mode;
    inside = mode_here();
    {
      const FloatMode inner;
    }
    after_inner = mode_here();
  }
  const unsigned after = mode_here();
  ZOFFTK_CHECK(inside == kDefault && after_inner == kDefault, std::to_string(inside));
  ZOFFTK_CHECK(after == kFlushAndRoundUp, std::to_string(after));
}

ZOFFTK_TEST(float_mode_of_tasks) {
  release_workers();
  const CallerMode caller;  // the workers made below inherit it
  for (const int threads : {1, 3}) {
    std::atomic<int> wrong{0}, here{0};
    parallel_for(threads, threads, [&](int64_t) {
      here.fetch_add(1);
      while (here.load() < threads) {  // so that each thread has a task
      }
      wrong += mode_here() != kDefault;
    });
    const unsigned after = mode_here();
    ZOFFTK_CHECK(wrong.load() == 0, std::to_string(wrong.load()) + " tasks of " + std::to_string(threads));
    ZOFFTK_CHECK(after == kFlushAndRoundUp, std::to_string(after));
  }
  release_workers();
}

}  // namespace zofftk::tests

#endif
