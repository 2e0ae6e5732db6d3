// SPDX-License-Identifier: BSD-3-Clause
// Reads CPUID rather than __builtin_cpu_supports(), which needs a compiler library that is not linked when clang
// compiles for Microsoft's linker.
#include "processor.h"

#if defined(__x86_64__)
#include <cpuid.h>

#include <cstdint>

namespace fdm::cpu {
namespace {

struct Registers {
  uint32_t eax, ebx, ecx, edx;
};

// Zeros for a leaf that the processor does not have.
Registers cpuid(uint32_t leaf) {
  Registers r{};
  __get_cpuid_count(leaf, 0, &r.eax, &r.ebx, &r.ecx, &r.edx);
  return r;
}

constexpr bool has_all(uint32_t word, uint32_t bits) { return (word & bits) == bits; }

// Leaf 1, ecx.
constexpr uint32_t kFma = 1u << 12, kOsXsave = 1u << 27, kAvx = 1u << 28;
// Leaf 7, ebx.
constexpr uint32_t kAvx2 = 1u << 5, kBmi2 = 1u << 8;
constexpr uint32_t kAvx512 = 1u << 16 | 1u << 17 | 1u << 30 | 1u << 31; // F, DQ, BW, VL
// XCR0: the registers that the system saves at a thread switch.
constexpr uint32_t kYmm = 1u << 1 | 1u << 2;                  // SSE and AVX
constexpr uint32_t kZmm = kYmm | 1u << 5 | 1u << 6 | 1u << 7; // also the mask registers and both parts of AVX-512

uint32_t saved_registers() {
  if (!has_all(cpuid(1).ecx, kOsXsave)) return 0;
  uint32_t low, high;
  __asm__("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return low;
}

} // namespace

bool has_avx2() {
  return has_all(saved_registers(), kYmm) && has_all(cpuid(1).ecx, kFma | kAvx) && has_all(cpuid(7).ebx, kAvx2 | kBmi2);
}

bool has_avx512() { return has_avx2() && has_all(saved_registers(), kZmm) && has_all(cpuid(7).ebx, kAvx512); }

} // namespace fdm::cpu
#endif
