// SPDX-License-Identifier: BSD-3-Clause
// The sources of a bias, and how warps divide them and their rows or keys.
#pragma once

#include "../../indexing.h"
#include "../tile/shared_tile.cuh"
#include "dense.h"

namespace fdm::cuda {

// A query head of a sequence.
struct Source {
  int64_t batch;
  int64_t head;
  bool exists;
};

// Source `index` of the bias (unit / heads of the bias, unit % heads of the bias).
__device__ __forceinline__ Source source_of(const DenseCall &call, int unit, int64_t index) {
  const int bias_heads = int(call.p.bias.shape[1]);
  const int first_batch = unit / bias_heads, first_head = unit % bias_heads * call.heads;
  const auto number = static_cast<uint32_t>(index), heads = static_cast<uint32_t>(call.heads);
  return {first_batch + number / heads, first_head + number % heads, index < int64_t(call.batches) * call.heads};
}

__device__ __forceinline__ Sequence dense_sequence(const fdm_problem &p, int64_t batch) {
  return {batch, 0, p.queries, 0, p.keys, p.keys - p.queries};
}

// Where the rows of a slot begin in a tensor, and how many there are.
struct SlotRows {
  const uint16_t *first;
  int count;
};

// The sources of a block, and the addresses of their first rows, in shared memory. kTensors are those that it copies.
template <int kMostSlots, int kTensors> struct SlotTable {
  Source source[kMostSlots];
  const uint16_t *first[kTensors][kMostSlots];

  // The rows of tensor `which` from `row` on, at most `count` of the `total`.
  __device__ __forceinline__ SlotRows rows(int which, int slot, const fdm_tensor &t, int64_t row, int64_t total,
                                           int count) const {
    const int there = int(clamp64(total - row, 0, count));
    return {first[which][slot] + row * t.stride[1], source[slot].exists ? there : 0};
  }
  __device__ __forceinline__ void set(int which, int slot, const fdm_tensor &t, int64_t head) {
    first[which][slot] =
        static_cast<const uint16_t *>(t.data) + source[slot].batch * t.stride[0] + head * t.stride[2];
  }
};

// Starts the copies of `count` rows for each slot to a tile, those of slot n from n * count on. rows_of(n) gives the
// SlotRows of a slot. Where rows cannot be copied 16 bytes at a time, elements are stored one by one. That loop is not
// unrolled, and no call: a call in the mainloop would cost it registers.
template <class Tile, int kThreads, class RowsOf>
__device__ __forceinline__ void copy_slot_rows(uint32_t base, int slots, int count, bool aligned, int head_dim,
                                               int64_t row_stride, int64_t stride, const RowsOf &rows_of) {
  constexpr int kAcross = Tile::kPitch / 8, kDown = kThreads / kAcross; // threads of a row, and rows at a time
  const int chunk = threadIdx.x % kAcross, first = threadIdx.x / kAcross;
#pragma unroll 1
  for (int slot = 0; slot < slots; ++slot) {
    const SlotRows rows = rows_of(slot);
    if (aligned) {
      const uint16_t *source = rows.first + first * row_stride + chunk * 8;
      const bool exists = chunk * 8 < head_dim;
#pragma unroll
      for (int r = first; r < count; r += kDown) {
        if (chunk < Tile::kChunks)
          ptx::cp_async_16(Tile::chunk_address(base, slot * count + r, chunk), source, exists && r < rows.count);
        source += kDown * row_stride;
      }
    } else {
#pragma unroll 1
      for (int i = threadIdx.x; i < count * Tile::kChunks * 8; i += kThreads) {
        const int r = i / (Tile::kChunks * 8), d = i % (Tile::kChunks * 8);
        const uint16_t element = r < rows.count && d < head_dim ? rows.first[r * row_stride + d * stride] : 0;
        ptx::store_shared_16(Tile::chunk_address(base, slot * count + r, d / 8) + d % 8 * 2, element);
      }
    }
  }
}

} // namespace fdm::cuda
