// The pool: every index once, growth, release, callers at once and within one another, few processors.
#include "../pool.h"

#include <pthread.h>
#include <sched.h>

#include <atomic>
#include <chrono>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "check.h"

namespace zofftk::tests {
namespace {

// Plain integers: whether a caller may read what the workers wrote is for the thread sanitizer to say.
bool each_index_once(int64_t count, int threads) {
  std::vector<int> calls(static_cast<size_t>(count), 0);
  parallel_for(count, threads, [&](int64_t index) { ++calls[static_cast<size_t>(index)]; });
  return calls == std::vector<int>(static_cast<size_t>(count), 1);
}

// Runs a task a thread, none of which ends before all have begun.
std::set<std::thread::id> threads_that_meet(int threads) {
  std::atomic<int> here{0};
  std::mutex mutex;
  std::set<std::thread::id> ids;
  parallel_for(threads, threads, [&](int64_t) {
    here.fetch_add(1);
    while (here.load() < threads) std::this_thread::yield();
    const std::lock_guard<std::mutex> lock(mutex);
    ids.insert(std::this_thread::get_id());
  });
  return ids;
}

class OneProcessor {
 public:
  OneProcessor() {
    sched_getaffinity(0, sizeof before_, &before_);
    CPU_ZERO(&only_);
    for (int cpu = 0; cpu < CPU_SETSIZE && CPU_COUNT(&only_) == 0; ++cpu) {
      if (CPU_ISSET(cpu, &before_)) CPU_SET(cpu, &only_);
    }
    sched_setaffinity(0, sizeof only_, &only_);
  }
  ~OneProcessor() { sched_setaffinity(0, sizeof before_, &before_); }
  OneProcessor(const OneProcessor&) = delete;
  OneProcessor& operator=(const OneProcessor&) = delete;

  bool holds_here() const {
    cpu_set_t now;
    return sched_getaffinity(0, sizeof now, &now) == 0 && CPU_EQUAL(&now, &only_);
  }

 private:
  cpu_set_t before_, only_;
};

// New threads ask for more stack than there are addresses, so that the system refuses them.
class NoNewThreads {
 public:
  NoNewThreads() {
    pthread_getattr_default_np(&before_);
    pthread_attr_t greedy;
    pthread_attr_init(&greedy);
    pthread_attr_setstacksize(&greedy, size_t{1} << 47);
    pthread_setattr_default_np(&greedy);
    pthread_attr_destroy(&greedy);
  }
  ~NoNewThreads() {
    pthread_setattr_default_np(&before_);
    pthread_attr_destroy(&before_);
  }
  NoNewThreads(const NoNewThreads&) = delete;
  NoNewThreads& operator=(const NoNewThreads&) = delete;

 private:
  pthread_attr_t before_;
};

}  // namespace

ZOFFTK_TEST(pool_calls_every_index_once) {
  for (const int64_t count : {0, 1, 2, 3, 100}) {
    for (const int threads : {1, 2, 3, 7}) {
      for (int repeat = 0; repeat < 20; ++repeat) {
        ZOFFTK_CHECK(each_index_once(count, threads), std::to_string(count) + " on " + std::to_string(threads));
      }
    }
  }
}

ZOFFTK_TEST(pool_starts_grows_and_is_released) {
  release_workers();
  ZOFFTK_CHECK(worker_count() == 0, "after a release");
  ZOFFTK_CHECK(each_index_once(8, 1) && each_index_once(1, 8), "one thread, one index");
  ZOFFTK_CHECK(worker_count() == 0, "calls that need no helper start none");
  for (const int threads : {2, 5, 3}) {
    const std::set<std::thread::id> ids = threads_that_meet(threads);
    ZOFFTK_CHECK(ids.size() == static_cast<size_t>(threads), std::to_string(threads));
    ZOFFTK_CHECK(ids.count(std::this_thread::get_id()) == 1, "the caller works too");
  }
  ZOFFTK_CHECK(worker_count() == 4, "as many as the largest call needed");
  release_workers();
  ZOFFTK_CHECK(worker_count() == 0, "after a second release");
  ZOFFTK_CHECK(each_index_once(64, 3), "after a release");
  ZOFFTK_CHECK(worker_count() == 2, "made anew");
}

ZOFFTK_TEST(pool_does_with_the_threads_it_gets) {
  release_workers();
  {
    const NoNewThreads none;
    ZOFFTK_CHECK(each_index_once(64, 3) && worker_count() == 0, "the caller alone");
  }
  ZOFFTK_CHECK(each_index_once(64, 3) && worker_count() == 2, "once there are threads again");
}

ZOFFTK_TEST(pool_has_no_more_threads_at_work_than_asked_for) {
  threads_that_meet(6);
  std::atomic<int> now{0}, most{0};
  parallel_for(30, 2, [&](int64_t) {
    const int present = now.fetch_add(1) + 1;
    int seen = most.load();
    while (present > seen && !most.compare_exchange_weak(seen, present)) {
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(1));  // time for others to join, if they would
    now.fetch_sub(1);
  });
  ZOFFTK_CHECK(most.load() <= 2, std::to_string(most.load()));
}

ZOFFTK_TEST(pool_serves_callers_at_once) {
  std::atomic<int> wrong{0};
  std::vector<std::thread> callers;
  for (int caller = 0; caller < 4; ++caller) {
    callers.emplace_back([&wrong, caller] {
      for (int repeat = 0; repeat < 100; ++repeat) wrong += !each_index_once(16 + caller, 1 + (repeat + caller) % 4);
    });
  }
  callers.emplace_back([] {
    for (int repeat = 0; repeat < 20; ++repeat) release_workers();
  });
  for (std::thread& caller : callers) caller.join();
  ZOFFTK_CHECK(wrong.load() == 0, std::to_string(wrong.load()));
}

ZOFFTK_TEST(pool_serves_calls_from_within_tasks) {
  std::atomic<int> wrong{0};
  parallel_for(6, 3, [&](int64_t outer) { wrong += !each_index_once(10 + outer, 3); });
  parallel_for(6, 1, [&](int64_t outer) { wrong += !each_index_once(10 + outer, 3); });
  ZOFFTK_CHECK(wrong.load() == 0, std::to_string(wrong.load()));
}

ZOFFTK_TEST(pool_keeps_to_the_processors_of_its_caller) {
  release_workers();
  const OneProcessor one;
  std::atomic<int> elsewhere{0};
  parallel_for(100, 4, [&](int64_t) { elsewhere += !one.holds_here(); });
  ZOFFTK_CHECK(elsewhere.load() == 0, std::to_string(elsewhere.load()));
  ZOFFTK_CHECK(threads_that_meet(4).size() == 4, "threads on one processor");
  ZOFFTK_CHECK(one.holds_here(), "the caller's own");
  release_workers();  // later tests want workers that may run anywhere
}

}  // namespace zofftk::tests
