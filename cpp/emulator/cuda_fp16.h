// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include "half.h"
#include "language.h"

using __half = fdm::emulator::Half<fdm::cpu::Float16>;
using __half2 = fdm::emulator::HalfPair<fdm::cpu::Float16>;

inline __half __ushort_as_half(uint16_t bits) {
  __half x;
  x.bits = bits;
  return x;
}
inline float __half2float(__half x) { return float(x); }
inline __half __float2half_rn(float x) { return __half(x); }
inline __half2 __floats2half2_rn(float x, float y) { return {__half(x), __half(y)}; }
inline float2 __half22float2(__half2 x) { return {float(x.x), float(x.y)}; }
