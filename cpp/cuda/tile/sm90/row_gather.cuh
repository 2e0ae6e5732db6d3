// SPDX-License-Identifier: BSD-3-Clause
// Copies of listed global rows to a wgmma tile, by all producer warps.
#pragma once

#include "../smem_tile.cuh"
#include "ptx/registers.cuh"
#include "roles.cuh"

namespace fdm::cuda {

// Each producer warp copies its own kOwnRows rows of a tile. A step copies a panel of kStepRows rows. A thread copies
// the same chunk of its row in all steps.
template <class Tile, int kRows> struct RowGather {
  static constexpr int kOwnRows = kRows / Roles::kProducerWarps;
  static constexpr int kRowLanes = Tile::kChunks < 8 ? Tile::kChunks : 8, kStepRows = 32 / kRowLanes;
  static constexpr int kSteps = kOwnRows / kStepRows, kRowsInFlight = kSteps < 4 ? kSteps : 4;
  static_assert(Tile::kHasPanels && kOwnRows % 8 == 0 && 8 % kRowLanes == 0 && kSteps % kRowsInFlight == 0);

  // The source addresses of a thread. They are computed before the thread waits for an empty stage, in separate
  // registers: a register that a copy reads cannot be overwritten before the copy has left the queue.
  struct RowAddresses {
    uint64_t chunk[kSteps];
    uint32_t valid; // a bit for each step; steps without it copy zeros

    // The step copies row `number`. Row 0 begins at `first`, and rows are `stride` bytes apart.
    __device__ __forceinline__ void set(int step, const char *first, int32_t stride, int32_t number, bool exists) {
      const uint64_t own_first = reinterpret_cast<uint64_t>(first) + own_chunk() * 16;
      chunk[step] = ptx::multiply_add_wide(number, stride, own_first);
      valid |= uint32_t(exists) << step;
    }
  };

  __device__ static __forceinline__ int own_chunk() { return threadIdx.x % kRowLanes; }
  // This thread's row of the first step.
  __device__ static __forceinline__ int first_row() {
    return Roles::producer_thread() / 32 * kOwnRows + threadIdx.x % 32 / kRowLanes;
  }

  // The index of tile row r in a list of row numbers. The rows of a thread are contiguous.
  __device__ static __forceinline__ int list_index(int r) {
    const int warp_row = r % kOwnRows;
    return r - warp_row + warp_row % kStepRows * kSteps + warp_row / kStepRows;
  }

  // Rows whose numbers are listed in shared memory, each at its list_index(); -1: zeros.
  __device__ static __forceinline__ RowAddresses listed(const char *first, int32_t stride, const int32_t *list) {
    struct alignas(4 * kRowsInFlight) Numbers {
      int32_t of_step[kRowsInFlight];
    };
    const uint32_t thread = ptx::thread_index();
    const uint32_t warp = thread / 32 % Roles::kProducerWarps, lane = thread % 32;
    const int32_t *thread_list =
        list + warp * kOwnRows + lane / kRowLanes * kSteps; // the list_index() of this thread's first row
    RowAddresses addresses;
    addresses.valid = 0;
#pragma unroll
    for (int batch = 0; batch < kSteps; batch += kRowsInFlight) {
      const Numbers numbers = *reinterpret_cast<const Numbers *>(thread_list + batch);
#pragma unroll
      for (int i = 0; i < kRowsInFlight; ++i)
        addresses.set(batch + i, first, stride, numbers.of_step[i], numbers.of_step[i] >= 0);
    }
    return addresses;
  }
  // `count` consecutive rows.
  __device__ static __forceinline__ RowAddresses consecutive(const char *first, int32_t stride, int count) {
    const char *thread_first = first + int64_t(first_row()) * stride;
    const int left = count - first_row();
    RowAddresses addresses;
    addresses.valid = 0;
#pragma unroll
    for (int step = 0; step < kSteps; ++step)
      addresses.set(step, thread_first, stride, step * kStepRows, step * kStepRows < left);
    return addresses;
  }

  // Columns from head_dim on become zeros.
  __device__ static __forceinline__ void copy(uint32_t tile, const RowAddresses &addresses, int head_dim) {
    // Swizzled for rows of either half of eight; all other addresses differ by constants.
    uint32_t own_address[2];
#pragma unroll
    for (int half = 0; half < 2; ++half)
      own_address[half] = Tile::chunk_address(tile, first_row() + 4 * half, own_chunk()) - 4 * half * Tile::kRowBytes;
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
#pragma unroll
      for (int panel = 0; panel < Tile::kPanels; ++panel) {
        const int r = step * kStepRows, chunk = 8 * panel + own_chunk();
        const uint32_t address = own_address[r / 4 % 2] + r * Tile::kRowBytes + panel * Tile::kPanelBytes;
        if (chunk < Tile::kChunks)
          ptx::cp_async_16(address, reinterpret_cast<const char *>(addresses.chunk[step]) + 128 * panel,
                           (addresses.valid >> step & 1) && chunk * 8 < head_dim);
      }
    }
  }
};

} // namespace fdm::cuda
