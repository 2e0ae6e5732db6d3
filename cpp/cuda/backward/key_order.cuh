// SPDX-License-Identifier: BSD-3-Clause
// Orders the kept keys of interval plans so that similar rows keep the keys of a block.
//
// The kept keys of a list are in key order and are divided into buckets. Within a bucket, keys with the latest end
// come first, ties by position. Then each chunk of kChunkKeys keys is put back into key order. With causal selection,
// the keys of a chunk end within a few rows of each other, and the keys of a block of the chunk also start within a
// few rows: of the pairs of 64 keys and the rows that keep any of them, 75 to 80 % are kept (simulated for random
// biases, N 8192 to 32768).
#pragma once

#include "../tile/block_sort.cuh"
#include "key_blocks.cuh"

namespace fdm::cuda {

// A thread block orders a bucket.
template <int kThreads> struct KeyOrder {
  static constexpr int kItemsPerThread = kBucketKeys / kThreads, kChunkKeys = 256, kMaxBlocks = kBucketKeys / 32;
  using Ranks = DigitRanks<kThreads, kItemsPerThread>;
  static_assert(kBucketKeys % kThreads == 0 && kBucketKeys / kChunkKeys <= Ranks::kDigits);

  struct Shared {
    Ranks ranks;
    uint64_t items[kBucketKeys];
    uint8_t chunk[kBucketKeys]; // of each position
    int32_t first[kMaxBlocks], past[kMaxBlocks];
  };

  Shared &shared;

  __device__ void run(const BackwardParams &params, int64_t number) const {
    const fdm_problem &p = params.p;
    const KeyWork &keys = params.keys;
    const Plan &plan = params.plan;
    const int64_t bucket = number % keys.buckets, list_sequence = number / keys.buckets;
    const int64_t sequences = list_sequences(p), list = list_sequence / sequences;
    const Sequence s = sequence(p, list_sequence % sequences);
    const int64_t base = list * plan.list_keys + s.k_begin + bucket * kBucketKeys;
    const auto count = static_cast<int32_t>(min64(kBucketKeys, plan.kept_count[list_sequence] - bucket * kBucketKeys));
    if (count <= 0) return;
    if (static_cast<int>(threadIdx.x) < kMaxBlocks) {
      shared.first[threadIdx.x] = INT32_MAX;
      shared.past[threadIdx.x] = -1;
    }
    sort_by_end(plan.kept_end + base, count, static_cast<uint32_t>(s.q_count));
    uint32_t chunk[kItemsPerThread], rank[kItemsPerThread];
#pragma unroll
    for (int i = 0; i < kItemsPerThread; ++i) chunk[i] = shared.chunk[i * kThreads + threadIdx.x];
    shared.ranks.rank(chunk, rank);
#pragma unroll
    for (int i = 0; i < kItemsPerThread; ++i) {
      const int32_t position = i * kThreads + static_cast<int32_t>(threadIdx.x);
      if (position >= count) continue;
      const KeyRows rows{plan.kept_index[base + position], plan.kept_start[base + position],
                         plan.kept_end[base + position], -1};
      keys.ordered[base + rank[i]] = rows;
      const int block = static_cast<int>(rank[i]) / keys.block_keys;
      atomicMin(&shared.first[block], rows.start);
      atomicMax(&shared.past[block], rows.end);
    }
    __syncthreads();
    const auto block = static_cast<int>(threadIdx.x);
    if (block * keys.block_keys < count)
      keys.ranges[list_sequence * keys.blocks + block * keys.buckets + bucket] = {shared.first[block],
                                                                                  shared.past[block]};
  }

private:
  // Finds the chunk of each position. Positions past the last key come last.
  __device__ void sort_by_end(const int32_t *end, int32_t count, uint32_t queries) const {
    uint64_t item[kItemsPerThread];
#pragma unroll
    for (int i = 0; i < kItemsPerThread; ++i) {
      const int32_t position = i * kThreads + static_cast<int32_t>(threadIdx.x);
      const uint32_t rows_after_end = position < count ? queries - static_cast<uint32_t>(end[position]) : queries;
      item[i] = static_cast<uint64_t>(rows_after_end) * kBucketKeys + position;
    }
    const int bits = 32 - __clz(queries);
    constexpr int kPositionBits = 11;
    static_assert(1 << kPositionBits == kBucketKeys);
    shared.ranks.sort(item, shared.items, kPositionBits, kPositionBits + bits);
#pragma unroll
    for (int i = 0; i < kItemsPerThread; ++i)
      shared.chunk[item[i] % kBucketKeys] = static_cast<uint8_t>((i * kThreads + threadIdx.x) / kChunkKeys);
    __syncthreads();
  }
};

} // namespace fdm::cuda
