// The instruction sets this processor can run, best first.
#pragma once
#include <vector>

#include "../isa.h"

namespace zofftk::tests {

inline std::vector<const Isa*> supported_isas() {
  std::vector<const Isa*> found;
  for (const Isa& isa : compiled_isas()) {
    if (supports(isa)) found.push_back(&isa);
  }
  return found;
}

// Those that are compared with the scalar reference, which is the last.
inline std::vector<const Isa*> vector_isas() {
  std::vector<const Isa*> found = supported_isas();
  found.pop_back();
  return found;
}

}  // namespace zofftk::tests
