// SPDX-License-Identifier: BSD-3-Clause
// Radix selection by a thread block: the `count` best candidates among the first keys of a row.
//
// Each pass counts the keys by their next 11 bits, among those that agree with the bits already decided, and finds
// the digit of the last selected key. Many digits spread the counting over many addresses: 11 bits of a float
// distinguish a quarter of an octave. If only some of the keys of equal value are selected, a last pass finds the
// highest index among them.
#pragma once

#include "../tile/block_scan.cuh"
#include "candidates.cuh"

namespace fdm::cuda {

template <int kThreads> struct RadixSelect {
  static constexpr int kDigitBits = 11, kDigits = 1 << kDigitBits, kDigitsPerThread = kDigits / kThreads;
  static constexpr int kWarps = kThreads / 32, kLoadsInFlight = 8;
  static_assert(kDigits % kThreads == 0);

  struct Shared {
    uint32_t digits[kDigits]; // key counts by digit, the largest digit first
    BlockSum<kThreads> sum;
    uint32_t digit, remaining, equal;
    uint32_t warp_equal[kWarps];
    int32_t last;
  };

  // Returns the window to all threads.
  template <class RankedKeys>
  static __device__ Window select(Shared &shared, const RankedKeys &candidates, int32_t keys, int64_t count) {
    if (count == 0) return closed_window();
    uint32_t decided = 0, remaining = static_cast<uint32_t>(min64(count, keys));
    for (int above = 32, shift; above > 32 - RankedKeys::kBits; above = shift) { // bits from `above` on are decided
      shift = max(0, above - kDigitBits);
      count_digits(shared, candidates, keys, shift, decided, above);
      if (above == 32) {
        const uint32_t candidates = total(shared);
        if (candidates <= count) return open_window(static_cast<int32_t>(candidates));
      }
      find_digit(shared, remaining);
      decided |= shared.digit << shift;
      remaining = shared.remaining;
      // All keys that agree so far are selected, so their other bits do not matter.
      if (shared.equal == remaining) return {decided, keys - 1, static_cast<int32_t>(count)};
    }
    return {decided, find_last(shared, candidates, keys, decided, remaining), static_cast<int32_t>(count)};
  }

  // Returns to all threads the last of the first `wanted` keys that a mask keeps. -1 if `wanted` is 0, and keys - 1
  // if the mask keeps at most `wanted` keys.
  static __device__ int32_t last_seen(Shared &shared, const KeyRow<uint8_t> &mask, int32_t keys, int64_t wanted) {
    if (wanted <= 0) return -1;
    if (wanted >= count_seen(shared, mask, keys)) return keys - 1;
    return find_last(
        shared, [&](int32_t j) { return uint32_t{mask.load(j) != 0}; }, keys, 1, static_cast<uint32_t>(wanted));
  }

  // Returns to all threads how many keys a mask keeps.
  static __device__ uint32_t count_seen(Shared &shared, const KeyRow<uint8_t> &mask, int32_t keys) {
    uint32_t thread_seen = 0, total;
    visit_keys([&](int32_t j) { return uint32_t{mask.load(j) != 0}; }, threadIdx.x, keys, kThreads,
               [&](uint32_t seen) { thread_seen += seen; });
    shared.sum.exclusive(thread_seen, &total);
    return total;
  }

  // Returns the sum of the counts of all digits to all threads.
  static __device__ uint32_t total(Shared &shared) {
    uint32_t thread_sum = 0, sum;
    for (int d = threadIdx.x; d < kDigits; d += kThreads) thread_sum += shared.digits[d];
    shared.sum.exclusive(thread_sum, &sum);
    return sum;
  }

  // Finds the digit of the remaining-th key, how many of its keys are still wanted, and how many keys it has. All
  // threads may read these in `shared` afterwards.
  static __device__ void find_digit(Shared &shared, uint32_t remaining) {
    uint32_t thread_sum = 0, sum;
#pragma unroll
    for (int n = 0; n < kDigitsPerThread; ++n) thread_sum += shared.digits[threadIdx.x * kDigitsPerThread + n];
    uint32_t before = shared.sum.exclusive(thread_sum, &sum);
    if (before < remaining && before + thread_sum >= remaining) {
      int d = threadIdx.x * kDigitsPerThread;
      for (; before + shared.digits[d] < remaining; ++d) before += shared.digits[d];
      shared.digit = kDigits - 1 - d;
      shared.remaining = remaining - before;
      shared.equal = shared.digits[d];
    }
    __syncthreads();
  }

private:
  // Calls visit(value) for the keys begin, begin + step, ... below `end`, several loads at a time. Pads the last with
  // 0.
  template <class RankedKeys, class Visit>
  static __device__ void visit_keys(const RankedKeys &candidates, int32_t begin, int32_t end, int step,
                                    const Visit &visit) {
    for (; begin < end; begin += kLoadsInFlight * step) {
      uint32_t value[kLoadsInFlight];
#pragma unroll
      for (int n = 0; n < kLoadsInFlight; ++n) value[n] = begin + n * step < end ? candidates(begin + n * step) : 0;
#pragma unroll
      for (int n = 0; n < kLoadsInFlight; ++n) visit(value[n]);
    }
  }

  // Counts by digit the keys that agree with the decided bits.
  template <class RankedKeys>
  static __device__ void count_digits(Shared &shared, const RankedKeys &candidates, int32_t keys, int shift,
                                      uint32_t decided, int above) {
    __syncthreads(); // readers of the previous pass are done
    for (int d = threadIdx.x; d < kDigits; d += kThreads) shared.digits[d] = 0;
    __syncthreads();
    const uint32_t decided_mask = above == 32 ? 0 : ~0u << above, digit_mask = ~decided_mask >> shift;
    visit_keys(candidates, threadIdx.x, keys, kThreads, [&](uint32_t value) {
      if (value != 0 && (value & decided_mask) == decided)
        atomicAdd(&shared.digits[kDigits - 1 - (value >> shift & digit_mask)], 1u);
    });
    __syncthreads();
  }

  // Finds the index of the wanted-th key of a value. Each warp counts a part of the row, then one searches its part.
  template <class RankedKeys>
  static __device__ int32_t find_last(Shared &shared, const RankedKeys &candidates, int32_t keys, uint32_t value,
                                      uint32_t wanted) {
    const int32_t part = (keys / kWarps + 32) / 32 * 32; // at least keys / kWarps, rounded up
    const int32_t begin = min(keys, warp_id() * part), end = min(keys, begin + part);
    uint32_t equal_keys = 0;
    visit_keys(candidates, begin + lane_id(), end, 32, [&](uint32_t v) { equal_keys += v == value; });
    equal_keys = __reduce_add_sync(kAllLanes, equal_keys);
    if (lane_id() == 0) shared.warp_equal[warp_id()] = equal_keys;
    __syncthreads();
    uint32_t before = 0;
    for (int w = 0; w < warp_id(); ++w) before += shared.warp_equal[w];
    if (before < wanted && before + equal_keys >= wanted) {
      for (int32_t first = begin; first < end && before < wanted; first += 32) {
        const int32_t j = first + lane_id();
        uint32_t found = __ballot_sync(kAllLanes, j < end && candidates(j) == value);
        for (; found && before < wanted; found &= found - 1)
          if (++before == wanted && lane_id() == 0) shared.last = first + __ffs(found) - 1;
      }
    }
    __syncthreads();
    return shared.last;
  }
};

} // namespace fdm::cuda
