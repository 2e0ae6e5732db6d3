// SPDX-License-Identifier: BSD-3-Clause
// Finds which keys leave a causal window, and with which arrival, for a row of few keys that a thread block holds.
// The result equals that of window_exits.cuh, in fewer steps if there are few chunks.
//
// Each warp has a chunk of 64 keys and sorts it by itself. A key leaves when the window-th better key arrives.
// Lookups in the sorted chunks tell how many keys of each are better. This gives the chunk of the wanted key, and the
// rank of that key by position among the chunk's better keys. These are the first n of the sorted chunk, and a word
// of 64 bits for each n has their places.
#pragma once

#include "../tile/block_scan.cuh"

namespace fdm::cuda {

// Order has the 16 or 32 bits of a value above those of a position.
template <class Order, int kThreads> struct ChunkExits {
  static constexpr int kChunkKeys = 64, kChunks = kThreads / 32, kKeys = kChunks * kChunkKeys;
  static constexpr int kBuckets = 8, kBucketKeys = kChunkKeys / kBuckets;
  static constexpr Order kPositions = sizeof(Order) == 4 ? Order{0xffff} : Order{0xffffffff};
  static_assert(kKeys <= 0xffff);

  struct Shared {
    alignas(16) Order sorted[kChunks][kChunkKeys]; // the best first
    alignas(16) Order last[kChunks][kBuckets];     // the last of each bucket of a sorted chunk
    uint64_t places[kChunks][kChunkKeys + 1];      // [n]: bits of the first n keys of a sorted chunk
    int32_t exit[kKeys];                           // of each key
  };

  // value(j) is that of key j. Larger values are better, ties go to the lower key, and 0 is never selected. With 32
  // bits of Order the lower 16 bits of values are 0. exit[j] becomes the key whose arrival drives key j out of a
  // window of `size`: kKeys if it stays; at most j if it never enters. The caller synchronizes the block before it
  // reads exits.
  template <class Value> __device__ static void find(Shared &shared, int64_t size, const Value &value) {
    Order order[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int32_t j = warp_id() * kChunkKeys + i * 32 + lane_id();
      order[i] = Order{value(j)} << (sizeof(Order) == 4 ? 0 : 32) | (kPositions - Order(j));
    }
    sort(order);
    share(shared, order);
    __syncthreads();
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const auto j = static_cast<int32_t>(kPositions - (order[i] & kPositions));
      const bool candidate = (order[i] & ~kPositions) != 0;
      shared.exit[j] = size == 0 || !candidate ? 0 : exit_of(shared, order[i], 32 * i + lane_id(), size);
    }
  }

private:
  // A bitonic sort; item i of a lane is number 32 * i + lane.
  __device__ static void sort(Order (&order)[2]) {
#pragma unroll
    for (int length = 2; length <= kChunkKeys; length *= 2)
#pragma unroll
      for (int distance = length / 2; distance > 0; distance /= 2) {
        if (distance == 32) {
          const Order first = max(order[0], order[1]);
          order[1] = min(order[0], order[1]);
          order[0] = first;
          continue;
        }
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const int number = 32 * i + lane_id();
          const Order other = __shfl_xor_sync(kAllLanes, order[i], distance);
          const bool falls = (number & length) == 0, first = (number & distance) == 0;
          order[i] = falls == first ? max(order[i], other) : min(order[i], other);
        }
      }
  }

  __device__ static void share(Shared &shared, const Order (&order)[2]) {
    uint64_t before = 0;
    if (lane_id() == 0) shared.places[warp_id()][0] = 0;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int number = 32 * i + lane_id();
      shared.sorted[warp_id()][number] = order[i];
      if (number % kBucketKeys == kBucketKeys - 1) shared.last[warp_id()][number / kBucketKeys] = order[i];
      uint64_t places = uint64_t{1} << static_cast<uint32_t>((kPositions - order[i]) & (kChunkKeys - 1));
#pragma unroll
      for (int distance = 1; distance < 32; distance *= 2) {
        const uint64_t below = __shfl_up_sync(kAllLanes, places, distance);
        if (lane_id() >= distance) places |= below;
      }
      places |= before;
      before = __shfl_sync(kAllLanes, places, 31);
      shared.places[warp_id()][number + 1] = places;
    }
  }

  // How many of the first seven items are larger than `order`. Items are in descending order.
  __device__ static int count_larger(const Order (&sorted)[8], Order order) {
    const bool four = sorted[3] > order;
    const bool two = (four ? sorted[5] : sorted[1]) > order;
    const bool one = (four ? (two ? sorted[6] : sorted[4]) : (two ? sorted[2] : sorted[0])) > order;
    return 4 * four + 2 * two + one;
  }

  // How many keys of a sorted chunk are better.
  __device__ static int count_better(const Shared &shared, int chunk, Order order) {
    struct alignas(16) Eight {
      Order keys[8];
    };
    static_assert(kBuckets == 8 && kBucketKeys == 8);
    const Eight last = *reinterpret_cast<const Eight *>(shared.last[chunk]);
    const int bucket = count_larger(last.keys, order);
    const Eight eight = *reinterpret_cast<const Eight *>(&shared.sorted[chunk][bucket * kBucketKeys]);
    return bucket * kBucketKeys + count_larger(eight.keys, order) + (eight.keys[7] > order);
  }

  __device__ static int32_t exit_of(const Shared &shared, Order order, int own_place, int64_t size) {
    const int wanted = static_cast<int>(min(size, int64_t{kKeys + 1}));
    int total = 0, chunk = -1, count = 0, missing = 0;
#pragma unroll 2
    for (int c = 0; c < kChunks; ++c) {
      const int found = c == warp_id() ? own_place : count_better(shared, c, order);
      if (total < wanted && total + found >= wanted) {
        chunk = c;
        count = found;
        missing = wanted - total;
      }
      total += found;
    }
    if (chunk < 0) return kKeys;
    return chunk * kChunkKeys + place_of(shared.places[chunk][count], missing);
  }

  // The place of the n-th set bit, counted from 1.
  __device__ static int place_of(uint64_t bits, int n) {
    auto word = static_cast<uint32_t>(bits);
    int place = 0;
    if (n > __popc(word)) {
      n -= __popc(word);
      word = static_cast<uint32_t>(bits >> 32);
      place = 32;
    }
#pragma unroll
    for (int width = 16; width > 0; width /= 2) {
      const int low = __popc(word & ((1u << width) - 1));
      if (n <= low) continue;
      n -= low;
      word >>= width;
      place += width;
    }
    return place;
  }
};

} // namespace fdm::cuda
