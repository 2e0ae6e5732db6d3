// SPDX-License-Identifier: BSD-3-Clause
// Vectors of FDM_SIMD_BYTES bytes, with the compilers' generic vector extension: one source for every instruction
// set.
//
// This header and its siblings are compiled once for each instruction set. All of it is in a separate namespace
// (FDM_SIMD_NAMESPACE). None of it may use templates of the standard library, whose instances the linker shares.
#pragma once

#include <cstdint>
#include <utility>

namespace fdm::cpu::FDM_SIMD_NAMESPACE {
namespace {

constexpr int kLanes = FDM_SIMD_BYTES / 4;

typedef float vfloat __attribute__((vector_size(FDM_SIMD_BYTES)));
typedef int32_t vint __attribute__((vector_size(FDM_SIMD_BYTES)));
typedef uint32_t vuint __attribute__((vector_size(FDM_SIMD_BYTES))); // unsigned: overflow is defined
typedef float vfloat_unaligned __attribute__((vector_size(FDM_SIMD_BYTES), aligned(4), may_alias));
typedef int32_t vint_unaligned __attribute__((vector_size(FDM_SIMD_BYTES), aligned(4), may_alias));

inline vfloat load(const float *p) { return *reinterpret_cast<const vfloat_unaligned *>(p); }
inline vint load(const int32_t *p) { return *reinterpret_cast<const vint_unaligned *>(p); }
inline void store(float *p, vfloat x) { *reinterpret_cast<vfloat_unaligned *>(p) = x; }
inline vfloat splat(float x) { return vfloat{} + x; }

// Reinterprets the bits as the other type.
inline vint as_int(vfloat x) { return reinterpret_cast<vint>(x); }
inline vfloat as_float(vint x) { return reinterpret_cast<vfloat>(x); }

inline vfloat maximum(vfloat a, vfloat b) { return a > b ? a : b; }

// Folds the lanes of x to one number, by halves; in the end all lanes hold it.
template <int Half, class Combine, int... Lane>
inline float fold(vfloat x, const Combine &combine, std::integer_sequence<int, Lane...> lanes) {
  if constexpr (Half > 0)
    return fold<Half / 2>(combine(x, __builtin_shufflevector(x, x, (Lane ^ Half)...)), combine, lanes);
  else
    return x[0];
}

inline float horizontal_max(vfloat x) {
  return fold<kLanes / 2>(x, maximum, std::make_integer_sequence<int, kLanes>{});
}

inline float horizontal_sum(vfloat x) {
  const auto add = [](vfloat a, vfloat b) { return a + b; };
  return fold<kLanes / 2>(x, add, std::make_integer_sequence<int, kLanes>{});
}

// exp(x) to about 2 units in the last place, for x <= 88; 0 below the smallest normal number. x = n log 2 + r with
// |r| <= log 2 / 2; the polynomial and the two-part constant are those of expf in the Cephes library.
inline vfloat exponential(vfloat x) {
  const vfloat magic = splat(0x1.8p23f); // adding it rounds to an integer in the low bits
  const vfloat shifted = x * 1.44269504088896341f + magic;
  const vfloat n = shifted - magic;
  const vfloat r = x - n * 0.693359375f + n * 2.12194440e-4f;
  vfloat p = r * 1.9875691500e-4f + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
  // For values far below the range the result is meaningless; the next line replaces it with 0.
  const vuint exponent = (reinterpret_cast<vuint>(shifted) - reinterpret_cast<vuint>(magic) + 127) << 23;
  return x < -87.3f ? splat(0.0f) : p * reinterpret_cast<vfloat>(exponent);
}

// tanh(x): the polynomial of the Cephes library near 0, elsewhere (1 - e) / (1 + e) with e = exp(-2 |x|).
inline vfloat hyperbolic_tangent(vfloat x) {
  const vfloat magnitude = as_float(as_int(x) & 0x7fffffff);
  const vfloat z = x * x;
  vfloat p = z * -5.70498872745e-3f + 2.06390887954e-2f;
  p = p * z - 5.37397155531e-2f;
  p = p * z + 1.33314422036e-1f;
  p = p * z - 3.33332819422e-1f;
  const vfloat near_zero = p * z * x + x;
  const vfloat e = exponential(magnitude * -2.0f);
  const vfloat far = (1.0f - e) / (1.0f + e);
  const vfloat signed_far = as_float(as_int(far) | (as_int(x) & INT32_MIN));
  return magnitude < 0.625f ? near_zero : signed_far;
}

} // namespace
} // namespace fdm::cpu::FDM_SIMD_NAMESPACE
