#include "guarded.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <system_error>

#include "../half.h"

namespace zofftk::tests {

namespace {

constexpr unsigned char kGuard = 0xA5;
constexpr int64_t kGuardBytesBefore = 64;

}  // namespace

Guarded::Guarded(Dtype dtype, int64_t n, int64_t gap) : dtype_(dtype), n_(n) {
  const auto page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  const auto after = static_cast<size_t>((n + gap) * element_size(dtype));
  usable_ = (after + kGuardBytesBefore + page - 1) / page * page;
  mapped_ = usable_ + page;
  void* const map = mmap(nullptr, mapped_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (map == MAP_FAILED || mprotect(static_cast<unsigned char*>(map) + usable_, page, PROT_NONE) != 0) {
    throw std::system_error(errno, std::generic_category(), "a guarded buffer");
  }
  base_ = static_cast<unsigned char*>(map);
  std::fill_n(base_, usable_, kGuard);
  data_ = base_ + usable_ - after;
}

Guarded::Guarded(Dtype dtype, const std::vector<float>& values, int64_t gap)
    : Guarded(dtype, static_cast<int64_t>(values.size()), gap) {
  auto* const halves = static_cast<uint16_t*>(data_);
  for (size_t i = 0; i < values.size(); ++i) {
    switch (dtype) {
      case Dtype::none: break;
      case Dtype::float32: floats()[i] = values[i]; break;
      case Dtype::bfloat16: halves[i] = float_to_bf16(values[i]); break;
      case Dtype::float16: halves[i] = float_to_fp16(values[i]); break;
    }
  }
}

Guarded::~Guarded() { munmap(base_, mapped_); }

std::vector<float> Guarded::values() const {
  const auto* const halves = static_cast<const uint16_t*>(data_);
  std::vector<float> wide;
  wide.reserve(static_cast<size_t>(n_));
  for (int64_t i = 0; i < n_ && dtype_ != Dtype::none; ++i) {
    wide.push_back(dtype_ == Dtype::float32    ? floats()[i]
                   : dtype_ == Dtype::bfloat16 ? bf16_to_float(halves[i])
                                               : fp16_to_float(halves[i]));
  }
  return wide;
}

std::vector<uint32_t> Guarded::bits() const {
  std::vector<uint32_t> found;
  found.reserve(static_cast<size_t>(n_));
  for (const float value : values()) found.push_back(std::isnan(value) ? 0x7FC00000u : bits_of(value));
  return found;
}

bool Guarded::guards_hold() const {
  const auto intact = [](unsigned char byte) { return byte == kGuard; };
  const auto* const first = static_cast<const unsigned char*>(data_);
  const auto* const last = first + n_ * element_size(dtype_);
  return std::all_of(static_cast<const unsigned char*>(base_), first, intact) &&
         std::all_of(last, static_cast<const unsigned char*>(base_) + usable_, intact);
}

}  // namespace zofftk::tests
