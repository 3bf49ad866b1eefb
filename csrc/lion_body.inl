// Lion over any lanes: the formula of lion.h, written once. Included after moment_body.inl, in its target region.

struct LionRule {
  static constexpr bool has_moment = true;
  using Constants = LionConstants;
  struct Lane {
    Factor grad_scale, beta1, w1, beta2, w2, decay;
    Lanes::F lr;
  };

  ZOFFTK_INLINE Lane lanes(const LionConstants& c) {
    return {factor(c.grad_scale), factor(c.beta1), factor(c.w1), factor(c.beta2),
            factor(c.w2),         factor(c.decay), Lanes::set1(c.lr)};
  }

  template <class Product>
  ZOFFTK_INLINE MomentState step(const Lane& c, Lanes::F grad, MomentState s) {
    const Lanes::F g = Product::of(c.grad_scale, grad);
    const Lanes::F direction = Lanes::add(Product::of(c.beta1, s.m), Product::of(c.w1, g));
    s.p = Lanes::sub(Product::of(c.decay, s.p), Lanes::signed_as(c.lr, direction));
    s.m = Lanes::add(Product::of(c.beta2, s.m), Product::of(c.w2, g));
    return s;
  }
};

static void lion(const LionArgs& a, int64_t begin, int64_t end) {
  moment_pass<LionRule>(a.buffers, a.constants, begin, end);
}
