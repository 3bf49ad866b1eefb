// Which instruction set is chosen, by the processor's features and by ZOFFTK_ISA.
#include "../isa.h"

#include <algorithm>
#include <cstdlib>
#include <stdexcept>

#include "check.h"

namespace zofftk::tests {
namespace {

using Features = std::vector<std::string>;

class Pretence {
 public:
  Pretence() = default;
  ~Pretence() {
    unsetenv("ZOFFTK_ISA");
    set_feature_mask(all_);
  }
  Pretence(const Pretence&) = delete;
  Pretence& operator=(const Pretence&) = delete;

  const Features& all() const { return all_; }

 private:
  const Features all_ = cpu_features();
};

bool has(const Features& features, const Features& wanted) {
  return std::all_of(wanted.begin(), wanted.end(), [&](const std::string& feature) {
    return std::find(features.begin(), features.end(), feature) != features.end();
  });
}

std::string expected_isa(const Features& features) {
  if (!has(features, {"avx2", "fma", "f16c"})) return "scalar";
  return has(features, {"avx512f", "avx512bw", "avx512dq", "avx512vl"}) ? "avx512" : "avx2";
}

std::string error_of_active_isa() {
  try {
    active_isa();
  } catch (const std::exception& error) {
    return error.what();
  }
  return "none";
}

}  // namespace

ZOFFTK_TEST(isa_of_every_subset_of_features) {
  const Pretence pretence;
  const Features& all = pretence.all();
  for (unsigned subset = 0; subset < 1u << all.size(); ++subset) {
    Features some;
    for (size_t k = 0; k < all.size(); ++k) {
      if (subset >> k & 1u) some.push_back(all[k]);
    }
    set_feature_mask(some);
    ZOFFTK_CHECK(active_isa().name == expected_isa(some), std::string(active_isa().name) + " for subset " +
                                                               std::to_string(subset));
  }
}

ZOFFTK_TEST(isa_cannot_be_given_features_the_processor_lacks) {
  const Pretence pretence;
  set_feature_mask({"avx2", "fma", "f16c", "avx512f", "avx512bw", "avx512dq", "avx512vl"});
  ZOFFTK_CHECK(cpu_features() == pretence.all(), "more features than there are");
}

ZOFFTK_TEST(isa_forced_by_the_environment) {
  const Pretence pretence;
  for (const Isa& isa : compiled_isas()) {
    setenv("ZOFFTK_ISA", isa.name, 1);
    set_feature_mask(pretence.all());
    if (supports(isa)) ZOFFTK_CHECK(active_isa().name == std::string(isa.name), active_isa().name);
    set_feature_mask({});
    const std::string error = error_of_active_isa();
    const bool lacks = error.find("but this processor lacks: ") != std::string::npos;
    ZOFFTK_CHECK(isa.features.empty() ? error == "none" : lacks, error);
  }
  setenv("ZOFFTK_ISA", "sse9", 1);
  set_feature_mask(pretence.all());
  ZOFFTK_CHECK(error_of_active_isa().find("unknown instruction set 'sse9'; expected one of: ") == 0,
               error_of_active_isa());
}

}  // namespace zofftk::tests
