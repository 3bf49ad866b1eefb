// Adam over any lanes: the formula of adam.h, written once. Included after `Lanes`, inside its target region.

// A full vector of buffers, and the last one, of which only `count` lanes exist.
struct Whole {
  static constexpr bool whole = true;
  template <Dtype T>
  ZOFFTK_INLINE Lanes::F load(Whole, const void* base, int64_t i) {
    return Lanes::load<T>(base, i);
  }
  template <Dtype T>
  ZOFFTK_INLINE void store(Whole, void* base, int64_t i, Lanes::F x) {
    Lanes::store<T>(base, i, x);
  }
};
struct Part {
  static constexpr bool whole = false;
  int64_t count;
  template <Dtype T>
  ZOFFTK_INLINE Lanes::F load(Part part, const void* base, int64_t i) {
    return Lanes::load_part<T>(base, i, part.count);
  }
  template <Dtype T>
  ZOFFTK_INLINE void store(Part part, void* base, int64_t i, Lanes::F x) {
    Lanes::store_part<T>(base, i, part.count, x);
  }
};

struct AdamLanes {
  Lanes::F grad_scale, decay, weight_decay, w1, w2, b2, minus_bias2_sqrt, bias2_inverse, eps, minus_step_size;
  Lanes::F tiny_grad, tiny_scaled_grad, tiny_moment, tiny_variance;
  Lanes::D wide_grad_scale, wide_weight_decay, wide_w1, wide_w2, wide_b2, wide_minus_step_size;
  bool scaled;       // grad_scale is not 1
  bool from_moment;  // the average starts at the moment (else at the gradient, more exact for w1 >= 0.5)
};

ZOFFTK_INLINE AdamLanes adam_lanes(const AdamConstants& c) {
  AdamLanes lanes;
  lanes.from_moment = c.w1 < 0.5f;
  lanes.grad_scale = Lanes::set1(c.grad_scale);
  lanes.decay = Lanes::set1(c.decay);
  lanes.weight_decay = Lanes::set1(c.weight_decay);
  lanes.w1 = Lanes::set1(lanes.from_moment ? c.w1 : c.w1 - 1.0f);
  lanes.w2 = Lanes::set1(c.w2);
  lanes.b2 = Lanes::set1(c.b2);
  lanes.minus_bias2_sqrt = Lanes::set1(-c.bias2_sqrt);
  lanes.bias2_inverse = Lanes::set1(1.0f / c.bias2_sqrt);
  lanes.eps = Lanes::set1(c.eps);
  lanes.minus_step_size = Lanes::set1(c.minus_step_size);
  lanes.scaled = c.grad_scale != 1.0f;
  lanes.wide_grad_scale = Lanes::dset1(c.grad_scale);
  lanes.wide_weight_decay = Lanes::dset1(c.weight_decay);
  lanes.wide_w1 = Lanes::dset1(lanes.from_moment ? c.w1 : c.w1 - 1.0f);
  lanes.wide_w2 = Lanes::dset1(c.w2);
  lanes.wide_b2 = Lanes::dset1(c.b2);
  lanes.wide_minus_step_size = Lanes::dset1(c.minus_step_size);
  lanes.tiny_grad = Lanes::set1(c.tiny.grad);
  lanes.tiny_scaled_grad = Lanes::set1(c.tiny.scaled_grad);
  lanes.tiny_moment = Lanes::set1(c.tiny.moment);
  lanes.tiny_variance = Lanes::set1(c.tiny.variance);
  return lanes;
}

struct AdamState {
  Lanes::F p, m, v;
};

// x / bias2_sqrt, correctly rounded, by multiplications: division is the step's bottleneck. Two corrections with the
// exact remainder follow the first guess (Markstein's theorem: the reciprocal is correctly rounded, and the guess
// before the last correction is off by less than one unit). Infinities and NaN have no remainder and keep the guess.
ZOFFTK_INLINE Lanes::F divide_by_bias2(Lanes::F x, const AdamLanes& c) {
  const Lanes::F guess = Lanes::mul(x, c.bias2_inverse);
  const Lanes::F better = Lanes::fma(Lanes::fma(c.minus_bias2_sqrt, guess, x), c.bias2_inverse, guess);
  const Lanes::F best = Lanes::fma(Lanes::fma(c.minus_bias2_sqrt, better, x), c.bias2_inverse, better);
  return Lanes::select(Lanes::is_nan(best), guess, best);
}

