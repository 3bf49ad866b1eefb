// One optimizer's step over fresh, guarded buffers, and what any such step must satisfy.
#pragma once
#include <functional>
#include <string>

#include "../kernels.h"
#include "guarded.h"

namespace zofftk::tests {

enum class Input { wild, ordinary };
enum class Place { apart, out_is_grad };

struct StepCase {
  Dtype grad, out;
  int64_t n;
  Input input = Input::wild;
  Place place = Place::apart;
};

// A rule leaves alone what it does not use.
struct StepBuffers {
  explicit StepBuffers(const StepCase& c);

  Guarded param, first, second, grad, own_out;  // second: a variance, 0 or more
  Dtype out_dtype;
  void* out;  // that of own_out or of grad; null: there is none
};

using Step = std::function<void(const Kernels&, const StepBuffers&, int64_t begin, int64_t end)>;

struct Element {
  float param, first, second;
};
using Formula = std::function<Element(Element, float grad)>;

// Every instruction set leaves the bits the scalar reference leaves: dtypes, tails, alignments, in place.
void check_step_parity(const std::string& what, const Step& step);

// Nor do chunks and threads change a bit.
void check_step_splits(const std::string& what, const Step& step);

// What is left is what the header's formula says.
void check_step_formula(const std::string& what, const Step& step, const Formula& formula, Input input);

}  // namespace zofftk::tests
