// The Python face of the kernels: every function checks its arguments, drops the interpreter lock and calls.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cmath>
#include <cstring>
#include <vector>

#include "buffers.h"
#include "float_mode.h"
#include "isa.h"
#include "pool.h"
#include "ranges.h"
#include "roof.h"

namespace py = pybind11;
using namespace py::literals;

namespace zofftk {
namespace {

template <class T>
T* pointer(uintptr_t address) {
  return reinterpret_cast<T*>(address);
}

const Kernels& kernels_of(const std::string& isa) { return *(isa.empty() ? active_isa() : find_isa(isa)).kernels; }

void check_threads(int threads) {
  if (threads < 1) throw std::invalid_argument("threads: expected 1 or more, got " + std::to_string(threads));
}

void check_block(int64_t block, int64_t unit) {
  if (block < unit || block % unit != 0) {
    throw std::invalid_argument("block: expected a positive multiple of " + std::to_string(unit) + ", got " +
                                std::to_string(block));
  }
}

void check_sums(uintptr_t sums, int64_t n) {
  if (n > 0 && (sums == 0 || sums % 8 != 0)) throw std::invalid_argument("sums: expected an address of float64");
}

// Calls range(begin, end) for the chunks of [0, n), without the interpreter lock.
template <class Function>
void over_chunks(int64_t n, int threads, const Function& range) {
  const py::gil_scoped_release unlocked;
  parallel_ranges(n, threads, range);
}

void adam_step(uintptr_t param, uintptr_t exp_avg, uintptr_t exp_avg_sq, uintptr_t grad, const std::string& grad_dtype,
               uintptr_t out, const std::string& out_dtype, int64_t n, int64_t step, double lr, double beta1,
               double beta2, double eps, double weight_decay, bool decoupled, double grad_scale, int threads,
               const std::string& isa) {
  const Dtype grad_type = parse_dtype(grad_dtype, "grad_dtype");
  const Dtype out_type = out == 0 ? Dtype::none : parse_dtype(out_dtype, "out_dtype");
  const Buffer written[] = {checked("param", param, Dtype::float32, n), checked("exp_avg", exp_avg, Dtype::float32, n),
                            checked("exp_avg_sq", exp_avg_sq, Dtype::float32, n),
                            out == 0 ? Buffer{"out", 0, 0, 1} : checked("out", out, out_type, n)};
  const Buffer read = checked("grad", grad, grad_type, n);
  for (int i = 0; i < 4; ++i) {
    for (int j = 0; j < i; ++j) check_disjoint(written[j], written[i]);
    if (i < 3 || !same_place(written[i], read)) check_disjoint(written[i], read);
  }
  if (step < 1) throw std::invalid_argument("step: expected 1 or more, got " + std::to_string(step));
  check_threads(threads);
  // Without decay both modes are the same, and an infinite parameter must not become 0 * inf in the gradient.
  decoupled = decoupled || weight_decay == 0.0;
  const AdamHyper hyper{step, lr, beta1, beta2, eps, weight_decay, decoupled, grad_scale};
  const AdamArgs args{pointer<float>(param), pointer<float>(exp_avg), pointer<float>(exp_avg_sq), pointer<void>(grad),
                      pointer<void>(out),    grad_type,               out_type,                   decoupled,
                      adam_constants(hyper)};
  const Kernels& kernels = kernels_of(isa);
  over_chunks(n, threads, [&](int64_t begin, int64_t end) { kernels.adam(args, begin, end); });
}

// Checks the buffers of an optimizer with one moment; an address of 0 stands for no moment, and for no out.
MomentBuffers moment_buffers(uintptr_t param, const char* moment_name, uintptr_t moment, uintptr_t grad,
                             const std::string& grad_dtype, uintptr_t out, const std::string& out_dtype, int64_t n) {
  const Dtype grad_type = parse_dtype(grad_dtype, "grad_dtype");
  const Dtype out_type = out == 0 ? Dtype::none : parse_dtype(out_dtype, "out_dtype");
  const Buffer read = checked("grad", grad, grad_type, n);
  std::vector<Buffer> written{checked("param", param, Dtype::float32, n)};
  if (moment != 0) written.push_back(checked(moment_name, moment, Dtype::float32, n));
  for (const Buffer& buffer : written) check_disjoint(buffer, read);
  if (out != 0) {
    written.push_back(checked("out", out, out_type, n));
    if (!same_place(written.back(), read)) check_disjoint(written.back(), read);
  }
  for (size_t i = 0; i < written.size(); ++i) {
    for (size_t j = 0; j < i; ++j) check_disjoint(written[j], written[i]);
  }
  return {pointer<float>(param), pointer<float>(moment), pointer<void>(grad), pointer<void>(out), grad_type, out_type};
}

void lion_step(uintptr_t param, uintptr_t exp_avg, uintptr_t grad, const std::string& grad_dtype, uintptr_t out,
               const std::string& out_dtype, int64_t n, double lr, double beta1, double beta2, double weight_decay,
               double grad_scale, int threads, const std::string& isa) {
  if (n > 0 && exp_avg == 0) throw std::invalid_argument("exp_avg: expected an address, got 0");
  const LionArgs args{moment_buffers(param, "exp_avg", exp_avg, grad, grad_dtype, out, out_dtype, n),
                      lion_constants({lr, beta1, beta2, weight_decay, grad_scale})};
  check_threads(threads);
  const Kernels& kernels = kernels_of(isa);
  over_chunks(n, threads, [&](int64_t begin, int64_t end) { kernels.lion(args, begin, end); });
}

void sgd_step(uintptr_t param, uintptr_t momentum_buffer, uintptr_t grad, const std::string& grad_dtype, uintptr_t out,
              const std::string& out_dtype, int64_t n, double lr, double momentum, double dampening,
              double weight_decay, bool nesterov, bool first, double grad_scale, int threads, const std::string& isa) {
  if (n > 0 && (momentum_buffer == 0) != (momentum == 0.0)) {
    throw std::invalid_argument("momentum_buffer: expected an address where momentum is not 0, and 0 where it is");
  }
  const SgdArgs args{moment_buffers(param, "momentum_buffer", momentum_buffer, grad, grad_dtype, out, out_dtype, n),
                     sgd_constants({lr, momentum, dampening, weight_decay, nesterov, first, grad_scale})};
  check_threads(threads);
  const Kernels& kernels = kernels_of(isa);
  over_chunks(n, threads, [&](int64_t begin, int64_t end) { kernels.sgd(args, begin, end); });
}

void block_square_sums(uintptr_t values, const std::string& dtype, int64_t n, int64_t block, uintptr_t sums,
                       int threads, const std::string& isa) {
  const Dtype type = parse_dtype(dtype, "dtype");
  checked("values", values, type, n);
  check_block(block, 1);
  check_sums(sums, n);
  check_threads(threads);
  const SquareSumArgs args{pointer<void>(values), type, n, block, pointer<double>(sums)};
  const Kernels& kernels = kernels_of(isa);
  const py::gil_scoped_release unlocked;
  const int64_t blocks = chunk_count(n, block);
  const int64_t per_task = std::max<int64_t>(1, chunk_elements() / block);
  parallel_for(chunk_count(blocks, per_task), threads, [&](int64_t index) {
    const Range r = chunk_range(blocks, per_task, index);
    kernels.square_sums(args, r.begin, r.end);
  });
}

void accumulate(uintptr_t sum, uintptr_t values, const std::string& dtype, int64_t n, int threads,
                const std::string& isa) {
  const Dtype type = parse_dtype(dtype, "dtype");
  check_disjoint(checked("sum", sum, Dtype::float32, n), checked("values", values, type, n));
  check_threads(threads);
  const AccumulateArgs args{pointer<float>(sum), pointer<void>(values), type};
  const Kernels& kernels = kernels_of(isa);
  over_chunks(n, threads, [&](int64_t begin, int64_t end) { kernels.accumulate(args, begin, end); });
}

ConvertArgs convert_args(uintptr_t target, const std::string& target_dtype, uintptr_t source,
                         const std::string& source_dtype, int64_t n) {
  const Dtype to = parse_dtype(target_dtype, "target_dtype");
  const Dtype from = parse_dtype(source_dtype, "source_dtype");
  if (to != from && to != Dtype::float32 && from != Dtype::float32) {
    throw std::invalid_argument("expected equal dtypes or float32 on one side, got " + source_dtype + " to " +
                                target_dtype);
  }
  check_disjoint(checked("target", target, to, n), checked("source", source, from, n));
  return {pointer<void>(target), pointer<void>(source), to, from};
}

void convert_range(const Kernels& kernels, const ConvertArgs& a, int64_t begin, int64_t end) {
  if (a.target_dtype != a.source_dtype) return kernels.convert(a, begin, end);
  const int64_t size = element_size(a.target_dtype);
  std::memcpy(static_cast<char*>(a.target) + begin * size, static_cast<const char*>(a.source) + begin * size,
              static_cast<size_t>((end - begin) * size));
}

void convert(uintptr_t target, const std::string& target_dtype, uintptr_t source, const std::string& source_dtype,
             int64_t n, int threads, const std::string& isa) {
  const ConvertArgs args = convert_args(target, target_dtype, source, source_dtype, n);
  check_threads(threads);
  const Kernels& kernels = kernels_of(isa);
  over_chunks(n, threads, [&](int64_t begin, int64_t end) { convert_range(kernels, args, begin, end); });
}

// One row of a table of ranges: where from, where to, how many elements, and where their sums of squares go.
struct RangeRow {
  int64_t source, target, n, sums;
};
static_assert(sizeof(RangeRow) == 32);

template <class Function>
void over_rows(uintptr_t table, int64_t rows, const std::string& target_dtype, const std::string& source_dtype,
               const Function& function) {
  if (rows > 0 && (table == 0 || table % 8 != 0)) throw std::invalid_argument("table: expected an address of int64");
  const auto* const first = pointer<const RangeRow>(table);
  std::vector<ConvertArgs> args;
  args.reserve(static_cast<size_t>(rows));
  for (const RangeRow* row = first; row != first + rows; ++row) {
    args.push_back(convert_args(static_cast<uintptr_t>(row->target), target_dtype, static_cast<uintptr_t>(row->source),
                                source_dtype, row->n));
  }
  const py::gil_scoped_release unlocked;
  const FloatMode mode;
  for (int64_t row = 0; row < rows; ++row) function(args[static_cast<size_t>(row)], first[row]);
}

void convert_ranges(uintptr_t table, int64_t rows, const std::string& target_dtype, const std::string& source_dtype,
                    const std::string& isa) {
  const Kernels& kernels = kernels_of(isa);
  over_rows(table, rows, target_dtype, source_dtype,
            [&](const ConvertArgs& args, const RangeRow& row) { convert_range(kernels, args, 0, row.n); });
}

// Block by block, so that the squares are taken of what is still in the cache.
void pack_ranges(uintptr_t table, int64_t rows, const std::string& target_dtype, const std::string& source_dtype,
                 int64_t block, const std::string& isa) {
  check_block(block, 64);
  const Kernels& kernels = kernels_of(isa);
  over_rows(table, rows, target_dtype, source_dtype, [&](const ConvertArgs& args, const RangeRow& row) {
    const SquareSumArgs squares{args.target, args.target_dtype, row.n, block,
                                pointer<double>(static_cast<uintptr_t>(row.sums))};
    for (int64_t index = 0; index < chunk_count(row.n, block); ++index) {
      const Range r = chunk_range(row.n, block, index);
      convert_range(kernels, args, r.begin, r.end);
      kernels.square_sums(squares, index, index + 1);
    }
  });
}

void sum_runs(uintptr_t blocks, uintptr_t starts, uintptr_t counts, int64_t runs, uintptr_t out) {
  for (const uintptr_t address : {blocks, starts, counts, out}) {
    if (runs > 0 && (address == 0 || address % 8 != 0)) throw std::invalid_argument("sum_runs: bad address");
  }
  const py::gil_scoped_release unlocked;
  for (int64_t run = 0; run < runs; ++run) {
    const double* const first = pointer<const double>(blocks) + pointer<const int64_t>(starts)[run];
    double sum = 0.0;
    for (int64_t k = 0; k < pointer<const int64_t>(counts)[run]; ++k) sum += first[k];
    pointer<double>(out)[run] = sum;
  }
}

void roof(const std::string& kind, uintptr_t param, uintptr_t exp_avg, uintptr_t exp_avg_sq, uintptr_t grad,
          uintptr_t out, int64_t n, int threads) {
  check_threads(threads);
  for (const uintptr_t address : {param, exp_avg, exp_avg_sq, grad, out}) {
    if (address == 0 || address % 64 != 0) throw std::invalid_argument("roof: expected multiples of 64 bytes");
  }
  for (const Roof& candidate : compiled_roofs()) {
    if (kind != candidate.name) continue;
    find_isa(candidate.needs);
    const RoofArgs args{pointer<float>(param), pointer<float>(exp_avg), pointer<float>(exp_avg_sq),
                        pointer<const uint16_t>(grad), pointer<uint16_t>(out)};
    return over_chunks(n / 32 * 32, threads, [&](int64_t begin, int64_t end) { candidate.run(args, begin, end); });
  }
  throw std::invalid_argument("unknown roof kind '" + kind + "'");
}

std::vector<std::string> available_isas() {
  std::vector<std::string> names;
  for (const Isa& isa : compiled_isas()) {
    if (supports(isa)) names.push_back(isa.name);
  }
  return names;
}

std::vector<std::string> roof_kinds() {
  std::vector<std::string> names;
  for (const Roof& candidate : compiled_roofs()) {
    if (supports(*std::find_if(compiled_isas().begin(), compiled_isas().end(),
                               [&](const Isa& isa) { return std::string(isa.name) == candidate.needs; }))) {
      names.push_back(candidate.name);
    }
  }
  return names;
}

std::pair<int64_t, int64_t> chunk_bounds(int64_t n, int64_t chunk, int64_t index) {
  const Range r = chunk_range(n, chunk, index);
  return {r.begin, r.end};
}

}  // namespace
}  // namespace zofftk

