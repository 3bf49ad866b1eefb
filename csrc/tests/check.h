// Tests that register themselves, and checks that end a test with where and why.
#pragma once
#include <stdexcept>
#include <string>
#include <vector>

namespace zofftk::tests {

struct Test {
  const char* name;
  void (*run)();
};

std::vector<Test>& all_tests();

struct Registration {
  Registration(const char* name, void (*run)()) { all_tests().push_back({name, run}); }
};

struct Failure : std::runtime_error {
  using std::runtime_error::runtime_error;
};

[[noreturn]] void fail(const char* file, int line, const char* condition, const std::string& what);

}  // namespace zofftk::tests

#define ZOFFTK_TEST(name)                                                      \
  static void name();                                                          \
  static const ::zofftk::tests::Registration name##_registration(#name, name); \
  static void name()

// On the test's own thread only, since it throws. `what` is formed only where the check fails.
#define ZOFFTK_CHECK(condition, what)                                              \
  do {                                                                             \
    if (!(condition)) ::zofftk::tests::fail(__FILE__, __LINE__, #condition, what); \
  } while (false)
