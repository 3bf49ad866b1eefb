// How fast could a step be at best: loops that move the bytes of a step with 16-bit gradients and parameters (28 per
// element) and compute next to nothing.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

namespace zofftk {

struct RoofArgs {
  float *param, *exp_avg, *exp_avg_sq;
  const uint16_t* grad;
  uint16_t* out;
};

struct Roof {
  const char* name;
  const char* needs;  // name of an instruction set
  void (*run)(const RoofArgs&, int64_t begin, int64_t end);
};

const std::vector<Roof>& compiled_roofs();

}  // namespace zofftk
