#include "sizes.h"

namespace zofftk::tests {

std::vector<int64_t> sizes() {
  std::vector<int64_t> all;
  for (int64_t n = 0; n < 36; ++n) all.push_back(n);
  for (const int64_t n : {63, 64, 65, 127, 129, 1025}) all.push_back(n);
  return all;
}

}  // namespace zofftk::tests
