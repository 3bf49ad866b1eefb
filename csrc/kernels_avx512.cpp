#include "kernels.h"

#ifdef ZOFFTK_X86
#include <immintrin.h>

#include <cstdint>

#include "target_region.h"

ZOFFTK_TARGET_BEGIN("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")
namespace zofftk {
namespace {

#include "lanes_avx512.h"

#include "adam_body.inl"
#include "moment_body.inl"
#include "lion_body.inl"
#include "sgd_body.inl"
#include "vector_body.inl"

}  // namespace
}  // namespace zofftk
ZOFFTK_TARGET_END

namespace zofftk {
const Kernels kKernelsAvx512 = {adam, lion, sgd, square_sums, accumulate, convert};
}  // namespace zofftk
#endif
