// SPDX-License-Identifier: BSD-3-Clause
// Finds which keys leave a causal window, and with which arrival, for a row of keys that a thread block holds.
//
// Keys arrive in order. A key leaves when the window-th better key arrives; if that key comes before it, it never
// enters. The keys are sorted, best first. The exit of the key of rank r is then the window-th smallest position
// among the first r keys. A wavelet matrix of the positions finds it in one step per bit of a position: each level
// divides the positions by a bit, zeros first, and stores how many ones come before each place.
#pragma once

#include "../tile/block_sort.cuh"

namespace fdm::cuda {

template <int kThreads, int kItemsPerThread> struct WindowExits {
  static constexpr int kKeys = kThreads * kItemsPerThread, kWords = kKeys / 32;
  static constexpr int kLevels = kKeys <= 512 ? 9 : (kKeys <= 1024 ? 10 : (kKeys <= 2048 ? 11 : 12));
  static_assert(kKeys <= 1 << kLevels && kLevels <= 16, "positions have 16 bits here");

  // 32 places of a level: bits of those with a 1, and the number of ones before them.
  struct Word {
    uint32_t bits, before;
  };
  struct Sorting {
    uint64_t items[kKeys];
    DigitRanks<kThreads, kItemsPerThread> ranks;
  };
  struct Dividing {
    Word words[kLevels][kWords + 1]; // the last one follows all places
    uint32_t zeros[kLevels];
    uint16_t positions[kKeys];
    int32_t exit[kKeys]; // of each key, for the caller
  };
  union Shared {
    Sorting sorting;
    Dividing dividing;
  };

  // The keys of this thread's ranks, i * kThreads + t.
  uint32_t key[kItemsPerThread];
  bool candidate[kItemsPerThread];

  // value[i] belongs to key i * kThreads + t. Larger values are better, ties go to the lower key, and 0 is never
  // selected. The lower `unused` bits are 0.
  __device__ void sort(Sorting &shared, const uint32_t (&value)[kItemsPerThread], int unused) {
    uint64_t item[kItemsPerThread];
#pragma unroll
    for (int i = 0; i < kItemsPerThread; ++i)
      item[i] = static_cast<uint64_t>(~value[i]) << 32 | (i * kThreads + threadIdx.x);
    shared.ranks.sort(item, shared.items, 32 + unused, 64);
#pragma unroll
    for (int i = 0; i < kItemsPerThread; ++i) {
      key[i] = static_cast<uint32_t>(item[i]);
      candidate[i] = static_cast<uint32_t>(item[i] >> 32) != ~0u;
    }
    __syncthreads();
  }

  // Each warp counts the ones of all groups of 32 places by itself, which takes one barrier less than shared sums.
  __device__ void divide(Dividing &shared) const {
    constexpr int kWarps = kThreads / 32, kPerLane = (kWords + 31) / 32;
    uint32_t position[kItemsPerThread];
#pragma unroll
    for (int i = 0; i < kItemsPerThread; ++i) position[i] = key[i];
    for (int level = 0; level < kLevels; ++level) {
      Word *words = shared.words[level];
      uint32_t bits[kItemsPerThread], count[kPerLane], ones = 0;
#pragma unroll
      for (int i = 0; i < kItemsPerThread; ++i) {
        bits[i] = __ballot_sync(kAllLanes, position[i] >> (kLevels - 1 - level) & 1);
        if (lane_id() == 0) words[i * kWarps + warp_id()].bits = bits[i];
      }
      __syncthreads();
#pragma unroll
      for (int n = 0; n < kPerLane; ++n) {
        const int word = n * 32 + lane_id();
        count[n] = word < kWords ? __popc(words[word].bits) : 0;
        ones += count[n];
      }
      ones = __reduce_add_sync(kAllLanes, ones);
#pragma unroll
      for (int i = 0; i < kItemsPerThread; ++i) {
        const int word_index = i * kWarps + warp_id();
        uint32_t before = 0;
#pragma unroll
        for (int n = 0; n < kPerLane; ++n) before += n * 32 + lane_id() < word_index ? count[n] : 0;
        before = __reduce_add_sync(kAllLanes, before);
        if (lane_id() == 0) words[word_index].before = before;
        const uint32_t ones_before = before + __popc(bits[i] & ((1u << lane_id()) - 1));
        const bool one = bits[i] >> lane_id() & 1;
        shared.positions[one ? kKeys - ones + ones_before : i * kThreads + threadIdx.x - ones_before] = position[i];
      }
      if (threadIdx.x == 0) {
        words[kWords] = {0, ones};
        shared.zeros[level] = kKeys - ones;
      }
      __syncthreads();
#pragma unroll
      for (int i = 0; i < kItemsPerThread; ++i) position[i] = shared.positions[i * kThreads + threadIdx.x];
    }
  }

  // The position of the key whose arrival drives key[i] out of a window of `size`. kKeys if it stays; at most key[i]
  // if it never enters.
  __device__ uint32_t exit_of(const Dividing &shared, int i, int64_t size) const {
    const uint32_t rank = i * kThreads + threadIdx.x;
    if (size == 0 || !candidate[i]) return 0;
    if (rank < size) return kKeys;
    uint32_t low = 0, high = rank, wanted = static_cast<uint32_t>(size) - 1, position = 0;
#pragma unroll
    for (int level = 0; level < kLevels; ++level) {
      const uint32_t ones_low = ones_before(shared, level, low), ones_high = ones_before(shared, level, high);
      const uint32_t zeros = high - low - (ones_high - ones_low);
      const bool one = wanted >= zeros;
      wanted -= one ? zeros : 0;
      low = one ? shared.zeros[level] + ones_low : low - ones_low;
      high = one ? shared.zeros[level] + ones_high : high - ones_high;
      position = 2 * position + one;
    }
    return position;
  }

private:
  __device__ static uint32_t ones_before(const Dividing &shared, int level, uint32_t place) {
    const Word word = shared.words[level][place / 32];
    return word.before + __popc(word.bits & ((1u << place % 32) - 1));
  }
};

} // namespace fdm::cuda