ZOFFTK_INLINE Lanes::F plain_variance(const AdamLanes& c, Lanes::F g, Lanes::F v) {
  return Lanes::fma(Lanes::mul(c.w2, g), g, Lanes::mul(c.b2, v));
}

template <bool Decoupled>
ZOFFTK_INLINE AdamState adam_plain(const AdamLanes& c, Lanes::F grad, AdamState s) {
  Lanes::F g = Lanes::mul(grad, c.grad_scale);
  if constexpr (Decoupled) {
    s.p = Lanes::mul(s.p, c.decay);
  } else {
    g = Lanes::fma(c.weight_decay, s.p, g);
  }
  const Lanes::F d = Lanes::sub(g, s.m);
  s.m = Lanes::fma(c.w1, d, c.from_moment ? s.m : g);
  s.v = plain_variance(c, g, s.v);
  const Lanes::F denom = Lanes::add(divide_by_bias2(Lanes::sqrt(s.v), c), c.eps);
  s.p = Lanes::add(s.p, Lanes::div(Lanes::mul(c.minus_step_size, s.m), denom));
  return s;
}

// Rounds to the grid of subnormal float32 numbers, multiples of 2^-149, what is small enough for that to matter.
ZOFFTK_INLINE Lanes::D round_tiny(Lanes::D x) {
  const Lanes::D shift = Lanes::dset1(0x1.8p-97);  // a double of this size has 2^-149 as its last place
  return Lanes::dselect_small(x, 0x1p-100, Lanes::dsub(Lanes::dadd(x, shift), shift), x);
}

// The variance for lanes of which some operand is tiny; not necessarily one of these two.
ZOFFTK_INLINE Lanes::F tiny_variance(const AdamLanes& c, Lanes::F g, Lanes::D g_wide, Lanes::F v) {
  using L = Lanes;
  const L::M tiny = L::either(L::is_tiny(g, c.tiny_scaled_grad), L::is_tiny_positive(v, c.tiny_variance));
  if (!L::any(tiny)) return plain_variance(c, g, v);
  const L::F zero = L::set1(0.0f);
  const L::D new_part = L::dmul(L::widen(L::narrow(L::dmul(c.wide_w2, g_wide))), g_wide);
  const L::D old_part = L::widen(L::narrow(L::dmul(c.wide_b2, L::widen(v))));
  const L::F plain = plain_variance(c, L::select(tiny, zero, g), L::select(tiny, zero, v));
  return L::select(tiny, L::narrow(L::dadd(new_part, old_part)), plain);
}

// The same with double intermediates, for elements with tiny operands. What would be subnormal in float32, and is
// then divided by a small number, is rounded as it would be there.
template <bool Decoupled>
ZOFFTK_INLINE AdamState adam_tiny(const AdamLanes& c, Lanes::F grad, AdamState s) {
  using L = Lanes;
  L::F g = c.scaled ? L::narrow(L::dmul(L::widen(grad), c.wide_grad_scale)) : grad;
  if constexpr (Decoupled) {
    s.p = L::mul(s.p, c.decay);
  } else {
    g = L::narrow(L::dadd(L::dmul(c.wide_weight_decay, L::widen(s.p)), L::widen(g)));
  }
  const L::D g_wide = L::widen(g);
  const L::D m_old = L::widen(s.m);
  const L::D d_wide = L::widen(L::sub(g, s.m));  // no float32 sum of these is inexact and subnormal, nor slow
  const L::D m_wide = L::dadd(L::dmul(c.wide_w1, d_wide), c.from_moment ? m_old : g_wide);
  s.m = L::narrow(m_wide);
  s.v = tiny_variance(c, g, g_wide, s.v);
  const L::F denom = L::add(divide_by_bias2(L::sqrt_any(s.v), c), c.eps);
  const L::D move = round_tiny(L::dmul(c.wide_minus_step_size, round_tiny(m_wide)));
  s.p = L::add(s.p, L::narrow(L::ddiv(move, L::widen_normal(denom))));
  return s;
}

