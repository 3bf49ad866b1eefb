#include "step.h"

#include <cmath>

#include "../half.h"
#include "../pool.h"
#include "check.h"
#include "chunks.h"
#include "sizes.h"
#include "supported.h"
#include "values.h"

namespace zofftk::tests {

namespace {

constexpr Dtype kDtypes[] = {Dtype::float32, Dtype::bfloat16, Dtype::float16};
constexpr Dtype kOutDtypes[] = {Dtype::none, Dtype::float32, Dtype::bfloat16, Dtype::float16};

std::vector<float> input(const StepCase& c, uint32_t seed) {
  const uint32_t own = seed + 4u * static_cast<uint32_t>(c.n);
  return c.input == Input::ordinary ? ordinary(c.n, own) : wild(c.n, own);
}

std::vector<float> magnitudes(std::vector<float> values) {
  for (float& value : values) value = std::fabs(value);
  return values;
}

std::string described(const std::string& what, const char* isa, const StepCase& c) {
  constexpr const char* names[] = {"none", "float32", "bfloat16", "float16"};
  return what + ", " + isa + ", n " + std::to_string(c.n) + ", gradient " + names[static_cast<int>(c.grad)] + ", out " +
         names[static_cast<int>(c.out)] + (c.place == Place::out_is_grad ? ", in place" : "") +
         (c.input == Input::ordinary ? ", ordinary values" : ", wild values");
}

std::vector<uint32_t> bits_after(const std::string& what, const Step& step, const Isa& isa, const StepCase& c,
                                 int threads = 1) {
  const StepBuffers b(c);
  parallel_ranges(c.n, threads, [&](int64_t begin, int64_t end) { step(*isa.kernels, b, begin, end); });
  std::vector<uint32_t> all;
  for (const Guarded* buffer : {&b.param, &b.first, &b.second, &b.grad, &b.own_out}) {
    ZOFFTK_CHECK(buffer->guards_hold(), described(what, isa.name, c));
    const std::vector<uint32_t> bits = buffer->bits();
    all.insert(all.end(), bits.begin(), bits.end());
  }
  return all;
}

void check_one(const std::string& what, const Step& step, const StepCase& c) {
  const std::vector<uint32_t> expected = bits_after(what, step, find_isa("scalar"), c);
  for (const Isa* isa : vector_isas()) {
    ZOFFTK_CHECK(bits_after(what, step, *isa, c) == expected, described(what, isa->name, c));
  }
}

}  // namespace

StepBuffers::StepBuffers(const StepCase& c)
    : param(Dtype::float32, input(c, 0), c.n % 5),
      first(Dtype::float32, input(c, 1), c.n % 5),
      second(Dtype::float32, magnitudes(input(c, 2)), c.n % 5),
      grad(c.grad, input(c, 3), c.n % 5),
      own_out(c.place == Place::apart ? c.out : Dtype::none, c.n, c.n % 5),
      out_dtype(c.out),
      out(c.out == Dtype::none ? nullptr : c.place == Place::apart ? own_out.data() : grad.data()) {}

void check_step_parity(const std::string& what, const Step& step) {
  for (const Dtype grad : kDtypes) {
    for (const int64_t n : sizes()) {
      for (const Dtype out : kOutDtypes) check_one(what, step, {grad, out, n});
      check_one(what, step, {grad, grad, n, Input::ordinary});
      check_one(what, step, {grad, grad, n, Input::wild, Place::out_is_grad});
    }
  }
}

void check_step_splits(const std::string& what, const Step& step) {
  const StepCase c{Dtype::bfloat16, Dtype::bfloat16, 5003};
  for (const Isa* isa : supported_isas()) {
    const std::vector<uint32_t> expected = bits_after(what, step, *isa, c);
    for (const int64_t elements : {64, 192}) {
      const Chunks chunks(elements);
      for (const int threads : {1, 2, 3, 7}) {
        ZOFFTK_CHECK(bits_after(what, step, *isa, c, threads) == expected,
                     described(what, isa->name, c) + ", chunks of " + std::to_string(elements) + ", threads " +
                         std::to_string(threads));
      }
    }
  }
}

void check_step_formula(const std::string& what, const Step& step, const Formula& formula, Input kind) {
  for (const Dtype dtype : kDtypes) {
    const StepCase c{dtype, dtype, 257, kind};
    for (const Isa* isa : supported_isas()) {
      const StepBuffers b(c), expected(c);
      step(*isa->kernels, b, 0, c.n);
      const std::vector<float> grads = expected.grad.values();
      for (int64_t i = 0; i < c.n; ++i) {
        float *const p = expected.param.floats() + i, *const first = expected.first.floats() + i;
        float* const second = expected.second.floats() + i;
        const Element after = formula({*p, *first, *second}, grads[static_cast<size_t>(i)]);
        *p = after.param;
        *first = after.first;
        *second = after.second;
      }
      const std::string label = described(what, isa->name, c);
      ZOFFTK_CHECK(b.param.bits() == expected.param.bits(), label);
      ZOFFTK_CHECK(b.first.bits() == expected.first.bits(), label);
      ZOFFTK_CHECK(b.second.bits() == expected.second.bits(), label);
      ZOFFTK_CHECK(b.own_out.bits() == Guarded(dtype, b.param.values(), 0).bits(), label);
    }
  }
}

}  // namespace zofftk::tests
