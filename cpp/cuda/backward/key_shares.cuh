// SPDX-License-Identifier: BSD-3-Clause
// The shares of a persistent key-stationary kernel. The steps of all blocks of keys, one block after the other, are cut
// into shares of equal length, one for each block of threads, so that all end together. A block of keys that lies in
// several shares is summed from parts, which key_sum.cu adds in order. No kernel has to divide the work before.
#pragma once

#include "key_blocks.cuh"

namespace fdm::cuda {

// The blocks of keys as shares count them: those of a head that have keys, one after the other, then the next head's.
struct KeyBlockList {
  const BackwardParams &params;

  // Of a head: the blocks that have keys.
  __device__ int32_t blocks(int64_t head) const {
    const KeyWork &keys = params.keys;
    const KeyBlockPlace place = key_block_place(params, head);
    if (!keys.listed) return static_cast<int32_t>(ceil_div(place.s.k_count, keys.block_keys));
    const int32_t rest = place.kept % kBucketKeys;
    return place.kept / kBucketKeys * (kBucketKeys / keys.block_keys) + (rest + keys.block_keys - 1) / keys.block_keys;
  }
  // The number of block m of a head, as KeyItem has it.
  __device__ int32_t number(int64_t head, int32_t m) const {
    const KeyWork &keys = params.keys;
    const int32_t of_bucket = kBucketKeys / keys.block_keys;
    const int32_t block = keys.listed ? m % of_bucket * keys.buckets + m / of_bucket : m;
    return static_cast<int32_t>(int64_t(block) * keys.heads + head);
  }
  __device__ int64_t steps(int32_t number) const {
    return key_steps(params, key_block_rows(params, key_block_place(params, number))).count;
  }

  // Calls function(head, m, steps) for the blocks that have keys, from `first` to `past` in an order in which every head
  // has as many.
  template <class Function> __device__ void for_each(int64_t first, int64_t past, const Function &function) const {
    const int64_t of_head = params.keys.blocks;
    for (int64_t n = first; n < past;) {
      const int64_t head = n / of_head, end = min64(blocks(head), past - head * of_head);
      for (int64_t m = n - head * of_head; m < end; ++m) function(head, int32_t(m), steps(number(head, int32_t(m))));
      n = (head + 1) * of_head;
    }
  }
};

// The share of a block of threads, and the block of keys that comes next in it.
struct KeyShare {
  int64_t length, begin, end; // of all shares; of this one: none where end <= begin
  int64_t position;           // where the block begins
  int64_t head;
  int32_t block;
};

// A part of a block of keys: the steps from `begin` to `end`.
struct KeyPart {
  KeyItem item;
  int64_t begin, end;
  bool valid; // if not, the share has no more parts
};

template <int kThreads> struct KeyShareFinder {
  int64_t warps[kThreads / 32];

  // All threads of the block call this. The share can be read after the next barrier.
  __device__ void find(const BackwardParams &params, KeyShare &share) {
    const KeyBlockList list{params};
    const int64_t count = int64_t(params.keys.blocks) * params.keys.heads, each = ceil_div(count, kThreads);
    const int64_t first = min64(count, threadIdx.x * each), past = min64(count, first + each);
    int64_t own = 0;
    list.for_each(first, past, [&](int64_t, int32_t, int64_t steps) { own += kBlockSteps + steps; });
    int64_t position = own;
#pragma unroll
    for (int distance = 1; distance < 32; distance *= 2) {
      const int64_t other = __shfl_up_sync(0xffffffffu, position, distance);
      if (int(threadIdx.x % 32) >= distance) position += other;
    }
    if (threadIdx.x % 32 == 31) warps[threadIdx.x / 32] = position;
    position -= own;
    __syncthreads();
    int64_t all = 0;
    for (int warp = 0; warp < kThreads / 32; ++warp) {
      if (warp == int(threadIdx.x / 32)) position += all;
      all += warps[warp];
    }
    const int64_t length = max64(kLeastSteps, ceil_div(all, gridDim.x)), begin = blockIdx.x * length;
    const int64_t end = min64(all, begin + length);
    if (threadIdx.x == 0 && end <= begin) share = {};
    if (begin < position || begin >= position + own || end <= begin) return;
    list.for_each(first, past, [&](int64_t head, int32_t block, int64_t steps) {
      if (begin >= position && begin < position + kBlockSteps + steps)
        share = {length, begin, end, position, head, block};
      position += kBlockSteps + steps;
    });
  }
};

// Takes the next part from a share. One thread calls this: what is known of a share is in shared memory, and no register
// holds it while a part is loaded.
__device__ inline KeyPart next_part(const BackwardParams &params, KeyShare &share) {
  const KeyBlockList list{params};
  for (; share.position < share.end; ++share.head, share.block = 0) {
    for (const int32_t blocks = list.blocks(share.head); share.block < blocks && share.position < share.end;) {
      const int32_t number = list.number(share.head, share.block++);
      const int64_t steps = list.steps(number), position = share.position, first_step = position + kBlockSteps;
      share.position = first_step + steps;
      const int64_t begin = clamp64(share.begin - first_step, 0, steps);
      const int64_t end = clamp64(share.end - first_step, 0, steps);
      const bool whole = begin == 0 && end == steps;
      if (whole && (steps > 0 || position >= share.begin)) return {{number, 0, 1, 0}, begin, end, true};
      if (whole || begin >= end) continue;
      // The parts of a block are those of consecutive shares. No two blocks have the same slots, since the next one
      // that is divided has its first part in the last of these shares, or later.
      const int64_t first_share = first_step / share.length, last_share = (first_step + steps - 1) / share.length;
      return {
          {number, int32_t(blockIdx.x - first_share), int32_t(last_share - first_share + 1), int32_t(2 * first_share)},
          begin,
          end,
          true};
    }
  }
  return {};
}

} // namespace fdm::cuda
