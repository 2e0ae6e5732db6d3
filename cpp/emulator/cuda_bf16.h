// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include "../cpu/scalar.h"
#include "language.h"

struct __nv_bfloat16 {
  uint16_t bits;
  __nv_bfloat16() = default;
  explicit __nv_bfloat16(float x) : bits(fdm::cpu::BFloat16::store(x)) {}
  explicit operator float() const { return fdm::cpu::BFloat16::load(bits); }
};
struct alignas(4) __nv_bfloat162 {
  __nv_bfloat16 x, y;
};
inline float __bfloat162float(__nv_bfloat16 x) { return fdm::cpu::BFloat16::load(x.bits); }
inline __nv_bfloat16 __float2bfloat16_rn(float x) { return __nv_bfloat16(x); }
inline __nv_bfloat162 __floats2bfloat162_rn(float x, float y) {
  return {__float2bfloat16_rn(x), __float2bfloat16_rn(y)};
}
