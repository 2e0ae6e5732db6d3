// SPDX-License-Identifier: BSD-3-Clause
// Where one query row reads a mask of keys, and nobody else does, a plan would be read once: a block of threads lists the
// kept keys of its part itself, some thousand at a time.
#pragma once

#include "../plan/plan.cuh"
#include "../tile/block_scan.cuh"
#include "../tile/mask_bytes.cuh"

namespace fdm::cuda {

template <int kThreads> struct KeptKeys {
  static constexpr int kLoads = 8, kWarpKeys = 32 * kMaskBytes * kLoads; // loads that a thread has under way
  static constexpr int kMost = kThreads / 32 * kWarpKeys;                // keys that are looked through at a time
  int32_t keys[kMost];
  BlockSum<kThreads> sums;

  // Lists those of the keys [first, past), at most kMost, that a row of booleans keeps, and returns how many they are. A
  // thread has four consecutive keys of each load, and what it finds lies side by side. All threads call this; the list is
  // there when they have met again.
  __device__ int32_t find(const Matrix &mask, int32_t first, int32_t past) {
    const auto *const bytes = static_cast<const uint8_t *>(mask.base);
    const int32_t own = first + warp_id() * kWarpKeys + lane_id() * kMaskBytes;
    const bool wide = mask.col == 1 && reinterpret_cast<uintptr_t>(bytes + first) % kMaskBytes == 0;
    uint32_t kept = 0; // bit 8 b + i: key b of load i
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      const int32_t key = own + i * 32 * kMaskBytes, left = past - key;
      uint32_t four = 0;
      if (wide && left >= kMaskBytes)
        four = load_mask<true>(bytes + key, 1, kMaskBytes);
      else if (left > 0)
        four = load_mask<false>(bytes + key * mask.col, mask.col, left);
      kept |= upper_bits(four) >> (7 - i);
    }
    uint32_t total, place = sums.exclusive(__popc(kept), &total); // readers of an earlier list are done
    for (; kept != 0; kept &= kept - 1) {
      const int n = __ffs(static_cast<int>(kept)) - 1;
      keys[place++] = own + n % 8 * 32 * kMaskBytes + n / 8;
    }
    return static_cast<int32_t>(total);
  }
};

} // namespace fdm::cuda
