// SPDX-License-Identifier: BSD-3-Clause
#include <cstdlib>
#include <cstring>

#include "kernels.h"

namespace fdm::cpu {
namespace {

const Kernels &choose() {
#if defined(__x86_64__)
  const char *limit = std::getenv("FLASH_DMATTN_CPU_SIMD");
  const bool only_baseline = limit && std::strcmp(limit, "baseline") == 0;
  const bool up_to_avx2 = limit && std::strcmp(limit, "avx2") == 0;
  const bool has_avx2 =
      __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("bmi2");
  const bool has_avx512 = has_avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                          __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
  if (has_avx512 && !only_baseline && !up_to_avx2) return avx512::kernels();
  if (has_avx2 && !only_baseline) return avx2::kernels();
#endif
  return baseline::kernels();
}

} // namespace

const Kernels &best_kernels() {
  static const Kernels &chosen = choose();
  return chosen;
}

} // namespace fdm::cpu