// Sends each lane the way its own values ask for. The plain way sees zeros in tiny lanes, to stay fast.
template <bool Decoupled>
static __attribute__((noinline)) void adam_mixed(const AdamLanes& c, Lanes::M tiny, Lanes::F grad, AdamState& s) {
  const AdamState slow = adam_tiny<Decoupled>(c, grad, s);
  if (Lanes::all(tiny)) {
    s = slow;
    return;
  }
  const Lanes::F zero = Lanes::set1(0.0f);
  const AdamState in{Lanes::select(tiny, zero, s.p), Lanes::select(tiny, zero, s.m), Lanes::select(tiny, zero, s.v)};
  const AdamState fast = adam_plain<Decoupled>(c, Lanes::select(tiny, zero, grad), in);
  s = {Lanes::select(tiny, slow.p, fast.p), Lanes::select(tiny, slow.m, fast.m), Lanes::select(tiny, slow.v, fast.v)};
}

// The processor's own prefetching stops at page ends; four streams come by one every few hundred elements.
template <Dtype G>
ZOFFTK_INLINE void prefetch_ahead(const AdamArgs& a, int64_t i) {
  constexpr int64_t ahead = 512;  // elements; beyond the end of a buffer a prefetch does nothing
  __builtin_prefetch(a.param + i + ahead);
  __builtin_prefetch(a.exp_avg + i + ahead);
  __builtin_prefetch(a.exp_avg_sq + i + ahead);
  __builtin_prefetch(static_cast<const char*>(a.grad) + (i + ahead) * element_size(G));
}

template <Dtype G, Dtype O, bool Decoupled, class Span>
ZOFFTK_INLINE void adam_vector(const AdamArgs& a, const AdamLanes& c, Span span, int64_t i) {
  if constexpr (Span::whole) prefetch_ahead<G>(a, i);
  const Lanes::F grad = Span::template load<G>(span, a.grad, i);
  AdamState s{Span::template load<Dtype::float32>(span, a.param, i),
              Span::template load<Dtype::float32>(span, a.exp_avg, i),
              Span::template load<Dtype::float32>(span, a.exp_avg_sq, i)};
  const Lanes::M tiny = Lanes::either(
      Lanes::either(Lanes::is_tiny(grad, c.tiny_grad), Lanes::is_tiny(s.m, c.tiny_moment)),
      Lanes::is_tiny_positive(s.v, c.tiny_variance));
  if (__builtin_expect(Lanes::any(tiny), 0)) {
    adam_mixed<Decoupled>(c, tiny, grad, s);
  } else {
    s = adam_plain<Decoupled>(c, grad, s);
  }
  Span::template store<Dtype::float32>(span, a.param, i, s.p);
  Span::template store<Dtype::float32>(span, a.exp_avg, i, s.m);
  Span::template store<Dtype::float32>(span, a.exp_avg_sq, i, s.v);
  if constexpr (O != Dtype::none) Span::template store<O>(span, a.out, i, s.p);
}

template <Dtype G, Dtype O, bool Decoupled>
static void adam_range(const AdamArgs& a, int64_t begin, int64_t end) {
  const AdamLanes c = adam_lanes(a.constants);
  int64_t i = begin;
  for (; i + Lanes::width <= end; i += Lanes::width) adam_vector<G, O, Decoupled>(a, c, Whole{}, i);
  if (i < end) adam_vector<G, O, Decoupled>(a, c, Part{end - i}, i);
}

template <Dtype G, Dtype O>
static void adam_mode(const AdamArgs& a, int64_t begin, int64_t end) {
  return a.decoupled ? adam_range<G, O, true>(a, begin, end) : adam_range<G, O, false>(a, begin, end);
}

template <Dtype G>
static void adam_out(const AdamArgs& a, int64_t begin, int64_t end) {
  switch (a.out_dtype) {
    case Dtype::none: return adam_mode<G, Dtype::none>(a, begin, end);
    case Dtype::float32: return adam_mode<G, Dtype::float32>(a, begin, end);
    case Dtype::bfloat16: return adam_mode<G, Dtype::bfloat16>(a, begin, end);
    case Dtype::float16: return adam_mode<G, Dtype::float16>(a, begin, end);
  }
}

static void adam(const AdamArgs& a, int64_t begin, int64_t end) {
  switch (a.grad_dtype) {
    case Dtype::none: return;
    case Dtype::float32: return adam_out<Dtype::float32>(a, begin, end);
    case Dtype::bfloat16: return adam_out<Dtype::bfloat16>(a, begin, end);
    case Dtype::float16: return adam_out<Dtype::float16>(a, begin, end);
  }
}
