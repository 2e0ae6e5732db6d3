// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include "../cpu/scalar.h"
#include "language.h"

struct __half {
  uint16_t bits;
  __half() = default;
  explicit __half(float x) : bits(fdm::cpu::Float16::store(x)) {}
  explicit operator float() const { return fdm::cpu::Float16::load(bits); }
};
struct alignas(4) __half2 {
  __half x, y;
};
inline __half __ushort_as_half(uint16_t bits) {
  __half x;
  x.bits = bits;
  return x;
}
inline float __half2float(__half x) { return fdm::cpu::Float16::load(x.bits); }
inline __half __float2half_rn(float x) { return __half(x); }
inline __half2 __floats2half2_rn(float x, float y) { return {__float2half_rn(x), __float2half_rn(y)}; }
inline float2 __half22float2(__half2 x) { return {__half2float(x.x), __half2float(x.y)}; }
