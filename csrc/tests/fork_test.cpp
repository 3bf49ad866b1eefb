// A forked child drops the parent's pool and makes its own.
#include "fork_test.h"

#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <string>
#include <thread>
#include <vector>

#include "../pool.h"
#include "check.h"

namespace zofftk::tests {
namespace {

bool sums_are_right(int threads) {
  std::vector<int64_t> squares(50, 0);
  parallel_for(50, threads, [&](int64_t index) { squares[static_cast<size_t>(index)] = index * index; });
  int64_t sum = 0;
  for (const int64_t square : squares) sum += square;
  return sum == 40425;
}

int threads_of_child = 3;

// Exit status of a child that uses the pool; one that hangs is ended by a signal.
int status_of_child() {
  const pid_t child = fork();
  if (child == 0) {
    alarm(30);
    const bool fresh = worker_count() == 0;
    const bool right = sums_are_right(threads_of_child) && sums_are_right(threads_of_child);
    _exit(fresh && right && worker_count() == threads_of_child - 1 ? 0 : 3);
  }
  int status = -1;
  waitpid(child, &status, 0);
  return status;
}

}  // namespace

void keep_children_serial() { threads_of_child = 1; }

ZOFFTK_TEST(fork_after_the_pool_has_started) {
  ZOFFTK_CHECK(sums_are_right(3) && worker_count() >= 2, "in the parent, before");
  const int status = status_of_child();
  ZOFFTK_CHECK(status == 0, std::to_string(status));
  ZOFFTK_CHECK(sums_are_right(3) && worker_count() >= 2, "in the parent, after");
}

ZOFFTK_TEST(fork_while_another_thread_is_inside_the_pool) {
  std::atomic<bool> stop{false};
  std::thread busy([&] {
    while (!stop.load()) parallel_for(64, 3, [](int64_t) { std::this_thread::yield(); });
  });
  int status = 0;
  for (int repeat = 0; repeat < 10 && status == 0; ++repeat) status = status_of_child();
  stop.store(true);
  busy.join();
  ZOFFTK_CHECK(status == 0, std::to_string(status));
}

}  // namespace zofftk::tests
