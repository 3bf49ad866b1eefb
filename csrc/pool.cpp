#include "pool.h"

#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <mutex>
#include <stdexcept>
#include <system_error>
#include <thread>

#include "cores.h"
#include "float_mode.h"
#include "ranges.h"

namespace zofftk {

namespace {

struct Job {
  Task task;
  const void* context;
  int64_t count;
  std::atomic<int64_t> next{0};
};

// Chunks are claimed one by one, so that a thread the system has put aside delays nobody.
void work(Job& job) {
  const FloatMode mode;
  for (;;) {
    const int64_t index = job.next.fetch_add(1, std::memory_order_relaxed);
    if (index >= job.count) return;
    job.task(job.context, index);
  }
}

// This thread is on a job of the pool. A call from within one of its tasks must not wait for the pool, which waits
// for the task.
thread_local bool at_work = false;

class Pool {
 public:
  void run(Job& job, int helpers) {
    const std::lock_guard<std::mutex> turn(turn_);
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      grow(helpers);
      job_ = &job;
      seats_ = std::min(helpers, workers_);
    }
    wake_.notify_all();
    at_work = true;
    work(job);
    at_work = false;
    std::unique_lock<std::mutex> lock(mutex_);
    job_ = nullptr;  // who has not come by now finds nothing left to do
    done_.wait(lock, [this] { return busy_ == 0; });
  }

  void release() {
    const std::lock_guard<std::mutex> turn(turn_);
    std::unique_lock<std::mutex> lock(mutex_);
    leaving_ = true;
    wake_.notify_all();
    done_.wait(lock, [this] { return workers_ == 0; });
    leaving_ = false;
  }

  int workers() {
    const std::lock_guard<std::mutex> lock(mutex_);
    return workers_;
  }

 private:
  void grow(int helpers) {
    while (workers_ < helpers) {
      try {
        std::thread worker([this] { serve(); });
        bind_to_cores(worker);
        worker.detach();
      } catch (const std::system_error&) {
        return;  // the system gives no more threads: those there are do all the work
      }
      ++workers_;
    }
  }

  void serve() {
    at_work = true;
    std::unique_lock<std::mutex> lock(mutex_);
    for (;;) {
      wake_.wait(lock, [this] { return leaving_ || (job_ != nullptr && seats_ > 0); });
      if (leaving_) {
        if (--workers_ == 0) done_.notify_one();
        return;
      }
      --seats_;
      ++busy_;
      Job& job = *job_;
      lock.unlock();
      work(job);
      lock.lock();
      if (--busy_ == 0) done_.notify_one();
    }
  }

  std::mutex turn_;   // held by the caller whose job it is
  std::mutex mutex_;  // guards all below
  std::condition_variable wake_, done_;
  Job* job_ = nullptr;
  bool leaving_ = false;
  int workers_ = 0, seats_ = 0, busy_ = 0;
};

// Never destroyed: at exit, workers still wait on it. A forked child drops the parent's pool, whose threads it
// does not have and whose locks may be held for ever, and makes its own.
std::atomic<Pool*> g_pool{nullptr};
std::atomic<int64_t> g_chunk{0};
constexpr int64_t kDefaultChunk = 32768;

Pool& pool() {
  static const int registered = pthread_atfork(nullptr, nullptr, [] { g_pool.store(nullptr); });
  if (registered != 0) throw std::runtime_error("pthread_atfork failed");
  Pool* current = g_pool.load();
  if (current == nullptr) {
    Pool* const fresh = new Pool;
    if (g_pool.compare_exchange_strong(current, fresh)) return *fresh;
    delete fresh;
  }
  return *current;
}

}  // namespace

void run_tasks(int64_t count, int threads, Task task, const void* context) {
  Job job{task, context, count};
  const int helpers = static_cast<int>(std::min<int64_t>(threads, count)) - 1;
  if (helpers <= 0 || at_work) return work(job);
  pool().run(job, helpers);
}

int64_t chunk_elements() {
  const int64_t chosen = g_chunk.load();
  return chosen == 0 ? kDefaultChunk : chosen;
}

void set_chunk_elements(int64_t n) {
  if (n < 0 || n % kChunkAlign != 0) throw std::invalid_argument("chunk must be a multiple of 64, or 0");
  g_chunk.store(n);
}

void release_workers() {
  if (Pool* const current = g_pool.load()) current->release();
}

void set_worker_cores(const std::vector<int>& cores) {
  choose_cores(cores);
  release_workers();
}

int worker_count() {
  Pool* const current = g_pool.load();
  return current == nullptr ? 0 : current->workers();
}

}  // namespace zofftk
