// The functions every instruction set provides. Each works on a range [begin, end) of larger buffers, so that any
// split of the work over threads gives the same bits. Ranges start at multiples of 64 elements.
#pragma once
#include <cstdint>

#include "adam.h"
#include "lion.h"
#include "sgd.h"

namespace zofftk {

struct SquareSumArgs {
  const void* values;
  Dtype dtype;
  int64_t n, block;  // elements in all, and per block; the last block may be short
  double* sums;      // one per block
};

struct AccumulateArgs {
  float* sum;
  const void* values;
  Dtype dtype;
};

struct ConvertArgs {
  void* target;
  const void* source;
  Dtype target_dtype, source_dtype;  // one of them is float32
};

struct Kernels {
  void (*adam)(const AdamArgs&, int64_t begin, int64_t end);
  void (*lion)(const LionArgs&, int64_t begin, int64_t end);
  void (*sgd)(const SgdArgs&, int64_t begin, int64_t end);
  // Sums squares in float64 over 32 lanes (element i of a block goes to lane i mod 32), then in a fixed tree.
  void (*square_sums)(const SquareSumArgs&, int64_t first_block, int64_t end_block);
  void (*accumulate)(const AccumulateArgs&, int64_t begin, int64_t end);
  void (*convert)(const ConvertArgs&, int64_t begin, int64_t end);
};

extern const Kernels kKernelsScalar;
#if defined(__x86_64__)
#define ZOFFTK_X86 1
extern const Kernels kKernelsAvx2;
extern const Kernels kKernelsAvx512;
#endif

}  // namespace zofftk
