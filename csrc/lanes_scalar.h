// One lane in plain C++: the reference for the vector lanes, and the fallback. Included once, by kernels_scalar.cpp.
#pragma once

struct Lanes {
  static constexpr int64_t width = 1;
  using F = float;
  using M = bool;
  using D = double;

  ZOFFTK_INLINE F set1(float x) { return x; }
  ZOFFTK_INLINE F add(F a, F b) { return a + b; }
  ZOFFTK_INLINE F sub(F a, F b) { return a - b; }
  ZOFFTK_INLINE F mul(F a, F b) { return a * b; }
  ZOFFTK_INLINE F div(F a, F b) { return a / b; }
  ZOFFTK_INLINE F sqrt(F a) { return std::sqrt(a); }
  ZOFFTK_INLINE F fma(F a, F b, F c) { return std::fma(a, b, c); }

  // 0 < |x| < bound
  ZOFFTK_INLINE M is_tiny(F x, F bound) { return (bits_of(x) & 0x7FFFFFFFu) - 1u < bits_of(bound) - 1u; }
  // 0 < x < bound
  ZOFFTK_INLINE M is_tiny_positive(F x, F bound) { return bits_of(x) - 1u < bits_of(bound) - 1u; }
  ZOFFTK_INLINE M is_nan(F x) { return x != x; }
  ZOFFTK_INLINE M either(M a, M b) { return a || b; }
  ZOFFTK_INLINE bool any(M m) { return m; }
  ZOFFTK_INLINE bool all(M m) { return m; }
  ZOFFTK_INLINE F select(M m, F yes, F no) { return m ? yes : no; }

  // `size` with the sign of x, zero where x is zero, x where it is NaN.
  ZOFFTK_INLINE F signed_as(F size, F x) { return x != x ? x : x > 0 ? size : x < 0 ? -size : 0.0f; }

  // Between float and double, also for subnormal floats.
  ZOFFTK_INLINE D widen(F x) { return x; }
  ZOFFTK_INLINE F narrow(D x) { return static_cast<float>(x); }
  ZOFFTK_INLINE D widen_normal(F x) { return x; }
  ZOFFTK_INLINE F sqrt_any(F x) { return std::sqrt(x); }
  ZOFFTK_INLINE D dset1(double x) { return x; }
  ZOFFTK_INLINE D dadd(D a, D b) { return a + b; }
  ZOFFTK_INLINE D dsub(D a, D b) { return a - b; }
  // |x| < bound ? yes : no
  ZOFFTK_INLINE D dselect_small(D x, double bound, D yes, D no) { return std::fabs(x) < bound ? yes : no; }
  ZOFFTK_INLINE D dmul(D a, D b) { return a * b; }
  ZOFFTK_INLINE D ddiv(D a, D b) { return a / b; }
  ZOFFTK_INLINE void dstore(double* to, D x) { *to = x; }

  template <Dtype T>
  ZOFFTK_INLINE F load(const void* base, int64_t i) {
    if constexpr (T == Dtype::float32) return static_cast<const float*>(base)[i];
    const uint16_t half = static_cast<const uint16_t*>(base)[i];
    return T == Dtype::bfloat16 ? bf16_to_float(half) : fp16_to_float(half);
  }
  template <Dtype T>
  ZOFFTK_INLINE void store(void* base, int64_t i, F x) {
    if constexpr (T == Dtype::float32) {
      static_cast<float*>(base)[i] = x;
    } else {
      static_cast<uint16_t*>(base)[i] = T == Dtype::bfloat16 ? float_to_bf16(x) : float_to_fp16(x);
    }
  }
  template <Dtype T>
  ZOFFTK_INLINE F load_part(const void* base, int64_t i, int64_t) {
    return load<T>(base, i);
  }
  template <Dtype T>
  ZOFFTK_INLINE void store_part(void* base, int64_t i, int64_t, F x) {
    store<T>(base, i, x);
  }
};
