// SPDX-License-Identifier: BSD-3-Clause
// Single values of the tensor dtypes, read and written as float32.
//
// `static inline` for the reason given in ../indexing.h.
#pragma once

#include <cstdint>
#include <cstring>

#include "../pack.h"

namespace fdm::cpu {

static inline float bits_to_float(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}
static inline uint32_t float_to_bits(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}

struct Float32 {
  using Storage = float;
  static inline float load(float x) { return x; }
  static inline float store(float x) { return x; }
};

struct BFloat16 {
  using Storage = uint16_t;
  static inline float load(uint16_t x) { return bits_to_float(uint32_t(x) << 16); }
  static inline uint16_t store(float x) {
    const uint32_t bits = float_to_bits(x);
    const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16; // to nearest, ties to even
    const uint32_t quiet_nan = (bits >> 16) | 0x40u;
    return uint16_t((bits & 0x7fffffffu) > 0x7f800000u ? quiet_nan : rounded);
  }
};

struct Float16 {
  using Storage = uint16_t;
  // Moves exponent and mantissa into place and scales by 2^112, the difference of the exponent biases. This is exact
  // for subnormal numbers too. Infinities and NaN need separate exponent bits.
  static inline float load(uint16_t x) {
    const uint32_t magnitude = uint32_t(x & 0x7fffu) << 13, sign = uint32_t(x & 0x8000u) << 16;
    const float scaled = bits_to_float(magnitude) * 0x1p112f;
    const uint32_t special = magnitude | 0x7f800000u;
    return bits_to_float(sign | (magnitude >= 0x0f800000u ? special : float_to_bits(scaled)));
  }
  static inline uint16_t store(float x) {
    const uint32_t bits = float_to_bits(x), magnitude = bits & 0x7fffffffu, sign = (bits >> 16) & 0x8000u;
    if (magnitude > 0x7f800000u) return uint16_t(sign | 0x7e00u | ((magnitude >> 13) & 0x3ffu));
    if (magnitude >= 0x477ff000u) return uint16_t(sign | 0x7c00u); // rounds to 2^16 or more
    if (magnitude < 0x38800000u) {                                 // below 2^-14: subnormal, steps of 2^-24
      const float step_aligned = bits_to_float(magnitude) + 0.5f;  // 0.5 has steps of 2^-24, so the sum is rounded
      return uint16_t(sign | (float_to_bits(step_aligned) - 0x3f000000u));
    }
    const uint32_t rounded = magnitude + 0xfffu + ((magnitude >> 13) & 1u); // to nearest, ties to even
    return uint16_t(sign | ((rounded - 0x38000000u) >> 13));
  }
};

static inline float load_scalar(const void *base, int32_t dtype, int64_t offset) {
  switch (dtype) {
  case FDM_FLOAT16:
    return Float16::load(static_cast<const uint16_t *>(base)[offset]);
  case FDM_BFLOAT16:
    return BFloat16::load(static_cast<const uint16_t *>(base)[offset]);
  default:
    return static_cast<const float *>(base)[offset];
  }
}

// Loads a number of a float32 or float64 tensor.
static inline double load_double(const void *base, int32_t dtype, int64_t offset) {
  return dtype == FDM_FLOAT64 ? static_cast<const double *>(base)[offset] : static_cast<const float *>(base)[offset];
}

static inline void store_scalar(void *base, int32_t dtype, int64_t offset, double value) {
  switch (dtype) {
  case FDM_FLOAT16:
    static_cast<uint16_t *>(base)[offset] = Float16::store(float(value));
    break;
  case FDM_BFLOAT16:
    static_cast<uint16_t *>(base)[offset] = BFloat16::store(float(value));
    break;
  case FDM_FLOAT64:
    static_cast<double *>(base)[offset] = value;
    break;
  default:
    static_cast<float *>(base)[offset] = float(value);
  }
}

} // namespace fdm::cpu
