// Sixteen lanes of AVX-512 (F, BW, DQ, VL). Included once, inside the target region of kernels_avx512.cpp.
#pragma once

struct Lanes {
  static constexpr int64_t width = 16;
  using F = __m512;
  using M = __mmask16;
  struct D {
    __m512d lo, hi;
  };

  ZOFFTK_INLINE F set1(float x) { return _mm512_set1_ps(x); }
  ZOFFTK_INLINE F add(F a, F b) { return _mm512_add_ps(a, b); }
  ZOFFTK_INLINE F sub(F a, F b) { return _mm512_sub_ps(a, b); }
  ZOFFTK_INLINE F mul(F a, F b) { return _mm512_mul_ps(a, b); }
  ZOFFTK_INLINE F div(F a, F b) { return _mm512_div_ps(a, b); }
  ZOFFTK_INLINE F sqrt(F a) { return _mm512_sqrt_ps(a); }
  ZOFFTK_INLINE F fma(F a, F b, F c) { return _mm512_fmadd_ps(a, b, c); }

  ZOFFTK_INLINE __m512i magnitude(F x) {
    return _mm512_and_si512(_mm512_castps_si512(x), _mm512_set1_epi32(0x7FFFFFFF));
  }
  // 0 < |x| < bound: zero, less one, is the greatest unsigned integer.
  ZOFFTK_INLINE M is_tiny(F x, F bound) {
    const __m512i one = _mm512_set1_epi32(1);
    return _mm512_cmplt_epu32_mask(_mm512_sub_epi32(magnitude(x), one),
                                   _mm512_sub_epi32(_mm512_castps_si512(bound), one));
  }
  // 0 < x < bound
  ZOFFTK_INLINE M is_tiny_positive(F x, F bound) {
    const __m512i one = _mm512_set1_epi32(1);
    return _mm512_cmplt_epu32_mask(_mm512_sub_epi32(_mm512_castps_si512(x), one),
                                   _mm512_sub_epi32(_mm512_castps_si512(bound), one));
  }
  ZOFFTK_INLINE M is_nan(F x) { return _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q); }
  ZOFFTK_INLINE M either(M a, M b) { return static_cast<M>(a | b); }
  ZOFFTK_INLINE bool any(M m) { return m != 0; }
  ZOFFTK_INLINE bool all(M m) { return m == 0xFFFF; }
  ZOFFTK_INLINE F select(M m, F yes, F no) { return _mm512_mask_blend_ps(m, no, yes); }

  // `size` with the sign of x, zero where x is zero, x where it is NaN.
  ZOFFTK_INLINE F signed_as(F size, F x) {
    const M not_zero = _mm512_test_epi32_mask(magnitude(x), magnitude(x));
    return select(is_nan(x), x, _mm512_maskz_or_ps(not_zero, size, _mm512_and_ps(x, set1(-0.0f))));
  }

  ZOFFTK_INLINE __mmask8 below(__m512d x, double bound) {
    return _mm512_cmp_pd_mask(_mm512_abs_pd(x), _mm512_set1_pd(bound), _CMP_LT_OQ);
  }
  ZOFFTK_INLINE D widen_normal(F x) {
    return {_mm512_cvtps_pd(_mm512_castps512_ps256(x)), _mm512_cvtps_pd(_mm512_extractf32x8_ps(x, 1))};
  }
  // A subnormal float is its mantissa, an integer, times 2^-149. Going through that integer avoids the slow
  // treatment processors give to subnormal operands and results.
  ZOFFTK_INLINE __m512d widen8(__m256i integer, __mmask8 subnormal, __m256 x) {
    const __m512d small = _mm512_mul_pd(_mm512_cvtepi32_pd(integer), _mm512_set1_pd(0x1p-149));
    return _mm512_mask_cvtps_pd(small, static_cast<__mmask8>(~subnormal), x);
  }
  ZOFFTK_INLINE D widen(F x) {
    const __m512i mag = magnitude(x);
    const M subnormal = _mm512_cmplt_epu32_mask(_mm512_sub_epi32(mag, _mm512_set1_epi32(1)),
                                                _mm512_set1_epi32(0x007FFFFF));  // not zero: it has a sign to keep
    if (!any(subnormal)) return widen_normal(x);
    const M negative = _mm512_movepi32_mask(_mm512_castps_si512(x));
    const __m512i integer = _mm512_mask_sub_epi32(mag, negative, _mm512_setzero_si512(), mag);
    return {widen8(_mm512_castsi512_si256(integer), static_cast<__mmask8>(subnormal), _mm512_castps512_ps256(x)),
            widen8(_mm512_extracti32x8_epi32(integer, 1), static_cast<__mmask8>(subnormal >> 8),
                   _mm512_extractf32x8_ps(x, 1))};
  }
  ZOFFTK_INLINE F join(__m256 lo, __m256 hi) { return _mm512_insertf32x8(_mm512_castps256_ps512(lo), hi, 1); }
  ZOFFTK_INLINE __m256 narrow8(__m512d x, __mmask8 small) {
    const __m512d scaled = _mm512_maskz_mul_pd(small, _mm512_abs_pd(x), _mm512_set1_pd(0x1p149));
    const __m256 integer = _mm256_castsi256_ps(_mm512_cvtpd_epi32(scaled));
    return _mm512_mask_cvtpd_ps(integer, static_cast<__mmask8>(~small), x);
  }
  ZOFFTK_INLINE F narrow(D x) {
    const __mmask8 small_lo = below(x.lo, 0x1p-126), small_hi = below(x.hi, 0x1p-126);
    if ((small_lo | small_hi) == 0) return join(_mm512_cvtpd_ps(x.lo), _mm512_cvtpd_ps(x.hi));
    const F unsigned_small = join(narrow8(x.lo, small_lo), narrow8(x.hi, small_hi));
    const M negative = static_cast<M>(_mm512_movepi64_mask(_mm512_castpd_si512(x.lo)) |
                                      (_mm512_movepi64_mask(_mm512_castpd_si512(x.hi)) << 8));
    return _mm512_mask_or_ps(unsigned_small, negative, unsigned_small, set1(-0.0f));
  }
  // sqrt(k * 2^-149) = sqrt(2 k) * 2^-75
  ZOFFTK_INLINE F sqrt_any(F x) {
    const __m512i bits = _mm512_castps_si512(x);
    const M small = _mm512_cmplt_epu32_mask(bits, _mm512_set1_epi32(0x00800000));
    const F operand = _mm512_mask_cvtepi32_ps(x, small, _mm512_slli_epi32(bits, 1));
    return mul(sqrt(operand), select(small, set1(0x1p-75f), set1(1.0f)));
  }
  ZOFFTK_INLINE D dset1(double x) { return {_mm512_set1_pd(x), _mm512_set1_pd(x)}; }
  ZOFFTK_INLINE D dadd(D a, D b) { return {_mm512_add_pd(a.lo, b.lo), _mm512_add_pd(a.hi, b.hi)}; }
  ZOFFTK_INLINE D dsub(D a, D b) { return {_mm512_sub_pd(a.lo, b.lo), _mm512_sub_pd(a.hi, b.hi)}; }
  // |x| < bound ? yes : no
  ZOFFTK_INLINE D dselect_small(D x, double bound, D yes, D no) {
    return {_mm512_mask_blend_pd(below(x.lo, bound), no.lo, yes.lo),
            _mm512_mask_blend_pd(below(x.hi, bound), no.hi, yes.hi)};
  }
  ZOFFTK_INLINE D dmul(D a, D b) { return {_mm512_mul_pd(a.lo, b.lo), _mm512_mul_pd(a.hi, b.hi)}; }
  ZOFFTK_INLINE D ddiv(D a, D b) { return {_mm512_div_pd(a.lo, b.lo), _mm512_div_pd(a.hi, b.hi)}; }
  ZOFFTK_INLINE void dstore(double* to, D x) {
    _mm512_storeu_pd(to, x.lo);
    _mm512_storeu_pd(to + 8, x.hi);
  }

  ZOFFTK_INLINE F from_bf16(__m256i half) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16));
  }
  // Integer rounding: the bf16 conversion instruction would flush subnormals.
  ZOFFTK_INLINE __m256i to_bf16(F x) {
    const __m512i bits = _mm512_castps_si512(x);
    const M odd = _mm512_test_epi32_mask(bits, _mm512_set1_epi32(0x10000));
    const __m512i even = _mm512_add_epi32(bits, _mm512_set1_epi32(0x7FFF));
    const __m512i rounded = _mm512_mask_add_epi32(even, odd, bits, _mm512_set1_epi32(0x8000));
    const M nan = _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
    const __m512i quiet = _mm512_mask_or_epi32(rounded, nan, bits, _mm512_set1_epi32(0x00400000));
    return _mm512_cvtepi32_epi16(_mm512_srli_epi32(quiet, 16));
  }

  ZOFFTK_INLINE M first(int64_t count) { return static_cast<M>((1u << count) - 1u); }

  template <Dtype T>
  ZOFFTK_INLINE F load(const void* base, int64_t i) {
    if constexpr (T == Dtype::float32) return _mm512_loadu_ps(static_cast<const float*>(base) + i);
    const uint16_t* from = static_cast<const uint16_t*>(base) + i;
    const __m256i half = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
    return T == Dtype::bfloat16 ? from_bf16(half) : _mm512_cvtph_ps(half);
  }
  template <Dtype T>
  ZOFFTK_INLINE void store(void* base, int64_t i, F x) {
    if constexpr (T == Dtype::float32) {
      _mm512_storeu_ps(static_cast<float*>(base) + i, x);
    } else {
      const __m256i half = T == Dtype::bfloat16 ? to_bf16(x) : _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT);
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(static_cast<uint16_t*>(base) + i), half);
    }
  }
  template <Dtype T>
  ZOFFTK_INLINE F load_part(const void* base, int64_t i, int64_t count) {
    if constexpr (T == Dtype::float32) return _mm512_maskz_loadu_ps(first(count), static_cast<const float*>(base) + i);
    const __m256i half = _mm256_maskz_loadu_epi16(first(count), static_cast<const uint16_t*>(base) + i);
    return T == Dtype::bfloat16 ? from_bf16(half) : _mm512_cvtph_ps(half);
  }
  template <Dtype T>
  ZOFFTK_INLINE void store_part(void* base, int64_t i, int64_t count, F x) {
    if constexpr (T == Dtype::float32) {
      _mm512_mask_storeu_ps(static_cast<float*>(base) + i, first(count), x);
    } else {
      const __m256i half = T == Dtype::bfloat16 ? to_bf16(x) : _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT);
      _mm256_mask_storeu_epi16(static_cast<uint16_t*>(base) + i, first(count), half);
    }
  }
};
