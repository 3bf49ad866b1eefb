#include "check.h"

namespace zofftk::tests {

std::vector<Test>& all_tests() {
  static std::vector<Test> tests;
  return tests;
}

void fail(const char* file, int line, const char* condition, const std::string& what) {
  throw Failure(std::string(file) + ":" + std::to_string(line) + ": " + condition + ": " + what);
}

}  // namespace zofftk::tests
