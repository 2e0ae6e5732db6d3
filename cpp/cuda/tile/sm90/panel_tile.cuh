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
  template <int kWarps> __device__ static __forceinline__ int first_row(int warp) { return kRows / kWarps * warp; }
  template <int kWarps>
  __device__ static __forceinline__ void gather(uint32_t base, int warp, const uint16_t *row_of_lane, int head_dim) {
    constexpr int kOwnRows = kRows / kWarps, kTotal = kOwnRows * kChunks;
    static_assert(kRows % kWarps == 0 && kOwnRows <= 32 && kTotal % 32 == 0);
    const int lane = threadIdx.x % 32;
    const auto row_bits = reinterpret_cast<unsigned long long>(row_of_lane);
#pragma unroll 4 // all would need an address each
    for (int begin = 0; begin < kTotal; begin += 32) {
      const int i = begin + lane, r = i / kChunks, chunk = i % kChunks;
      const auto *row = reinterpret_cast<const uint16_t *>(__shfl_sync(0xffffffffu, row_bits, r));
      ptx::cp_async_16(chunk_address(base, first_row<kWarps>(warp) + r, chunk), row + chunk * 8, chunk * 8 < head_dim);
    }
  }
};

} // namespace fdm::cuda
