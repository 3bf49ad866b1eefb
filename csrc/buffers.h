// What the bindings check before they touch memory: element types, null and misaligned addresses, overlap.
#pragma once
#include <cstdint>
#include <stdexcept>
#include <string>

#include "dtype.h"

namespace zofftk {

struct Buffer {
  const char* name;
  uintptr_t address;
  int64_t bytes, alignment;
};

inline Dtype parse_dtype(const std::string& name, const char* what) {
  if (name == "float32") return Dtype::float32;
  if (name == "bfloat16") return Dtype::bfloat16;
  if (name == "float16") return Dtype::float16;
  throw std::invalid_argument(std::string(what) + ": expected float32, bfloat16 or float16, got '" + name + "'");
}

inline Buffer checked(const char* name, uintptr_t address, Dtype dtype, int64_t n) {
  if (n < 0) throw std::invalid_argument("element count: expected 0 or more, got " + std::to_string(n));
  const int64_t size = element_size(dtype);
  if (n > 0 && address == 0) throw std::invalid_argument(std::string(name) + ": expected an address, got 0");
  if (address % static_cast<uintptr_t>(size) != 0) {
    throw std::invalid_argument(std::string(name) + ": expected an address that is a multiple of the element size " +
                                std::to_string(size) + ", got " + std::to_string(address));
  }
  return {name, address, n * size, size};
}

inline void check_disjoint(const Buffer& a, const Buffer& b) {
  if (a.bytes == 0 || b.bytes == 0) return;
  const uintptr_t a_end = a.address + static_cast<uintptr_t>(a.bytes);
  const uintptr_t b_end = b.address + static_cast<uintptr_t>(b.bytes);
  if (a.address < b_end && b.address < a_end) {
    throw std::invalid_argument(std::string(a.name) + " and " + b.name + ": expected buffers that do not overlap");
  }
}

inline bool same_place(const Buffer& a, const Buffer& b) { return a.address == b.address && a.bytes == b.bytes; }

}  // namespace zofftk
