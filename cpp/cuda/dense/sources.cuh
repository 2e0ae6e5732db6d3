// SPDX-License-Identifier: BSD-3-Clause
// The sources of a bias, and how warps divide them and their rows or keys.
#pragma once

#include "../../indexing.h"
#include "../tile/smem_tile.cuh"
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

// The sources of a block, and the addresses of their first rows, in shared memory. kTensors are those that it copies.
template <int kMostSlots, int kTensors> struct SlotTable {
  Source source[kMostSlots];
  const uint16_t *first[kTensors][kMostSlots];
  const uint8_t *kept[kMostSlots]; // the first byte of a mask of keys

  __device__ __forceinline__ void set(int which, int slot, const fdm_tensor &t, int64_t head) {
    first[which][slot] = static_cast<const uint16_t *>(t.data) + source[slot].batch * t.stride[0] + head * t.stride[2];
  }
  __device__ __forceinline__ void set_kept(int slot, const fdm_problem &p) {
    if (mask_kind(p) != FDM_MASK_KEYS) return;
    const Matrix m = score_matrix(p, p.mask, dense_sequence(p, source[slot].batch), source[slot].head, 1);
    kept[slot] = static_cast<const uint8_t *>(m.base);
  }
};

// How rows of a tensor are copied to a tile.
struct RowCopy {
  int64_t row, col; // strides
  int head_dim;
  bool aligned; // 16 bytes at a time

  __device__ __forceinline__ RowCopy(const fdm_tensor &t, int64_t dims, bool chunks)
      : row(t.stride[1]), col(t.stride[3]), head_dim(int(dims)), aligned(chunks) {}
};

// Starts the copies of `count` rows from `first` on to rows from `tile_row` on of a tile, of which `there` exist; the others
// become zeros. Where rows cannot be copied 16 bytes at a time, elements are stored one by one. That loop is not
// unrolled, and no call: a call in the mainloop would cost it registers.
template <class Tile, int kThreads>
__device__ __forceinline__ void copy_tile_rows(uint32_t base, int tile_row, const uint16_t *first, int count, int there,
                                               const RowCopy &copy) {
  constexpr int kAcross = Tile::kRowBytes / 16, kDown = kThreads / kAcross; // threads of a row, and rows at a time
  constexpr bool kAlike = kDown % 8 == 0; // the chunks of a thread lie alike in their rows
  if (copy.aligned) {
    const int chunk = threadIdx.x % kAcross, row = threadIdx.x / kAcross;
    const uint16_t *source = first + row * copy.row + chunk * 8;
    const uint32_t address = Tile::chunk_address(base, tile_row + row, chunk);
    const int rows_left = chunk * 8 < copy.head_dim ? there - row : 0;
    if (Tile::kChunks == kAcross || chunk < Tile::kChunks)
#pragma unroll
      for (int r = 0; r < count; r += kDown) {
        if (count % kDown == 0 || row + r < count)
          ptx::cp_async_16(kAlike ? address + r * Tile::kRowBytes
                                  : Tile::chunk_address(base, tile_row + row + r, chunk),
                           source, r < rows_left);
        source += kDown * copy.row;
      }
    return;
  }
#pragma unroll 1
  for (int i = threadIdx.x; i < count * Tile::kChunks * 8; i += kThreads) {
    const int r = i / (Tile::kChunks * 8), d = i % (Tile::kChunks * 8);
    const uint16_t element = r < there && d < copy.head_dim ? first[r * copy.row + d * copy.col] : 0;
    ptx::store_shared_16(Tile::chunk_address(base, tile_row + r, d / 8) + d % 8 * 2, element);
  }
}

} // namespace fdm::cuda
