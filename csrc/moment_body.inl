// One pass over the buffers of moment.h for any rule and any lanes. Included after adam_body.inl, in its target region.
//
// A rule is a struct with `has_moment`, `Constants` (with `tiny_grad`), `Lane` (the constants in lanes), `lanes()` and
// `step<Product>()`, which uses `Product` for every multiplication.

struct Factor {
  Lanes::F narrow;
  Lanes::D wide;
};
ZOFFTK_INLINE Factor factor(float x) { return {Lanes::set1(x), Lanes::dset1(x)}; }

// Two ways to the same bits, see moment.h.
struct Quick {
  ZOFFTK_INLINE Lanes::F of(const Factor& factor, Lanes::F x) { return Lanes::mul(factor.narrow, x); }
};
struct Subnormal {
  ZOFFTK_INLINE Lanes::F of(const Factor& factor, Lanes::F x) {
    if (!Lanes::any(Lanes::is_tiny(x, Lanes::set1(kTinyOperand)))) return Quick::of(factor, x);
    return Lanes::narrow(Lanes::dmul(factor.wide, Lanes::widen(x)));
  }
};

struct MomentState {
  Lanes::F p, m;
};

template <class Rule>
static __attribute__((noinline)) void moment_step_subnormal(const typename Rule::Lane& c, Lanes::F grad,
                                                            MomentState& s) {
  s = Rule::template step<Subnormal>(c, grad, s);
}

// The processor's own prefetching stops at page ends, which the streams come by every few hundred elements.
template <class Rule, Dtype G>
ZOFFTK_INLINE void moment_prefetch(const MomentBuffers& b, int64_t i) {
  constexpr int64_t ahead = 512;  // elements; beyond the end of a buffer a prefetch does nothing
  __builtin_prefetch(b.param + i + ahead);
  if constexpr (Rule::has_moment) __builtin_prefetch(b.moment + i + ahead);
  __builtin_prefetch(static_cast<const char*>(b.grad) + (i + ahead) * element_size(G));
}

template <class Rule, Dtype G, Dtype O, class Span>
ZOFFTK_INLINE void moment_vector(const MomentBuffers& b, const typename Rule::Lane& c, Lanes::F tiny_grad, Span span,
                                 int64_t i) {
  if constexpr (Span::whole) moment_prefetch<Rule, G>(b, i);
  const Lanes::F tiny_operand = Lanes::set1(kTinyOperand);
  const Lanes::F grad = Span::template load<G>(span, b.grad, i);
  MomentState s{Span::template load<Dtype::float32>(span, b.param, i), Lanes::set1(0.0f)};
  Lanes::M tiny = Lanes::either(Lanes::is_tiny(grad, tiny_grad), Lanes::is_tiny(s.p, tiny_operand));
  if constexpr (Rule::has_moment) {
    s.m = Span::template load<Dtype::float32>(span, b.moment, i);
    tiny = Lanes::either(tiny, Lanes::is_tiny(s.m, tiny_operand));
  }
  if (__builtin_expect(Lanes::any(tiny), 0)) {
    moment_step_subnormal<Rule>(c, grad, s);
  } else {
    s = Rule::template step<Quick>(c, grad, s);
  }
  Span::template store<Dtype::float32>(span, b.param, i, s.p);
  if constexpr (Rule::has_moment) Span::template store<Dtype::float32>(span, b.moment, i, s.m);
  if constexpr (O != Dtype::none) Span::template store<O>(span, b.out, i, s.p);
}

template <class Rule, Dtype G, Dtype O>
static void moment_range(const MomentBuffers& b, const typename Rule::Constants& constants, int64_t begin,
                         int64_t end) {
  const typename Rule::Lane c = Rule::lanes(constants);
  const Lanes::F tiny_grad = Lanes::set1(constants.tiny_grad);
  int64_t i = begin;
  for (; i + Lanes::width <= end; i += Lanes::width) moment_vector<Rule, G, O>(b, c, tiny_grad, Whole{}, i);
  if (i < end) moment_vector<Rule, G, O>(b, c, tiny_grad, Part{end - i}, i);
}

template <class Rule, Dtype G>
static void moment_out(const MomentBuffers& b, const typename Rule::Constants& c, int64_t begin, int64_t end) {
  switch (b.out_dtype) {
    case Dtype::none: return moment_range<Rule, G, Dtype::none>(b, c, begin, end);
    case Dtype::float32: return moment_range<Rule, G, Dtype::float32>(b, c, begin, end);
    case Dtype::bfloat16: return moment_range<Rule, G, Dtype::bfloat16>(b, c, begin, end);
    case Dtype::float16: return moment_range<Rule, G, Dtype::float16>(b, c, begin, end);
  }
}

template <class Rule>
static void moment_pass(const MomentBuffers& b, const typename Rule::Constants& c, int64_t begin, int64_t end) {
  switch (b.grad_dtype) {
    case Dtype::none: return;
    case Dtype::float32: return moment_out<Rule, Dtype::float32>(b, c, begin, end);
    case Dtype::bfloat16: return moment_out<Rule, Dtype::bfloat16>(b, c, begin, end);
    case Dtype::float16: return moment_out<Rule, Dtype::float16>(b, c, begin, end);
  }
}
