// SPDX-License-Identifier: BSD-3-Clause
// Copies of global rows to the smem tiles that mma.sync reads.
#pragma once

#include "../route/facts.h"
#include "ptx/zero_row.cuh"
#include "smem_tile.cuh"

namespace fdm::cuda {

using ptx::kZeroRow;

// Copies 8 elements of a global row to a chunk, one by one: for rows that are not 16-byte aligned, have an element
// stride, or have a head dimension that is not a multiple of 8, in forward passes; and for rows of key lists without
// row places (tile/row_places.cuh). It is not inlined, to keep it out of the asynchronous aligned copies.
static __device__ __noinline__ void copy_chunk_by_elements(uint32_t address, const uint16_t *row, int first,
                                                           int head_dim, int64_t stride) {
  uint32_t packed[4] = {0, 0, 0, 0};
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const int d = first + i;
    if (d < head_dim) packed[i / 2] |= uint32_t(row[d * stride]) << (i % 2 * 16);
  }
  ptx::store_shared(address, uint4{packed[0], packed[1], packed[2], packed[3]});
}

// Starts copies of global rows to a tile, 16 bytes at a time. Row r comes from source(r), which is kZeroRow for absent
// rows.
template <class Tile, int kRows, int kThreads, class Source>
__device__ __forceinline__ void copy_rows(uint32_t base, int head_dim, const Source &source) {
  constexpr int kTotal = kRows * Tile::kChunks;
  constexpr int kLoadsInFlight = 8; // find addresses before the first copy, so that their loads overlap
  // If a step of all threads covers whole rows, a thread always has the same chunk.
  constexpr bool kWholeRows = kThreads % Tile::kChunks == 0;
#pragma unroll
  for (int batch = 0; batch < kTotal; batch += kLoadsInFlight * kThreads) {
    const uint16_t *rows[kLoadsInFlight];
#pragma unroll
    for (int step = 0; step < kLoadsInFlight; ++step) {
      const int begin = batch + step * kThreads, i = begin + int(threadIdx.x);
      if (begin >= kTotal) break; // known at compile time, unlike i < kTotal
      const int r = kWholeRows ? begin / Tile::kChunks + int(threadIdx.x) / Tile::kChunks : i / Tile::kChunks;
      if (begin + kThreads <= kTotal || i < kTotal) rows[step] = source(r);
    }
#pragma unroll
    for (int step = 0; step < kLoadsInFlight; ++step) {
      const int begin = batch + step * kThreads, i = begin + int(threadIdx.x);
      if (begin >= kTotal) break;
      const int r = kWholeRows ? begin / Tile::kChunks + int(threadIdx.x) / Tile::kChunks : i / Tile::kChunks;
      const int chunk = (kWholeRows ? int(threadIdx.x) : i) % Tile::kChunks;
      if (begin + kThreads <= kTotal || i < kTotal)
        ptx::cp_async_16(Tile::chunk_address(base, r, chunk), rows[step] + chunk * 8, chunk * 8 < head_dim);
    }
  }
}

// The same for rows of a tensor in forward passes. If rows cannot be copied 16 bytes at a time (not `aligned`), it
// copies elements, and not asynchronously.
template <class Tile, int kRows, int kThreads, class Source>
__device__ __forceinline__ void copy_any_rows(uint32_t base, bool aligned, int head_dim, const fdm_tensor &t,
                                              const Source &source) {
  if (aligned) return copy_rows<Tile, kRows, kThreads>(base, head_dim, source);
#pragma unroll 1
  for (int i = threadIdx.x; i < kRows * Tile::kChunks; i += kThreads) {
    const int r = i / Tile::kChunks, chunk = i % Tile::kChunks;
    const uint16_t *row = source(r);
    copy_chunk_by_elements(Tile::chunk_address(base, r, chunk), row, chunk * 8, head_dim,
                           row == kZeroRow ? 1 : t.stride[3]);
  }
}

// Starts the copies of `count` rows of a tensor from `first` on to a tile, from row `tile_row` on, 16 bytes at a time.
// Rows from `valid_rows` on become zeros.
template <class Tile, int kThreads>
__device__ __forceinline__ void copy_tile_rows(uint32_t base, int tile_row, const uint16_t *first, int count,
                                               int valid_rows, const fdm_tensor &t, int64_t head_dim) {
  constexpr int kThreadsPerRow = Tile::kRowBytes / 16,
                kRowsAtOnce = kThreads / kThreadsPerRow; // threads of a row, and rows at a time
  constexpr bool kAlike = kRowsAtOnce % 8 == 0;          // all chunks of a thread have the same swizzle
  const int chunk = threadIdx.x % kThreadsPerRow, row = threadIdx.x / kThreadsPerRow;
  const uint16_t *source = first + row * t.stride[1] + chunk * 8;
  const uint32_t address = Tile::chunk_address(base, tile_row + row, chunk);
  const int rows_left = chunk * 8 < int(head_dim) ? valid_rows - row : 0;
  // Surplus threads have no row.
  const bool has_row = (Tile::kChunks == kThreadsPerRow || chunk < Tile::kChunks) &&
                       (kThreads % kThreadsPerRow == 0 || row < kRowsAtOnce);
  if (!has_row) return;
#pragma unroll
  for (int r = 0; r < count; r += kRowsAtOnce) {
    if (count % kRowsAtOnce == 0 || row + r < count)
      ptx::cp_async_16(kAlike ? address + r * Tile::kRowBytes : Tile::chunk_address(base, tile_row + row + r, chunk),
                       source, r < rows_left);
    source += kRowsAtOnce * t.stride[1];
  }
}

} // namespace fdm::cuda
