// Plain C++: runs everywhere, and is the reference the other instruction sets are tested against.
#include <cmath>
#include <cstdint>

#include "half.h"
#include "kernels.h"
#include "target_region.h"

namespace zofftk {
namespace {

#include "lanes_scalar.h"

#include "adam_body.inl"
#include "moment_body.inl"
#include "lion_body.inl"
#include "sgd_body.inl"
#include "vector_body.inl"

}  // namespace

const Kernels kKernelsScalar = {adam, lion, sgd, square_sums, accumulate, convert};

}  // namespace zofftk
