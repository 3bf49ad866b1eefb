// Cuts loops into small chunks for one scope, so that few elements are work for many threads.
#pragma once
#include "../pool.h"

namespace zofftk::tests {

class Chunks {
 public:
  explicit Chunks(int64_t elements) { set_chunk_elements(elements); }
  ~Chunks() { set_chunk_elements(0); }
  Chunks(const Chunks&) = delete;
  Chunks& operator=(const Chunks&) = delete;
};

}  // namespace zofftk::tests
