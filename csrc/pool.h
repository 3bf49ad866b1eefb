// Threads for loops over chunks. Workers are made when first needed and live until they are released or the process
// ends; the calling thread is always one of those that work. A forked child starts afresh with threads of its own.
#pragma once
#include <cstdint>
#include <vector>

#include "ranges.h"

namespace zofftk {

using Task = void (*)(const void* context, int64_t index);

// Calls task(context, index) once for every index in [0, count), on at most `threads` threads, and returns when all
// are done. Concurrent calls take turns; a call from within a task runs on the task's thread alone. Every task runs in
// the default floating-point mode; the caller's is restored.
void run_tasks(int64_t count, int threads, Task task, const void* context);

template <class Function>
void parallel_for(int64_t count, int threads, const Function& function) {
  run_tasks(
      count, threads, [](const void* context, int64_t index) { (*static_cast<const Function*>(context))(index); },
      &function);
}

int64_t chunk_elements();             // elements per task of parallel_ranges
void set_chunk_elements(int64_t n);   // tests: a multiple of 64, or 0 for the default
int worker_count();                   // threads of the pool
void release_workers();               // ends them, after the calls under way; the next call makes new ones

// Binds workers, from the next call on and in children forked later, to these cores; none, the default: to those of
// the thread that makes them. The calling thread, which works too, is the user's: it stays as it is.
void set_worker_cores(const std::vector<int>& cores);

// Calls function(begin, end) for the chunks of [0, n).
template <class Function>
void parallel_ranges(int64_t n, int threads, const Function& function) {
  const int64_t chunk = chunk_elements();
  parallel_for(chunk_count(n, chunk), threads, [&](int64_t index) {
    const Range r = chunk_range(n, chunk, index);
    function(r.begin, r.end);
  });
}

}  // namespace zofftk
