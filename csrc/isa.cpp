#include "isa.h"

#include <algorithm>
#include <cstdlib>
#include <mutex>
#include <stdexcept>

namespace zofftk {

namespace {

// __builtin_cpu_supports also asks whether the operating system saves the wide registers.
std::vector<std::string> probe() {
  std::vector<std::string> found;
#ifdef ZOFFTK_X86
  __builtin_cpu_init();
#define ZOFFTK_PROBE(feature) \
  if (__builtin_cpu_supports(feature)) found.push_back(feature)
  ZOFFTK_PROBE("avx2");
  ZOFFTK_PROBE("fma");
  ZOFFTK_PROBE("f16c");
  ZOFFTK_PROBE("avx512f");
  ZOFFTK_PROBE("avx512bw");
  ZOFFTK_PROBE("avx512dq");
  ZOFFTK_PROBE("avx512vl");
#undef ZOFFTK_PROBE
#endif
  return found;
}

bool contains(const std::vector<std::string>& list, const std::string& item) {
  return std::find(list.begin(), list.end(), item) != list.end();
}

// Lives until the process ends, so that threads still running at exit never see it destroyed.
struct Choice {
  std::mutex mutex;
  std::vector<std::string> features = probe();
  const Isa* active = nullptr;
};

Choice& choice() {
  static Choice* const instance = new Choice;
  return *instance;
}

bool covered(const Isa& isa, const std::vector<std::string>& features) {
  return std::all_of(isa.features.begin(), isa.features.end(),
                     [&](const std::string& feature) { return contains(features, feature); });
}

const Isa& find_among(const std::string& name, const std::vector<std::string>& features) {
  std::string names;
  for (const Isa& isa : compiled_isas()) {
    names += (names.empty() ? "" : ", ") + std::string(isa.name);
    if (name != isa.name) continue;
    if (covered(isa, features)) return isa;
    std::string missing;
    for (const std::string& feature : isa.features) {
      if (!contains(features, feature)) missing += " " + feature;
    }
    throw std::runtime_error("instruction set '" + name + "' was asked for, but this processor lacks:" + missing);
  }
  throw std::invalid_argument("unknown instruction set '" + name + "'; expected one of: " + names);
}

}  // namespace

const std::vector<Isa>& compiled_isas() {
  static const auto* const list = new std::vector<Isa>{
#ifdef ZOFFTK_X86
      {"avx512",
       "AVX-512: 16 lanes",
       {"avx512f", "avx512bw", "avx512dq", "avx512vl", "avx2", "fma", "f16c"},
       &kKernelsAvx512},
      {"avx2", "AVX2 with FMA and F16C: 8 lanes", {"avx2", "fma", "f16c"}, &kKernelsAvx2},
#endif
      {"scalar", "plain C++, the reference", {}, &kKernelsScalar},
  };
  return *list;
}

std::vector<std::string> cpu_features() {
  const std::lock_guard<std::mutex> lock(choice().mutex);
  return choice().features;
}

bool supports(const Isa& isa) { return covered(isa, cpu_features()); }

const Isa& find_isa(const std::string& name) { return find_among(name, cpu_features()); }

const Isa& active_isa() {
  Choice& c = choice();
  const std::lock_guard<std::mutex> lock(c.mutex);
  if (c.active == nullptr) {
    const char* forced = std::getenv("ZOFFTK_ISA");
    if (forced != nullptr && *forced != '\0') {
      c.active = &find_among(forced, c.features);
    } else {
      const auto& list = compiled_isas();
      c.active = &*std::find_if(list.begin(), list.end(), [&](const Isa& isa) { return covered(isa, c.features); });
    }
  }
  return *c.active;
}

void set_feature_mask(const std::vector<std::string>& features) {
  Choice& c = choice();
  const std::lock_guard<std::mutex> lock(c.mutex);
  c.features.clear();
  for (const std::string& feature : probe()) {
    if (contains(features, feature)) c.features.push_back(feature);
  }
  c.active = nullptr;
}

}  // namespace zofftk
