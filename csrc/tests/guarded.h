// A buffer followed by a page nobody may touch, so that a read or write past its end faults in every build. Between
// its last element and that page lie `gap` guard elements, which vary how the buffer is aligned.
#pragma once
#include <cstddef>
#include <cstdint>
#include <vector>

#include "../dtype.h"

namespace zofftk::tests {

class Guarded {
 public:
  Guarded(Dtype dtype, int64_t n, int64_t gap);
  Guarded(Dtype dtype, const std::vector<float>& values, int64_t gap);  // narrowed to dtype
  ~Guarded();
  Guarded(const Guarded&) = delete;
  Guarded& operator=(const Guarded&) = delete;

  void* data() const { return data_; }
  float* floats() const { return static_cast<float*>(data_); }
  Dtype dtype() const { return dtype_; }
  int64_t size() const { return n_; }

  std::vector<uint32_t> bits() const;    // of each element; every NaN is the same one
  std::vector<float> values() const;     // widened
  bool guards_hold() const;              // nothing was written around the elements

 private:
  Dtype dtype_;
  int64_t n_;
  size_t mapped_, usable_;
  unsigned char* base_;
  void* data_;
};

}  // namespace zofftk::tests
