// SPDX-License-Identifier: BSD-3-Clause
// Tiles of rows of 16-bit elements in shared memory as wgmma reads them, and the copies that fill them.
//
// A tile is cut into panels of 64 columns. A row of a panel has 128 bytes, which are eight chunks of 16; chunk c of row
// r lies where chunk c ^ (r % 8) would (the swizzle of 128 bytes). Tiles begin at multiples of 1024 bytes.
#pragma once

#include "../../ptx/copy.cuh"
#include "../../ptx/wgmma.cuh"

namespace fdm::cuda {

template <int kHeadDim, int kRows> struct PanelTile {
  static constexpr int kPanelBytes = kRows * 128, kBytes = (kHeadDim + 63) / 64 * kPanelBytes;
  static constexpr int kChunks = kHeadDim / 8;
  static_assert(kRows % 8 == 0);

  __device__ static __forceinline__ uint32_t chunk_address(uint32_t base, int row, int chunk) {
    return base + chunk / 8 * kPanelBytes + row * 128 + ((chunk ^ row) & 7) * 16;
  }

  // The descriptor of the whole tile. Those of other parts are an addition of `offset` away.
  __device__ static __forceinline__ uint64_t descriptor(uint32_t base) {
    return ptx::matrix_descriptor(base, kPanelBytes, 8 * 128);
  }
  // The offset to the descriptor of the part that begins at (row, column), multiples of 8 and 16.
  __device__ static constexpr uint64_t offset(int row, int column) {
    return uint64_t((column / 64 * kPanelBytes + row * 128 + column % 64 * 2) >> 4);
  }

  // The warps of a group of kWarps copy kRows rows from global memory, and this warp those from first_row() on. Lane i
  // gives the address of row first_row() + i; columns from head_dim on become zeros.
  //
  // A step copies a panel of several rows. A lane has the same chunk of each panel in all steps, so most addresses are
  // constants away from two, which are swizzled for rows of either half of eight.
  template <int kWarps> __device__ static __forceinline__ int first_row(int warp) { return kRows / kWarps * warp; }
  template <int kWarps>
  __device__ static __forceinline__ void gather(uint32_t base, int warp, const uint16_t *row_of_lane, int head_dim) {
    constexpr int kOwnRows = kRows / kWarps, kPanels = (kChunks + 7) / 8;
    constexpr int kRowLanes = kChunks < 8 ? kChunks : 8, kStepRows = 32 / kRowLanes;
    static_assert(kRows % kWarps == 0 && kOwnRows <= 32 && kOwnRows % 8 == 0 && 8 % kRowLanes == 0);
    const int lane = threadIdx.x % 32, own_row = lane / kRowLanes, own_chunk = lane % kRowLanes;
    const auto row_bits = reinterpret_cast<unsigned long long>(row_of_lane);
    uint32_t own_address[2]; // of the first row, and of the fourth after it
#pragma unroll
    for (int half = 0; half < 2; ++half)
      own_address[half] = chunk_address(base, first_row<kWarps>(warp) + own_row + 4 * half, own_chunk) - 4 * half * 128;
    // The addresses of several rows are found first: a register that a copy reads cannot be written until the copy has
    // left the queue.
    constexpr int kBatch = kOwnRows / kStepRows < 4 ? kOwnRows / kStepRows : 4;
    static_assert(kOwnRows / kStepRows % kBatch == 0);
#pragma unroll
    for (int first = 0; first < kOwnRows; first += kBatch * kStepRows) {
      const uint16_t *row[kBatch];
#pragma unroll
      for (int i = 0; i < kBatch; ++i)
        row[i] =
            reinterpret_cast<const uint16_t *>(__shfl_sync(0xffffffffu, row_bits, first + i * kStepRows + own_row)) +
            own_chunk * 8;
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        const int r = first + i * kStepRows;
#pragma unroll
        for (int panel = 0; panel < kPanels; ++panel) {
          const int chunk = 8 * panel + own_chunk;
          const uint32_t address = own_address[r / 4 % 2] + r * 128 + panel * kPanelBytes;
          if (chunk < kChunks) ptx::cp_async_16(address, row[i] + 64 * panel, chunk * 8 < head_dim);
        }
      }
    }
  }
};

} // namespace fdm::cuda
