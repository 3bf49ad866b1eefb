#include "cores.h"

#if defined(__linux__)

#include <pthread.h>
#include <sched.h>

#include <atomic>

namespace zofftk {

namespace {

struct Choice {
  cpu_set_t set;
  const Choice* before;
};

// A choice is made whole before it is seen, so that a child forked at any time has one. Never freed: there are few,
// and another thread may be reading.
std::atomic<const Choice*> g_choice{nullptr};

}  // namespace

void choose_cores(const std::vector<int>& cores) {
  auto* const choice = new Choice{};
  for (const int core : cores) {
    if (core >= 0 && core < CPU_SETSIZE) CPU_SET(core, &choice->set);
  }
  choice->before = g_choice.load();
  g_choice.store(choice);
}

void bind_to_cores(std::thread& thread) {
  const Choice* const choice = g_choice.load();
  if (choice == nullptr || CPU_COUNT(&choice->set) == 0) return;
  pthread_setaffinity_np(thread.native_handle(), sizeof choice->set, &choice->set);
}

}  // namespace zofftk

#else

namespace zofftk {

void choose_cores(const std::vector<int>&) {}
void bind_to_cores(std::thread&) {}

}  // namespace zofftk

#endif
