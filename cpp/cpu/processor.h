// SPDX-License-Identifier: BSD-3-Clause
// The instruction sets that this processor has and the system enables.
#pragma once

#if defined(__x86_64__)
namespace fdm::cpu {

// AVX2, FMA and BMI2.
bool has_avx2();
// The above and AVX-512 F, BW, VL and DQ.
bool has_avx512();

} // namespace fdm::cpu
#endif
