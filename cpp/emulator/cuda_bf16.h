// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include "half.h"
#include "language.h"

using __nv_bfloat16 = fdm::emulator::Half<fdm::cpu::BFloat16>;
using __nv_bfloat162 = fdm::emulator::HalfPair<fdm::cpu::BFloat16>;

inline float __bfloat162float(__nv_bfloat16 x) { return float(x); }
inline __nv_bfloat16 __float2bfloat16_rn(float x) { return __nv_bfloat16(x); }
inline __nv_bfloat162 __floats2bfloat162_rn(float x, float y) { return {__nv_bfloat16(x), __nv_bfloat16(y)}; }
