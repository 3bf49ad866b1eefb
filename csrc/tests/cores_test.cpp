// The pool's threads run on the cores they are given; its caller runs where it did.
#include <sched.h>

#include <atomic>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "../pool.h"
#include "check.h"

namespace zofftk::tests {
namespace {

std::vector<int> cores_here() {
  cpu_set_t set;
  std::vector<int> cores;
  if (sched_getaffinity(0, sizeof set, &set) != 0) return cores;
  for (int core = 0; core < CPU_SETSIZE; ++core) {
    if (CPU_ISSET(core, &set)) cores.push_back(core);
  }
  return cores;
}

// Whether two workers at once run on `expected`, and the caller where it did before.
bool workers_run_on(const std::vector<int>& expected) {
  const std::thread::id caller = std::this_thread::get_id();
  const std::vector<int> before = cores_here();
  std::atomic<int> here{0};
  std::mutex mutex;
  int right = 0;
  parallel_for(3, 3, [&](int64_t) {
    here.fetch_add(1);
    while (here.load() < 3) std::this_thread::yield();
    const std::lock_guard<std::mutex> lock(mutex);
    right += cores_here() == (std::this_thread::get_id() == caller ? before : expected);
  });
  return right == 3;
}

class WorkerCores {
 public:
  explicit WorkerCores(const std::vector<int>& cores) { set_worker_cores(cores); }
  ~WorkerCores() { set_worker_cores({}); }
  WorkerCores(const WorkerCores&) = delete;
  WorkerCores& operator=(const WorkerCores&) = delete;
};

}  // namespace

ZOFFTK_TEST(cores_are_those_of_the_workers_alone) {
  const std::vector<int> all = cores_here();
  release_workers();
  ZOFFTK_CHECK(workers_run_on(all), "none are chosen");
  for (const int core : {all.front(), all.back()}) {
    const WorkerCores chosen({core});
    ZOFFTK_CHECK(worker_count() == 0, "those bound elsewhere have ended");
    ZOFFTK_CHECK(workers_run_on({core}), std::to_string(core));
    release_workers();
    ZOFFTK_CHECK(workers_run_on({core}), "made anew");
  }
  ZOFFTK_CHECK(workers_run_on(all), "none are chosen any more");
}

ZOFFTK_TEST(cores_that_do_not_exist_bind_nothing) {
  const std::vector<int> all = cores_here();
  for (const std::vector<int>& cores : {std::vector<int>{CPU_SETSIZE - 1}, {-1, CPU_SETSIZE, 1 << 30}}) {
    const WorkerCores chosen(cores);
    ZOFFTK_CHECK(workers_run_on(all), std::to_string(cores.front()));
  }
}

ZOFFTK_TEST(cores_may_be_chosen_while_others_call) {
  const std::vector<int> all = cores_here();
  std::atomic<bool> stop{false};
  std::thread busy([&] {
    while (!stop.load()) parallel_for(64, 3, [](int64_t) { std::this_thread::yield(); });
  });
  for (int repeat = 0; repeat < 20; ++repeat) set_worker_cores({repeat % 2 == 0 ? all.front() : all.back()});
  stop.store(true);
  busy.join();
  ZOFFTK_CHECK(workers_run_on({all.back()}), "the last choice");
  set_worker_cores({});
}

}  // namespace zofftk::tests
