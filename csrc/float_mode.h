// Holds the thread in the default floating-point mode (nearest, subnormals kept, exceptions masked) for one scope.
// The caller may have torch.set_flush_denormal on, and worker threads inherit the mode of the thread that made them.
#pragma once
#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

namespace zofftk {

class FloatMode {
 public:
#if defined(__x86_64__)
  FloatMode() : saved_(_mm_getcsr()) { _mm_setcsr(0x1F80); }
  ~FloatMode() { _mm_setcsr(saved_); }
#else
  FloatMode() {}
  ~FloatMode() {}
#endif
  FloatMode(const FloatMode&) = delete;
  FloatMode& operator=(const FloatMode&) = delete;

#if defined(__x86_64__)
 private:
  unsigned saved_;
#endif
};

}  // namespace zofftk
