// SPDX-License-Identifier: BSD-3-Clause
// Copies of listed rows of global memory to a tile that wgmma reads, by the producer warps together.
#pragma once

#include "../smem_tile.cuh"
#include "roles.cuh"

namespace fdm::cuda {

// Each producer warp copies its own kOwnRows rows of a tile. A step copies a panel of kStepRows rows, and a thread has the
// same chunk of its row in all steps. The addresses of several steps are found before the first copy: a register that a
// copy reads cannot be written until the copy has left the queue.
template <class Tile, int kRows> struct RowGather {
  static constexpr int kOwnRows = kRows / Roles::kProducerWarps;
  static constexpr int kRowLanes = Tile::kChunks < 8 ? Tile::kChunks : 8, kStepRows = 32 / kRowLanes;
  static constexpr int kSteps = kOwnRows / kStepRows, kBatch = kSteps < 4 ? kSteps : 4;
  static_assert(Tile::kHasPanels && kOwnRows % 8 == 0 && 8 % kRowLanes == 0 && kSteps % kBatch == 0);
  // The numbers of a thread's rows for as many steps, which shared memory gives at once.
  struct alignas(4 * kBatch) Numbers {
    int32_t of_step[kBatch];
  };

  // Where the number of row r of a tile lies in a list: those of a thread lie side by side.
  __device__ static __forceinline__ int place(int r) {
    const int own = r % kOwnRows;
    return r - own + own % kStepRows * kSteps + own / kStepRows;
  }

  // Copies rows `stride` bytes apart, of which row 0 begins at `first`. numbers_of(first_step, r) returns the numbers of
  // rows r, r + kStepRows and so on of the tile; -1: zeros. Columns from head_dim on become zeros too.
  template <class NumbersOf>
  __device__ static __forceinline__ void copy(uint32_t tile, const char *first, int32_t stride, int head_dim,
                                              const NumbersOf &numbers_of) {
    const int lane = threadIdx.x % 32, warp = Roles::producer_thread() / 32;
    const int own_row = lane / kRowLanes, own_chunk = lane % kRowLanes, first_row = warp * kOwnRows + own_row;
    // Swizzled for rows of either half of eight; all other addresses are constants away.
    uint32_t own_address[2];
#pragma unroll
    for (int half = 0; half < 2; ++half)
      own_address[half] = Tile::chunk_address(tile, first_row + 4 * half, own_chunk) - 4 * half * Tile::kRowBytes;
    const char *own_first = first + 16 * own_chunk;
#pragma unroll
    for (int batch = 0; batch < kSteps; batch += kBatch) {
      const Numbers numbers = numbers_of(batch, first_row + batch * kStepRows);
      const char *chunk_of[kBatch];
#pragma unroll
      for (int i = 0; i < kBatch; ++i) chunk_of[i] = own_first + int64_t(numbers.of_step[i]) * stride;
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
#pragma unroll
        for (int panel = 0; panel < Tile::kPanels; ++panel) {
          const int r = (batch + i) * kStepRows, chunk = 8 * panel + own_chunk;
          const uint32_t address = own_address[r / 4 % 2] + r * Tile::kRowBytes + panel * Tile::kPanelBytes;
          if (chunk < Tile::kChunks)
            ptx::cp_async_16(address, chunk_of[i] + 128 * panel, numbers.of_step[i] >= 0 && chunk * 8 < head_dim);
        }
      }
    }
  }

  // The same for rows whose numbers lie in shared memory, each at its place().
  __device__ static __forceinline__ void copy_listed(uint32_t tile, const char *first, int32_t stride, int head_dim,
                                                     const int32_t *list) {
    copy(tile, first, stride, head_dim, [&](int step, int) {
      const int lane = threadIdx.x % 32, warp = Roles::producer_thread() / 32;
      return *reinterpret_cast<const Numbers *>(list + warp * kOwnRows + lane / kRowLanes * kSteps + step);
    });
  }
};

} // namespace fdm::cuda
