// SPDX-License-Identifier: BSD-3-Clause
// A key is seen if the mask keeps it. Without a mask all keys are seen. The last and the first keys of a row are
// counted in seen keys.
#pragma once

#include "../tile/block_scan.cuh"
#include "candidates.cuh"

namespace fdm::cuda {

// 32 keys of a row: bits of the seen ones, and the number of seen keys before them.
struct SeenWord {
  uint32_t bits, before;
};

struct SeenKeys {
  const SeenWord *words; // null: all keys are seen
  int32_t keys;

  // The rank of a seen key among the seen keys, from 0.
  __device__ int32_t rank_of(int32_t key) const {
    if (words == nullptr) return key;
    const SeenWord word = words[key / 32];
    return static_cast<int32_t>(word.before + __popc(word.bits & ((1u << key % 32) - 1)));
  }

  // The seen key that comes `count` seen keys after a seen key; `keys` if there is none.
  __device__ int32_t key_after(int32_t key, int64_t count) const {
    const int64_t lower_bound = min64(key + count, keys);
    if (words == nullptr || count == 0 || lower_bound == keys) return static_cast<int32_t>(lower_bound);
    return key_of_rank(rank_of(key) + static_cast<int32_t>(count), static_cast<int32_t>(lower_bound));
  }

  // The seen key with a rank; `keys` if there is none. It is not below `lower_bound`. The search begins there, because
  // few keys are unseen, or the unseen ones lie together.
  __device__ int32_t key_of_rank(int32_t rank, int32_t lower_bound) const {
    if (words == nullptr) return min(rank, keys);
    const int32_t past = (keys + 31) / 32;
    int32_t low = lower_bound / 32, high = low + 1;
    if (low >= past) return keys;
    for (int32_t step = 1; high < past && words[high].before <= static_cast<uint32_t>(rank); step *= 2) {
      low = high;
      high = min(past, high + step);
    }
    while (high - low > 1) {
      const int32_t middle = low + (high - low) / 2;
      (words[middle].before <= static_cast<uint32_t>(rank) ? low : high) = middle;
    }
    const SeenWord word = words[low];
    uint32_t bits = word.bits;
    for (uint32_t skipped = rank - word.before; skipped > 0 && bits != 0; --skipped) bits &= bits - 1;
    return bits == 0 ? keys : 32 * low + __ffs(static_cast<int>(bits)) - 1;
  }
};

// Writes `count` words of the keys from `first` to before `past`. `before` seen keys precede them. Returns how many
// of them are seen. All threads of the block call this.
template <int kThreads, int kItemsPerThread>
__device__ uint32_t write_seen(SeenWord *words, int32_t count, BlockRanks<kThreads, kItemsPerThread> &ranks,
                               const KeyRow<uint8_t> &mask, int32_t first, int32_t past, uint32_t before) {
  bool seen[kItemsPerThread];
  uint32_t rank[kItemsPerThread];
#pragma unroll
  for (int i = 0; i < kItemsPerThread; ++i) {
    const int32_t key = first + i * kThreads + static_cast<int32_t>(threadIdx.x);
    seen[i] = key < past && mask.load(key) != 0;
  }
  const uint32_t total = ranks.rank(seen, rank);
#pragma unroll
  for (int i = 0; i < kItemsPerThread; ++i) {
    const int32_t word = i * (kThreads / 32) + warp_id();
    const uint32_t bits = __ballot_sync(kAllLanes, seen[i]);
    if (lane_id() == 0 && word < count) words[word] = {bits, before + rank[i]};
  }
  return total;
}

// The row at which a key leaves if it is kept up to the arrival of `key`, which may be past all keys.
__device__ __forceinline__ int64_t row_of_arrival(const Sequence &row, int64_t key) {
  return key >= row.k_count ? row.q_count : clamp64(key - row.causal_off, 0, row.q_count);
}

} // namespace fdm::cuda