PYBIND11_MODULE(_cpu_adam, m) {
  using namespace zofftk;
  m.doc() = "Optimizers and their helpers on CPU memory, by address. Addresses are trusted: pass live buffers only.";
  m.def("adam_step", &adam_step, "param"_a, "exp_avg"_a, "exp_avg_sq"_a, "grad"_a, "grad_dtype"_a, "out"_a,
        "out_dtype"_a, "n"_a, py::kw_only(), "step"_a, "lr"_a, "beta1"_a, "beta2"_a, "eps"_a, "weight_decay"_a,
        "decoupled"_a, "grad_scale"_a, "threads"_a, "isa"_a = "", "One Adam step over n elements; out 0 means none.");
  m.def("lion_step", &lion_step, "param"_a, "exp_avg"_a, "grad"_a, "grad_dtype"_a, "out"_a, "out_dtype"_a, "n"_a,
        py::kw_only(), "lr"_a, "beta1"_a, "beta2"_a, "weight_decay"_a, "grad_scale"_a, "threads"_a, "isa"_a = "",
        "One Lion step over n elements; out 0 means none.");
  m.def("sgd_step", &sgd_step, "param"_a, "momentum_buffer"_a, "grad"_a, "grad_dtype"_a, "out"_a, "out_dtype"_a, "n"_a,
        py::kw_only(), "lr"_a, "momentum"_a, "dampening"_a, "weight_decay"_a, "nesterov"_a, "first"_a, "grad_scale"_a,
        "threads"_a, "isa"_a = "", "One SGD step over n elements; momentum_buffer and out 0 mean none.");
  m.def("block_square_sums", &block_square_sums, "values"_a, "dtype"_a, "n"_a, "block"_a, "sums"_a, "threads"_a,
        "isa"_a = "", "Float64 sum of squares of every block of `block` elements.");
  m.def("sum_runs", &sum_runs, "blocks"_a, "starts"_a, "counts"_a, "runs"_a, "out"_a,
        "Float64 sums of runs of block sums, each from left to right.");
  m.def("accumulate", &accumulate, "sum"_a, "values"_a, "dtype"_a, "n"_a, "threads"_a, "isa"_a = "",
        "sum += float32(values)");
  m.def("convert", &convert, "target"_a, "target_dtype"_a, "source"_a, "source_dtype"_a, "n"_a, "threads"_a,
        "isa"_a = "", "target = source; of equal dtypes, or between float32 and a 16-bit type.");
  m.def("convert_ranges", &convert_ranges, "table"_a, "rows"_a, "target_dtype"_a, "source_dtype"_a, "isa"_a = "",
        "convert for every row of a table, on the calling thread.");
  m.def("pack_ranges", &pack_ranges, "table"_a, "rows"_a, "target_dtype"_a, "source_dtype"_a, "block"_a, "isa"_a = "",
        "convert_ranges, and in the same pass the block_square_sums of what was written.");
  m.def("roof", &roof, "kind"_a, "param"_a, "exp_avg"_a, "exp_avg_sq"_a, "grad"_a, "out"_a, "n"_a, "threads"_a,
        "Moves the bytes of a step with 16-bit gradients and parameters; n is rounded down to a multiple of 32.");
  m.def("roof_kinds", &roof_kinds, "Loops `roof` can run on this processor.");
  m.def("isa", [] { return std::string(active_isa().name); }, "Name of the instruction set in use.");
  m.def("available_isas", &available_isas, "Names of those this processor can run, best first.");
  m.def("cpu_features", &cpu_features, "Processor features the instruction sets ask for and this processor has.");
  m.def("worker_count", &worker_count, "Threads of the pool, the caller not counted.");
  m.def("release_workers", &release_workers, py::call_guard<py::gil_scoped_release>(),
        "Ends the pool's threads once no call uses them; the next call makes new ones.");
  m.def("set_worker_cores", &set_worker_cores, "cores"_a, py::call_guard<py::gil_scoped_release>(),
        "Binds the pool's threads to these cores from the next call on; none: to those of the thread that makes them.");
  m.def("_mask_features", &set_feature_mask, "features"_a, "Tests: behave as a processor with only these features.");
  m.def("_set_chunk", &set_chunk_elements, "elements"_a, "Tests: elements per task, a multiple of 64; 0 for default.");
  m.def("_chunk_count", &chunk_count, "n"_a, "chunk"_a, "Tests: chunks that cover n elements.");
  m.def("_chunk_range", &chunk_bounds, "n"_a, "chunk"_a, "index"_a, "Tests: first and end element of a chunk.");
}
