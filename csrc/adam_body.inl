// Adam over any lanes: the formula of adam.h, written once. Included after `Lanes`, inside its target region.

// A full vector of buffers, and the last one, of which only `count` lanes exist.
struct Whole {
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
  Lanes::F grad_scale, decay, weight_decay, w1, w2, b2, bias2_sqrt, eps, minus_step_size;
  Lanes::F tiny_grad, tiny_moment, tiny_variance, tiny_param;
  bool from_moment;  // the average starts at the moment (else at the gradient, more exact for w1 >= 0.5)
};

ZOFFTK_INLINE AdamLanes adam_lanes(const AdamConstants& c) {
  const bool from_moment = c.w1 < 0.5f;
  return {Lanes::set1(c.grad_scale),  Lanes::set1(c.decay),
          Lanes::set1(c.weight_decay), Lanes::set1(from_moment ? c.w1 : c.w1 - 1.0f),
          Lanes::set1(c.w2),          Lanes::set1(c.b2),
          Lanes::set1(c.bias2_sqrt),  Lanes::set1(c.eps),
          Lanes::set1(c.minus_step_size), Lanes::set1(c.tiny.grad),
          Lanes::set1(c.tiny.moment), Lanes::set1(c.tiny.variance),
          Lanes::set1(c.tiny.param),  from_moment};
}

struct AdamState {
  Lanes::F p, m, v;
};

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
  s.v = Lanes::fma(Lanes::mul(c.w2, g), g, Lanes::mul(c.b2, s.v));
  const Lanes::F denom = Lanes::add(Lanes::div(Lanes::sqrt(s.v), c.bias2_sqrt), c.eps);
  s.p = Lanes::add(s.p, Lanes::div(Lanes::mul(c.minus_step_size, s.m), denom));
  return s;
}

// The same with double intermediates, for elements with tiny operands. Values that float32 stores or that are later
// divided by a small number are rounded to float32 as in `adam_plain`.
template <bool Decoupled>
ZOFFTK_INLINE AdamState adam_tiny(const AdamLanes& c, Lanes::F grad, AdamState s) {
  using L = Lanes;
  L::D p = L::widen(s.p);
  L::D g_wide = L::dmul(L::widen(grad), L::widen(c.grad_scale));
  if constexpr (Decoupled) {
    p = L::dmul(p, L::widen(c.decay));
  } else {
    g_wide = L::dadd(L::dmul(L::widen(c.weight_decay), p), g_wide);
  }
  const L::F g = L::narrow(g_wide);
  g_wide = L::widen(g);
  const L::D d = L::widen(L::sub(g, s.m));
  s.m = L::narrow(L::dadd(L::dmul(L::widen(c.w1), d), c.from_moment ? L::widen(s.m) : g_wide));
  const L::D new_part = L::dmul(L::dmul(L::widen(c.w2), g_wide), g_wide);
  s.v = L::narrow(L::dadd(new_part, L::dmul(L::widen(c.b2), L::widen(s.v))));
  const L::F denom = L::add(L::div(L::sqrt_any(s.v), c.bias2_sqrt), c.eps);
  const L::F move = L::narrow(L::dmul(L::widen(c.minus_step_size), L::widen(s.m)));
  s.p = L::narrow(L::dadd(p, L::ddiv(L::widen(move), L::widen(denom))));
  return s;
}

// Sends each lane the way its own values ask for. The plain way sees zeros in tiny lanes, to stay fast.
template <bool Decoupled>
static __attribute__((noinline)) void adam_mixed(const AdamLanes& c, Lanes::M tiny, Lanes::F grad, AdamState& s) {
  const Lanes::F zero = Lanes::set1(0.0f);
  const AdamState slow = adam_tiny<Decoupled>(c, grad, s);
  const AdamState in{Lanes::select(tiny, zero, s.p), Lanes::select(tiny, zero, s.m), Lanes::select(tiny, zero, s.v)};
  const AdamState fast = adam_plain<Decoupled>(c, Lanes::select(tiny, zero, grad), in);
  s = {Lanes::select(tiny, slow.p, fast.p), Lanes::select(tiny, slow.m, fast.m), Lanes::select(tiny, slow.v, fast.v)};
}

template <Dtype G, Dtype O, bool Decoupled, class Span>
ZOFFTK_INLINE void adam_vector(const AdamArgs& a, const AdamLanes& c, Span span, int64_t i) {
  const Lanes::F grad = Span::template load<G>(span, a.grad, i);
  AdamState s{Span::template load<Dtype::float32>(span, a.param, i),
              Span::template load<Dtype::float32>(span, a.exp_avg, i),
              Span::template load<Dtype::float32>(span, a.exp_avg_sq, i)};
  const Lanes::M tiny = Lanes::either(
      Lanes::either(Lanes::is_tiny(grad, c.tiny_grad), Lanes::is_tiny(s.m, c.tiny_moment)),
      Lanes::either(Lanes::is_tiny(s.v, c.tiny_variance), Lanes::is_tiny(s.p, c.tiny_param)));
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
