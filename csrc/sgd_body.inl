// SGD over any lanes: the formula of sgd.h, written once. Included after moment_body.inl, in its target region.

template <bool HasMomentum>
struct SgdRule {
  static constexpr bool has_moment = HasMomentum;
  using Constants = SgdConstants;
  struct Lane {
    Factor grad_scale, weight_decay, momentum, w, lr;
    bool decays, nesterov, first;  // the same for all elements, so that the processor foresees them
  };

  ZOFFTK_INLINE Lane lanes(const SgdConstants& c) {
    return {factor(c.grad_scale), factor(c.weight_decay), factor(c.momentum), factor(c.w), factor(c.lr),
            c.weight_decay != 0.0f, c.nesterov, c.first};
  }

  template <class Product>
  ZOFFTK_INLINE MomentState step(const Lane& c, Lanes::F grad, MomentState s) {
    Lanes::F g = Product::of(c.grad_scale, grad);
    if (c.decays) g = Lanes::add(g, Product::of(c.weight_decay, s.p));
    if constexpr (HasMomentum) {
      s.m = c.first ? g : Lanes::add(Product::of(c.momentum, s.m), Product::of(c.w, g));
      g = c.nesterov ? Lanes::add(g, Product::of(c.momentum, s.m)) : s.m;
    }
    s.p = Lanes::sub(s.p, Product::of(c.lr, g));
    return s;
  }
};

static void sgd(const SgdArgs& a, int64_t begin, int64_t end) {
  if (a.buffers.moment == nullptr) return moment_pass<SgdRule<false>>(a.buffers, a.constants, begin, end);
  moment_pass<SgdRule<true>>(a.buffers, a.constants, begin, end);
}
