// SPDX-License-Identifier: BSD-3-Clause
#include <algorithm>
#include <cstdlib>
#include <string_view>

#include "kernels.h"
#include "processor.h"

namespace fdm::cpu {
namespace {

#if defined(__x86_64__)
// The value without surrounding spaces, as the loader reads it. The loader checks its validity and whether this
// processor has that level: it compares the value with the name of the chosen level.
std::string_view wanted_level() {
  const char *value = std::getenv("FLASH_DMATTN_CPU_SIMD");
  std::string_view text = value ? value : "";
  constexpr std::string_view spaces = " \t\n\v\f\r";
  text.remove_prefix(std::min(text.find_first_not_of(spaces), text.size()));
  return text.substr(0, text.find_last_not_of(spaces) + 1);
}
#endif

const Kernels &choose() {
#if defined(__x86_64__)
  const std::string_view wanted = wanted_level();
  const bool only_baseline = wanted == "baseline";
  const bool up_to_avx2 = wanted == "avx2";
  if (has_avx512() && !only_baseline && !up_to_avx2) return avx512::kernels();
  if (has_avx2() && !only_baseline) return avx2::kernels();
#endif
  return baseline::kernels();
}

} // namespace

const Kernels &best_kernels() {
  static const Kernels &chosen = choose();
  return chosen;
}

} // namespace fdm::cpu
