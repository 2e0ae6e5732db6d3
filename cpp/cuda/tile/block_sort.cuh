// SPDX-License-Identifier: BSD-3-Clause
// A radix sort over a thread block, and its single pass: stable ranks of items by a digit. All threads must call
// them.
#pragma once

#include "block_scan.cuh"

namespace fdm::cuda {

// Item i of thread t has number i * kThreads + t.
template <int kThreads, int kItemsPerThread> struct DigitRanks {
  static constexpr int kDigitBits = 4, kDigits = 1 << kDigitBits;
  static constexpr int kGroups = kThreads / 32 * kItemsPerThread, kCounts = kDigits * kGroups,
                       kCountsPerThread = kCounts / kThreads;
  static_assert(kCounts % kThreads == 0);

  uint32_t counts[kCounts]; // [digit][group of 32 items]: the items that precede the digit's items of the group
  BlockSum<kThreads> sum;

  // Sets rank[i] to the position of item i in a stable sort by digit.
  __device__ void rank(const uint32_t (&digit)[kItemsPerThread], uint32_t (&rank)[kItemsPerThread]) {
    uint32_t peers[kItemsPerThread];
#pragma unroll
    for (int i = 0; i < kItemsPerThread; ++i) peers[i] = __match_any_sync(kAllLanes, digit[i]);
    __syncthreads(); // readers of an earlier call are done
#pragma unroll
    for (int n = 0; n < kCountsPerThread; ++n) counts[n * kThreads + threadIdx.x] = 0;
    __syncthreads();
    const uint32_t below = (1u << lane_id()) - 1;
#pragma unroll
    for (int i = 0; i < kItemsPerThread; ++i)
      if ((peers[i] & below) == 0) counts[count_index(digit[i], i)] = __popc(peers[i]);
    __syncthreads();
    uint32_t thread_counts[kCountsPerThread], total = 0, all;
#pragma unroll
    for (int n = 0; n < kCountsPerThread; ++n) {
      thread_counts[n] = counts[threadIdx.x * kCountsPerThread + n];
      total += thread_counts[n];
    }
    uint32_t before = sum.exclusive(total, &all);
#pragma unroll
    for (int n = 0; n < kCountsPerThread; ++n) {
      counts[threadIdx.x * kCountsPerThread + n] = before;
      before += thread_counts[n];
    }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < kItemsPerThread; ++i) rank[i] = counts[count_index(digit[i], i)] + __popc(peers[i] & below);
  }

  // Stable sort of the items by bits [first, past), rounded up to whole digits. `shared` holds all items.
  __device__ void sort(uint64_t (&item)[kItemsPerThread], uint64_t (&shared)[kThreads * kItemsPerThread], int first,
                       int past) {
    for (int shift = first; shift < past; shift += kDigitBits) {
      uint32_t digit[kItemsPerThread], ranks[kItemsPerThread];
#pragma unroll
      for (int i = 0; i < kItemsPerThread; ++i) digit[i] = static_cast<uint32_t>(item[i] >> shift) % kDigits;
      rank(digit, ranks);
#pragma unroll
      for (int i = 0; i < kItemsPerThread; ++i) shared[ranks[i]] = item[i];
      __syncthreads();
#pragma unroll
      for (int i = 0; i < kItemsPerThread; ++i) item[i] = shared[i * kThreads + threadIdx.x];
    }
  }

private:
  __device__ static int count_index(uint32_t digit, int item) {
    return digit * kGroups + item * (kThreads / 32) + warp_id();
  }
};

} // namespace fdm::cuda
