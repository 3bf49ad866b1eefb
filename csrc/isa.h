// Which instruction set runs: an ordered list, best first; the first whose features the processor has is chosen, once.
// The environment variable ZOFFTK_ISA forces one by name; an unknown or unsupported name is an error, not a fallback.
#pragma once
#include <string>
#include <vector>

#include "kernels.h"

namespace zofftk {

struct Isa {
  const char* name;
  const char* description;
  std::vector<std::string> features;
  const Kernels* kernels;
};

const std::vector<Isa>& compiled_isas();             // best first, the last needs no feature
std::vector<std::string> cpu_features();             // those of the features above that processor and system offer
bool supports(const Isa& isa);
const Isa& find_isa(const std::string& name);        // throws std::invalid_argument or std::runtime_error
const Isa& active_isa();                             // ZOFFTK_ISA if set, else the best supported
void set_feature_mask(const std::vector<std::string>& features);  // tests: pretend to have only these

}  // namespace zofftk
