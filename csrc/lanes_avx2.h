// Eight lanes of AVX2, FMA and F16C. Included once, inside the target region of kernels_avx2.cpp.
#pragma once

struct Lanes {
  static constexpr int64_t width = 8;
  using F = __m256;
  using M = __m256i;
  struct D {
    __m256d lo, hi;
  };

  ZOFFTK_INLINE F set1(float x) { return _mm256_set1_ps(x); }
  ZOFFTK_INLINE F add(F a, F b) { return _mm256_add_ps(a, b); }
  ZOFFTK_INLINE F sub(F a, F b) { return _mm256_sub_ps(a, b); }
  ZOFFTK_INLINE F mul(F a, F b) { return _mm256_mul_ps(a, b); }
  ZOFFTK_INLINE F div(F a, F b) { return _mm256_div_ps(a, b); }
  ZOFFTK_INLINE F sqrt(F a) { return _mm256_sqrt_ps(a); }
  ZOFFTK_INLINE F fma(F a, F b, F c) { return _mm256_fmadd_ps(a, b, c); }

  ZOFFTK_INLINE __m256i magnitude(F x) {
    return _mm256_and_si256(_mm256_castps_si256(x), _mm256_set1_epi32(0x7FFFFFFF));
  }
  // 0 < |x| < bound
  ZOFFTK_INLINE M is_tiny(F x, F bound) {
    const __m256i mag = magnitude(x);
    return _mm256_and_si256(_mm256_cmpgt_epi32(_mm256_castps_si256(bound), mag),
                            _mm256_cmpgt_epi32(mag, _mm256_setzero_si256()));
  }
  // 0 < x < bound
  ZOFFTK_INLINE M is_tiny_positive(F x, F bound) {
    const __m256i bits = _mm256_castps_si256(x);
    return _mm256_and_si256(_mm256_cmpgt_epi32(_mm256_castps_si256(bound), bits),
                            _mm256_cmpgt_epi32(bits, _mm256_setzero_si256()));
  }
  ZOFFTK_INLINE M is_nan(F x) { return _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q)); }
  ZOFFTK_INLINE M either(M a, M b) { return _mm256_or_si256(a, b); }
  ZOFFTK_INLINE bool any(M m) { return !_mm256_testz_si256(m, m); }
  ZOFFTK_INLINE bool all(M m) { return _mm256_testc_si256(m, _mm256_set1_epi32(-1)); }
  ZOFFTK_INLINE F select(M m, F yes, F no) { return _mm256_blendv_ps(no, yes, _mm256_castsi256_ps(m)); }

  // `size` with the sign of x, zero where x is zero, x where it is NaN.
  ZOFFTK_INLINE F signed_as(F size, F x) {
    const F with_sign = _mm256_or_ps(size, _mm256_and_ps(x, set1(-0.0f)));
    const M is_zero = _mm256_cmpeq_epi32(magnitude(x), _mm256_setzero_si256());
    return select(is_nan(x), x, select(is_zero, set1(0.0f), with_sign));
  }

  ZOFFTK_INLINE __m256d below(__m256d x, double bound) {
    return _mm256_cmp_pd(_mm256_andnot_pd(_mm256_set1_pd(-0.0), x), _mm256_set1_pd(bound), _CMP_LT_OQ);
  }
  // A subnormal float is its mantissa, an integer, times 2^-149. Going through that integer avoids the slow
  // treatment processors give to subnormal operands and results.
  ZOFFTK_INLINE __m256d widen4(__m128 x) {
    const __m128i mag = _mm_and_si128(_mm_castps_si128(x), _mm_set1_epi32(0x7FFFFFFF));
    const __m128i subnormal = _mm_cmpgt_epi32(_mm_set1_epi32(0x00800000), mag);
    const __m256d small = _mm256_mul_pd(_mm256_cvtepi32_pd(_mm_and_si128(mag, subnormal)), _mm256_set1_pd(0x1p-149));
    const __m256d rest = _mm256_cvtps_pd(_mm_castsi128_ps(_mm_andnot_si128(subnormal, mag)));
    const __m256i sign = _mm256_slli_epi64(_mm256_cvtepi32_epi64(_mm_castps_si128(x)), 32);
    const __m256d signbit = _mm256_and_pd(_mm256_castsi256_pd(sign), _mm256_set1_pd(-0.0));
    return _mm256_or_pd(_mm256_or_pd(small, rest), signbit);
  }
  ZOFFTK_INLINE __m128 narrow4(__m256d x) {
    const __m256d mag = _mm256_andnot_pd(_mm256_set1_pd(-0.0), x);
    const __m256d small = below(x, 0x1p-126);
    const __m128 rest = _mm256_cvtpd_ps(_mm256_andnot_pd(small, x));
    const __m256d scaled = _mm256_mul_pd(_mm256_and_pd(small, mag), _mm256_set1_pd(0x1p149));
    const __m128i integer = _mm256_cvtpd_epi32(scaled);
    const __m128 high = _mm_shuffle_ps(_mm_castpd_ps(_mm256_castpd256_pd128(x)),
                                       _mm_castpd_ps(_mm256_extractf128_pd(x, 1)), 0xDD);
    const __m128 signbit = _mm_and_ps(high, _mm_set1_ps(-0.0f));
    return _mm_or_ps(_mm_or_ps(rest, _mm_castsi128_ps(integer)), signbit);
  }
  ZOFFTK_INLINE D widen_normal(F x) {
    return {_mm256_cvtps_pd(_mm256_castps256_ps128(x)), _mm256_cvtps_pd(_mm256_extractf128_ps(x, 1))};
  }
  ZOFFTK_INLINE D widen(F x) {
    if (!any(is_tiny(x, set1(0x1p-126f)))) return widen_normal(x);
    return {widen4(_mm256_castps256_ps128(x)), widen4(_mm256_extractf128_ps(x, 1))};
  }
  ZOFFTK_INLINE F narrow(D x) {
    const __m256d small = _mm256_or_pd(below(x.lo, 0x1p-126), below(x.hi, 0x1p-126));
    if (_mm256_movemask_pd(small) == 0) return _mm256_set_m128(_mm256_cvtpd_ps(x.hi), _mm256_cvtpd_ps(x.lo));
    return _mm256_set_m128(narrow4(x.hi), narrow4(x.lo));
  }
  // sqrt(k * 2^-149) = sqrt(2 k) * 2^-75
  ZOFFTK_INLINE F sqrt_any(F x) {
    const __m256i mag = magnitude(x);
    const M small = _mm256_and_si256(_mm256_cmpgt_epi32(_mm256_set1_epi32(0x00800000), mag),
                                     _mm256_cmpgt_epi32(_mm256_castps_si256(x), _mm256_setzero_si256()));
    const F integer = _mm256_cvtepi32_ps(_mm256_slli_epi32(mag, 1));
    return mul(sqrt(select(small, integer, x)), select(small, set1(0x1p-75f), set1(1.0f)));
  }
  ZOFFTK_INLINE D dset1(double x) { return {_mm256_set1_pd(x), _mm256_set1_pd(x)}; }
  ZOFFTK_INLINE D dadd(D a, D b) { return {_mm256_add_pd(a.lo, b.lo), _mm256_add_pd(a.hi, b.hi)}; }
  ZOFFTK_INLINE D dsub(D a, D b) { return {_mm256_sub_pd(a.lo, b.lo), _mm256_sub_pd(a.hi, b.hi)}; }
  // |x| < bound ? yes : no
  ZOFFTK_INLINE D dselect_small(D x, double bound, D yes, D no) {
    return {_mm256_blendv_pd(no.lo, yes.lo, below(x.lo, bound)), _mm256_blendv_pd(no.hi, yes.hi, below(x.hi, bound))};
  }
  ZOFFTK_INLINE D dmul(D a, D b) { return {_mm256_mul_pd(a.lo, b.lo), _mm256_mul_pd(a.hi, b.hi)}; }
  ZOFFTK_INLINE D ddiv(D a, D b) { return {_mm256_div_pd(a.lo, b.lo), _mm256_div_pd(a.hi, b.hi)}; }
  ZOFFTK_INLINE void dstore(double* to, D x) {
    _mm256_storeu_pd(to, x.lo);
    _mm256_storeu_pd(to + 4, x.hi);
  }

  ZOFFTK_INLINE F from_bf16(__m128i half) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(half), 16));
  }
  ZOFFTK_INLINE __m128i to_bf16(F x) {
    const __m256i bits = _mm256_castps_si256(x);
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    const __m256i rounded = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7FFF)));
    const __m256i quiet = _mm256_or_si256(bits, _mm256_set1_epi32(0x00400000));
    const __m256i nan = _mm256_cmpgt_epi32(magnitude(x), _mm256_set1_epi32(0x7F800000));
    const __m256i high = _mm256_srli_epi32(_mm256_blendv_epi8(rounded, quiet, nan), 16);
    const __m256i packed = _mm256_permute4x64_epi64(_mm256_packus_epi32(high, high), 0xD8);
    return _mm256_castsi256_si128(packed);
  }

  template <Dtype T>
  ZOFFTK_INLINE F load(const void* base, int64_t i) {
    if constexpr (T == Dtype::float32) return _mm256_loadu_ps(static_cast<const float*>(base) + i);
    const uint16_t* from = static_cast<const uint16_t*>(base) + i;
    const __m128i half = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
    return T == Dtype::bfloat16 ? from_bf16(half) : _mm256_cvtph_ps(half);
  }
  template <Dtype T>
  ZOFFTK_INLINE void store(void* base, int64_t i, F x) {
    if constexpr (T == Dtype::float32) {
      _mm256_storeu_ps(static_cast<float*>(base) + i, x);
    } else {
      const __m128i half = T == Dtype::bfloat16 ? to_bf16(x) : _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT);
      _mm_storeu_si128(reinterpret_cast<__m128i*>(static_cast<uint16_t*>(base) + i), half);
    }
  }
  // Tails go through a padded copy, so that they meet the same instructions as the main loop.
  template <Dtype T>
  ZOFFTK_INLINE F load_part(const void* base, int64_t i, int64_t count) {
    alignas(32) char padded[32] = {};
    const int64_t size = element_size(T);
    __builtin_memcpy(padded, static_cast<const char*>(base) + i * size, static_cast<size_t>(count * size));
    return load<T>(padded, 0);
  }
  template <Dtype T>
  ZOFFTK_INLINE void store_part(void* base, int64_t i, int64_t count, F x) {
    alignas(32) char padded[32];
    const int64_t size = element_size(T);
    store<T>(padded, 0, x);
    __builtin_memcpy(static_cast<char*>(base) + i * size, padded, static_cast<size_t>(count * size));
  }
};
