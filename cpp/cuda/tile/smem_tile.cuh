// SPDX-License-Identifier: BSD-3-Clause
// Row tiles of 16-bit elements in shared memory, swizzled so that ldmatrix, wgmma and 16-byte copies have no bank
// conflicts.
//
// A tile has panels of 64 columns. A row of a panel has 128 bytes: eight 16-byte chunks. Chunk c of row r is stored
// at chunk position c ^ (r % 8). The same chunk of eight rows then covers all banks. This is the 128-byte swizzle of
// wgmma.
#pragma once

#include "../../indexing.h"
#include "ptx/copy.cuh"
#include "ptx/wgmma.cuh"

namespace fdm::cuda {

// The dynamic shared memory of a kernel.
template <class Shared> __device__ __forceinline__ Shared &dynamic_memory() {
  extern __shared__ __align__(1024) char dynamic_shared[];
  return *reinterpret_cast<Shared *>(dynamic_shared);
}

constexpr int kAnyRows = 0;

// A tile with kRows > 0 stores one panel after the other; wgmma reads it. A tile with kAnyRows stores the panels of a
// row side by side and has as many rows as its memory holds; mma.sync reads it. With up to 32 columns, two of its
// rows share 128 bytes (kPairs), and chunk c of row r is stored at position c ^ (r / 2 % 4) of its row.
template <int kColumns, int kRows = kAnyRows> struct SmemTile {
  static constexpr bool kHasPanels = kRows != kAnyRows, kPairs = !kHasPanels && kColumns <= 32;
  static constexpr int kPanels = (kColumns + 63) / 64, kChunks = kColumns / 8;
  static constexpr int kRowBytes = kPairs ? 64 : (kHasPanels ? 128 : kPanels * 128); // from one row to the next
  static constexpr int kPanelBytes = kHasPanels ? kRows * 128 : 128;                 // from one panel to the next
  static constexpr int kBytes = kPanels * kRows * 128;                               // of a tile with kHasPanels
  static_assert(kRows % 8 == 0);

  // The bytes of a kAnyRows tile.
  static constexpr int bytes(int rows) {
    static_assert(!kHasPanels);
    return rows * kRowBytes;
  }

  __device__ static __forceinline__ uint32_t chunk_address(uint32_t base, int row, int chunk) {
    if constexpr (kHasPanels) return base + chunk / 8 * kPanelBytes + row * kRowBytes + ((chunk ^ row) & 7) * 16;
    // The same address, with the parts of the chunk joined by `or`. With a sum, mma.sync kernels take up to 22
    // registers more and spill more.
    const int swizzled = kPairs ? (chunk ^ (row / 2)) & 3 : (chunk & ~7) | ((chunk ^ row) & 7);
    return base + row * kRowBytes + swizzled * 16;
  }

  // The next three return this thread's ldmatrix address of the fragment at column 0. `base` and row offsets are
  // multiples of a swizzled row (128 bytes; 64 with kPairs), so other fragments differ by an exclusive or and an
  // addition of constants.
  //
  // A left operand, 16 x 16, from `row` on.
  __device__ static __forceinline__ uint32_t left(uint32_t base, int row) {
    const int lane = threadIdx.x % 32;
    return chunk_address(base, row + lane % 16, lane / 16);
  }
  // Two right operands of a product with the transposed tile, summed over 16 of its columns: b[0], b[1] are for 8
  // rows, b[2], b[3] for the next 8.
  __device__ static __forceinline__ uint32_t right_rows(uint32_t base) {
    const int lane = threadIdx.x % 32;
    return chunk_address(base, lane / 16 * 8 + lane % 8, lane / 8 % 2);
  }
  // Two right operands, loaded transposed, for 8 columns and the next 8 of a product that sums over 16 rows.
  __device__ static __forceinline__ uint32_t right_columns(uint32_t base) { return left(base, 0); }

  // The address of the fragment at (row, column) from that of (0, 0). `row` is a multiple of 8, `column` of 16.
  __device__ static __forceinline__ uint32_t fragment_address(uint32_t fragment, int row, int column) {
    return (fragment ^ (column / 8 % 8 * 16)) + row * kRowBytes + column / 64 * kPanelBytes;
  }

  // The wgmma descriptor of the whole tile, which is 1024-byte aligned. Adding `offset` gives the descriptor of
  // another part.
  __device__ static __forceinline__ uint64_t descriptor(uint32_t base) {
    static_assert(kHasPanels);
    return ptx::matrix_descriptor(base, kPanelBytes, 8 * kRowBytes);
  }
  // The descriptor offset of the part at (row, column), multiples of 8 and 16.
  __device__ static constexpr uint64_t offset(int row, int column) {
    static_assert(kHasPanels);
    return uint64_t((column / 64 * kPanelBytes + row * kRowBytes + column % 64 * 2) >> 4);
  }

  // A group of kWarps warps copies kRows global rows. Each warp copies kRows / kWarps rows from first_row() on. Lane
  // i gives the address of row first_row() + i. Columns from head_dim on become zeros.
  //
  // A step copies one panel of several rows. A lane copies the same chunk of each panel in all steps, so most
  // addresses differ by constants from two, which are swizzled for rows of either half of eight.
  template <int kWarps> __device__ static __forceinline__ int first_row(int warp) { return kRows / kWarps * warp; }
  template <int kWarps>
  __device__ static __forceinline__ void gather(uint32_t base, int warp, const uint16_t *row_of_lane, int head_dim) {
    constexpr int kOwnRows = kRows / kWarps, kRowLanes = kChunks < 8 ? kChunks : 8, kStepRows = 32 / kRowLanes;
    static_assert(kHasPanels && kRows % kWarps == 0 && kOwnRows <= 32 && kOwnRows % 8 == 0 && 8 % kRowLanes == 0);
    const int lane = threadIdx.x % 32, own_row = lane / kRowLanes, own_chunk = lane % kRowLanes;
    const auto row_bits = reinterpret_cast<unsigned long long>(row_of_lane);
    uint32_t own_address[2]; // of the first row, and of the fourth after it
#pragma unroll
    for (int half = 0; half < 2; ++half)
      own_address[half] =
          chunk_address(base, first_row<kWarps>(warp) + own_row + 4 * half, own_chunk) - 4 * half * kRowBytes;
    // Several row addresses are computed first: a register that a copy reads cannot be overwritten before the copy
    // has left the queue.
    constexpr int kRowsInFlight = kOwnRows / kStepRows < 4 ? kOwnRows / kStepRows : 4;
    static_assert(kOwnRows / kStepRows % kRowsInFlight == 0);
#pragma unroll
    for (int first = 0; first < kOwnRows; first += kRowsInFlight * kStepRows) {
      const uint16_t *row[kRowsInFlight];
#pragma unroll
      for (int i = 0; i < kRowsInFlight; ++i)
        row[i] =
            reinterpret_cast<const uint16_t *>(__shfl_sync(0xffffffffu, row_bits, first + i * kStepRows + own_row)) +
            own_chunk * 8;
#pragma unroll
      for (int i = 0; i < kRowsInFlight; ++i) {
        const int r = first + i * kStepRows;
#pragma unroll
        for (int panel = 0; panel < kPanels; ++panel) {
          const int chunk = 8 * panel + own_chunk;
          const uint32_t address = own_address[r / 4 % 2] + r * kRowBytes + panel * kPanelBytes;
          if (chunk < kChunks) ptx::cp_async_16(address, row[i] + 64 * panel, chunk * 8 < head_dim);
        }
      }
    }
  }
};

} // namespace fdm::cuda
