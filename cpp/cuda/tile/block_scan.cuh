// SPDX-License-Identifier: BSD-3-Clause
// Prefix sums and order-preserving compaction over a thread block. All threads of the block must call them.
#pragma once

#include <cstdint>

namespace fdm::cuda {

constexpr uint32_t kAllLanes = 0xffffffffu;

__device__ __forceinline__ int lane_id() { return static_cast<int>(threadIdx.x % 32); }
__device__ __forceinline__ int warp_id() { return static_cast<int>(threadIdx.x / 32); }

__device__ __forceinline__ uint32_t warp_inclusive_sum(uint32_t value) {
#pragma unroll
  for (int distance = 1; distance < 32; distance *= 2) {
    const uint32_t below = __shfl_up_sync(kAllLanes, value, distance);
    if (lane_id() >= distance) value += below;
  }
  return value;
}

// Returns the sum over earlier threads. `total` becomes the sum over all.
template <int kThreads> struct BlockSum {
  static constexpr int kWarps = kThreads / 32;
  static_assert(kThreads % 32 == 0 && kWarps <= 32);
  uint32_t warp_sum[kWarps];

  __device__ uint32_t exclusive(uint32_t value, uint32_t *total) {
    const uint32_t inclusive = warp_inclusive_sum(value);
    __syncthreads(); // readers of an earlier call are done
    if (lane_id() == 31) warp_sum[warp_id()] = inclusive;
    __syncthreads();
    // Each warp scans the warp sums by itself. That is cheaper than a third barrier.
    const uint32_t sums = warp_inclusive_sum(lane_id() < kWarps ? warp_sum[lane_id()] : 0);
    *total = __shfl_sync(kAllLanes, sums, kWarps - 1);
    const uint32_t before = __shfl_sync(kAllLanes, sums, warp_id() > 0 ? warp_id() - 1 : 0);
    return inclusive - value + (warp_id() > 0 ? before : 0);
  }
};

// Ranks items of one or two classes in item order. Item i of thread t has number i * kThreads + t, so threads read
// consecutive items together. Two counts share a word: first | second << 16.
template <int kThreads, int kItemsPerThread> struct BlockRanks {
  static constexpr int kWarps = kThreads / 32, kCounts = kWarps * kItemsPerThread, kPerLane = (kCounts + 31) / 32;
  static_assert(kThreads % 32 == 0 && kThreads * kItemsPerThread <= 0xffff);
  uint32_t base[kCounts + 1];

  __device__ static uint32_t first_of(uint32_t packed) { return packed & 0xffffu; }
  __device__ static uint32_t second_of(uint32_t packed) { return packed >> 16; }

  // Sets rank[i] to the number of items of each class before item i. Returns the totals. Both are packed.
  __device__ uint32_t rank(const bool (&first)[kItemsPerThread], const bool (&second)[kItemsPerThread],
                           uint32_t (&rank)[kItemsPerThread]) {
    const uint32_t below = (1u << lane_id()) - 1;
    __syncthreads(); // readers of an earlier call are done
#pragma unroll
    for (int i = 0; i < kItemsPerThread; ++i) {
      const uint32_t a = __ballot_sync(kAllLanes, first[i]), b = __ballot_sync(kAllLanes, second[i]);
      rank[i] = __popc(a & below) | __popc(b & below) << 16;
      if (lane_id() == 0) base[i * kWarps + warp_id()] = __popc(a) | __popc(b) << 16;
    }
    __syncthreads();
    if (warp_id() == 0) scan_base();
    __syncthreads();
#pragma unroll
    for (int i = 0; i < kItemsPerThread; ++i) rank[i] += base[i * kWarps + warp_id()];
    return base[kCounts];
  }

  // The same for one class. Ranks and total are not packed.
  __device__ uint32_t rank(const bool (&chosen)[kItemsPerThread], uint32_t (&ranks)[kItemsPerThread]) {
    const bool none[kItemsPerThread] = {};
    return rank(chosen, none, ranks);
  }

private:
  __device__ void scan_base() {
    uint32_t count[kPerLane], sum = 0;
#pragma unroll
    for (int n = 0; n < kPerLane; ++n) {
      const int position = lane_id() * kPerLane + n;
      count[n] = position < kCounts ? base[position] : 0;
      sum += count[n];
    }
    uint32_t before = warp_inclusive_sum(sum) - sum;
    __syncwarp();
#pragma unroll
    for (int n = 0; n < kPerLane; ++n) {
      const int position = lane_id() * kPerLane + n;
      if (position < kCounts) base[position] = before;
      before += count[n];
    }
    if (lane_id() == 31) base[kCounts] = before;
  }
};

} // namespace fdm::cuda
