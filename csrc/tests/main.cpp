// Runs the tests: all of them, or those whose names contain one of the arguments.
//
//   --print-isa        prints the instruction set this processor's features lead to
//   --expect-isa NAME  fails unless it is NAME
//   --serial-children  forked children start no threads
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include "../isa.h"
#include "check.h"
#include "fork_test.h"

namespace zofftk::tests {
namespace {

bool wanted(const Test& test, const std::vector<std::string>& filters) {
  for (const std::string& filter : filters) {
    if (std::strstr(test.name, filter.c_str()) != nullptr) return true;
  }
  return filters.empty();
}

bool passes(const Test& test) {
  std::printf("%s\n", test.name);  // first, so that a crash has a name
  std::fflush(stdout);
  try {
    test.run();
    return true;
  } catch (const std::exception& error) {
    std::printf("  FAILED %s\n", error.what());
    return false;
  }
}

int run_all(const std::vector<std::string>& filters) {
  int passed = 0, failed = 0;
  for (const Test& test : all_tests()) {
    if (wanted(test, filters)) ++(passes(test) ? passed : failed);
  }
  std::printf("%d passed, %d failed\n", passed, failed);
  return passed > 0 && failed == 0 ? 0 : 1;
}

int run(const std::vector<std::string>& arguments) {
  const std::string isa = active_isa().name;
  std::vector<std::string> filters;
  for (size_t i = 0; i < arguments.size(); ++i) {
    if (arguments[i] == "--print-isa") {
      std::puts(isa.c_str());
      return 0;
    }
    if (arguments[i] == "--serial-children") {
      keep_children_serial();
    } else if (arguments[i] == "--expect-isa" && i + 1 < arguments.size()) {
      const std::string& expected = arguments[++i];
      if (isa == expected) continue;
      std::printf("expected instruction set %s, got %s\n", expected.c_str(), isa.c_str());
      return 1;
    } else {
      filters.push_back(arguments[i]);
    }
  }
  return run_all(filters);
}

}  // namespace
}  // namespace zofftk::tests

int main(int argc, char** argv) {
  unsetenv("ZOFFTK_ISA");  // the choice by features is what is tested
  return zofftk::tests::run({argv + 1, argv + argc});
}
