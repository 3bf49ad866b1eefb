// Sums of squares, accumulation and conversion over any lanes. Included after adam_body.inl, in its target region.

constexpr int kSumLanes = 32;
constexpr int kSumVectors = kSumLanes / static_cast<int>(Lanes::width);

ZOFFTK_INLINE void add_square(Lanes::D& sum, Lanes::F x, Lanes::F smallest_normal) {
  const bool slow = Lanes::any(Lanes::is_tiny(x, smallest_normal));
  const Lanes::D wide = __builtin_expect(slow, 0) ? Lanes::widen(x) : Lanes::widen_normal(x);
  sum = Lanes::dadd(sum, Lanes::dmul(wide, wide));  // the product of two float32 values is exact
}

template <Dtype T>
ZOFFTK_INLINE double block_square_sum(const void* values, int64_t begin, int64_t end) {
  const Lanes::F smallest_normal = Lanes::set1(0x1p-126f);
  Lanes::D sums[kSumVectors];
  for (Lanes::D& sum : sums) sum = Lanes::dset1(0.0);
  int64_t i = begin;
  for (; i + kSumLanes <= end; i += kSumLanes) {
    // A single stream of reads leaves most of the memory's speed unused unless it is asked for far ahead.
    constexpr int64_t size = element_size(T), ahead = 4096, line = 64;
    for (int64_t byte = 0; byte < kSumLanes * size; byte += line) {
      __builtin_prefetch(static_cast<const char*>(values) + i * size + ahead + byte);
    }
    for (int k = 0; k < kSumVectors; ++k) {
      add_square(sums[k], Lanes::load<T>(values, i + k * Lanes::width), smallest_normal);
    }
  }
  for (int k = 0; i < end; ++k, i += Lanes::width) {
    const bool whole = i + Lanes::width <= end;
    add_square(sums[k], whole ? Lanes::load<T>(values, i) : Lanes::load_part<T>(values, i, end - i), smallest_normal);
  }
  double lanes[kSumLanes];
  for (int k = 0; k < kSumVectors; ++k) Lanes::dstore(lanes + k * Lanes::width, sums[k]);
  for (int half = kSumLanes / 2; half > 0; half /= 2) {
    for (int k = 0; k < half; ++k) lanes[k] = lanes[k] + lanes[k + half];
  }
  return lanes[0];
}

template <Dtype T>
static void square_sums_of(const SquareSumArgs& a, int64_t first_block, int64_t end_block) {
  for (int64_t block = first_block; block < end_block; ++block) {
    const int64_t begin = block * a.block;
    const int64_t end = a.n - begin < a.block ? a.n : begin + a.block;
    a.sums[block] = block_square_sum<T>(a.values, begin, end);
  }
}

static void square_sums(const SquareSumArgs& a, int64_t first_block, int64_t end_block) {
  switch (a.dtype) {
    case Dtype::none: return;
    case Dtype::float32: return square_sums_of<Dtype::float32>(a, first_block, end_block);
    case Dtype::bfloat16: return square_sums_of<Dtype::bfloat16>(a, first_block, end_block);
    case Dtype::float16: return square_sums_of<Dtype::float16>(a, first_block, end_block);
  }
}

template <Dtype T, class Span>
ZOFFTK_INLINE void accumulate_vector(const AccumulateArgs& a, Span span, int64_t i) {
  const Lanes::F sum = Lanes::add(Span::template load<Dtype::float32>(span, a.sum, i),
                                  Span::template load<T>(span, a.values, i));
  Span::template store<Dtype::float32>(span, a.sum, i, sum);
}

template <Dtype T>
static void accumulate_of(const AccumulateArgs& a, int64_t begin, int64_t end) {
  int64_t i = begin;
  for (; i + Lanes::width <= end; i += Lanes::width) accumulate_vector<T>(a, Whole{}, i);
  if (i < end) accumulate_vector<T>(a, Part{end - i}, i);
}

static void accumulate(const AccumulateArgs& a, int64_t begin, int64_t end) {
  switch (a.dtype) {
    case Dtype::none: return;
    case Dtype::float32: return accumulate_of<Dtype::float32>(a, begin, end);
    case Dtype::bfloat16: return accumulate_of<Dtype::bfloat16>(a, begin, end);
    case Dtype::float16: return accumulate_of<Dtype::float16>(a, begin, end);
  }
}

template <Dtype To, Dtype From>
static void convert_of(const ConvertArgs& a, int64_t begin, int64_t end) {
  int64_t i = begin;
  for (; i + Lanes::width <= end; i += Lanes::width) Lanes::store<To>(a.target, i, Lanes::load<From>(a.source, i));
  if (i < end) Lanes::store_part<To>(a.target, i, end - i, Lanes::load_part<From>(a.source, i, end - i));
}

static void convert(const ConvertArgs& a, int64_t begin, int64_t end) {
  constexpr Dtype f32 = Dtype::float32, bf16 = Dtype::bfloat16, f16 = Dtype::float16;
  if (a.source_dtype == f32) {
    if (a.target_dtype == f32) return convert_of<f32, f32>(a, begin, end);
    return a.target_dtype == bf16 ? convert_of<bf16, f32>(a, begin, end) : convert_of<f16, f32>(a, begin, end);
  }
  return a.source_dtype == bf16 ? convert_of<f32, bf16>(a, begin, end) : convert_of<f32, f16>(a, begin, end);
}
