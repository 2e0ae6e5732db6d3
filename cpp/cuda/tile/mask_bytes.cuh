// SPDX-License-Identifier: BSD-3-Clause
// Mask booleans, four at a time.
#pragma once

#include <cstdint>

#include "../plan/plan.cuh"

namespace fdm::cuda {

// Returns the upper bit of each of four bytes that is not 0. Booleans that are views of other integers may have any
// bits set.
__device__ __forceinline__ uint32_t upper_bits(uint32_t bytes) {
  constexpr uint32_t kLower = 0x7f7f7f7fu;
  return (((bytes & kLower) + kLower) | bytes) & ~kLower;
}

// `word`: one load, if all four booleans exist, `col` is 1 and `first` is a multiple of four.
enum class MaskLoad { bytes, word };

// Loads four booleans, `col` bytes apart; those from `keys` on are 0.
template <MaskLoad kLoad> __device__ __forceinline__ uint32_t load_mask(const uint8_t *first, int64_t col, int keys) {
  if constexpr (kLoad == MaskLoad::word) return __ldcs(reinterpret_cast<const uint32_t *>(first));
  uint32_t bytes = 0;
#pragma unroll
  for (int k = 0; k < kMaskBytes; ++k)
    if (k < keys) bytes |= static_cast<uint32_t>(__ldg(first + k * col)) << (8 * k);
  return bytes;
}

} // namespace fdm::cuda
