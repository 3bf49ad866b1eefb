#include "roof.h"

#include "kernels.h"
#ifdef ZOFFTK_X86
#include <immintrin.h>
#endif

#include "target_region.h"

namespace zofftk {

namespace {

void roof_plain(const RoofArgs& a, int64_t begin, int64_t end) {
  for (int64_t i = begin; i < end; ++i) {
    const uint16_t grad = a.grad[i];
    a.param[i] += 1.0f;
    a.exp_avg[i] += 1.0f;
    a.exp_avg_sq[i] += 1.0f;
    a.out[i] = static_cast<uint16_t>(grad + 1u);
  }
}

}  // namespace

#ifdef ZOFFTK_X86
ZOFFTK_TARGET_BEGIN("avx512f,avx512bw,avx512dq,avx512vl")
namespace {

ZOFFTK_INLINE __m512 plus_one(const float* from) {
  return _mm512_add_ps(_mm512_loadu_ps(from), _mm512_set1_ps(1.0f));
}
ZOFFTK_INLINE __m512i plus_one(const uint16_t* from) {
  return _mm512_add_epi16(_mm512_loadu_si512(from), _mm512_set1_epi16(1));
}

// Ranges end at a multiple of 32 elements (the caller rounds n down).
void roof_avx512(const RoofArgs& a, int64_t begin, int64_t end) {
  for (int64_t i = begin; i < end; i += 32) {
    const __m512i half = plus_one(a.grad + i);
    for (int64_t k = i; k < i + 32; k += 16) {
      _mm512_storeu_ps(a.param + k, plus_one(a.param + k));
      _mm512_storeu_ps(a.exp_avg + k, plus_one(a.exp_avg + k));
      _mm512_storeu_ps(a.exp_avg_sq + k, plus_one(a.exp_avg_sq + k));
    }
    _mm512_storeu_si512(a.out + i, half);
  }
}

// Needs buffers at multiples of 64 bytes.
void roof_stream(const RoofArgs& a, int64_t begin, int64_t end) {
  for (int64_t i = begin; i < end; i += 32) {
    const __m512i half = plus_one(a.grad + i);
    for (int64_t k = i; k < i + 32; k += 16) {
      _mm512_stream_ps(a.param + k, plus_one(a.param + k));
      _mm512_stream_ps(a.exp_avg + k, plus_one(a.exp_avg + k));
      _mm512_stream_ps(a.exp_avg_sq + k, plus_one(a.exp_avg_sq + k));
    }
    _mm512_stream_si512(reinterpret_cast<__m512i*>(a.out + i), half);
  }
  _mm_sfence();
}

}  // namespace
ZOFFTK_TARGET_END
#endif

const std::vector<Roof>& compiled_roofs() {
  static const auto* const list = new std::vector<Roof>{
      {"plain", "scalar", roof_plain},
#ifdef ZOFFTK_X86
      {"avx512", "avx512", roof_avx512},
      {"stream", "avx512", roof_stream},
#endif
  };
  return *list;
}

}  // namespace zofftk
