// SPDX-License-Identifier: BSD-3-Clause
// The ring of column facts for kernels with mma.sync: like key_ring.cuh, for rows copied 16 bytes at a time and a
// bias per key. A column stores the row number of its key in K and V instead of two addresses. The copy of the row
// multiplies the number by the row stride.
#pragma once

#include "key_ring.cuh"
#include "ptx/registers.cuh"
#include "row_places.cuh"

namespace fdm::cuda {

// A base-2 bias times `factor`, in units of Q K'; only a bias of -inf drops a key. The result is clamped to +-2^90.
// The scale is between 2^-30 and 2^20, so a clamped score is far above what quick_softmax() accepts. It is also far
// from the lowest float, the shift of a row without a maximum.
__device__ __forceinline__ float bias_in_products(float bias, float factor) {
  constexpr float kLargest = 0x1p90f;
  const float scaled = bias * factor;
  return bias == -INFINITY ? bias : ptx::max_or_nan(ptx::min_or_nan(scaled, kLargest), -kLargest);
}

template <class RingTile, int kColumnCount, int kThreadCount> struct ColumnRing {
  static constexpr int kColumns = kColumnCount, kThreads = kThreadCount;
  static constexpr int kBlocksAtOnce = kThreads / kColumns; // blocks that are fetched at a time
  static constexpr int kSlots = kBlocksAtOnce + 1; // the next batch is stored while the last block of one is in use
  static_assert(kThreads % kColumns == 0, "each thread fetches one column");
  // Threads that copy one row, and rows that are copied at a time.
  static constexpr int kThreadsPerRow = RingTile::kRowBytes / 16, kRowsAtOnce = kThreads / kThreadsPerRow;
  static constexpr int kSteps = (kColumns + kRowsAtOnce - 1) / kRowsAtOnce;

  struct Slot : ColumnFacts<kColumns> {
    // The bias of column pairs in units of Q K', where scores are linear in it. Stored twice, in accumulator layout.
    float4 initial[kColumns / 2];
    alignas(16) int32_t row[kRowsAtOnce * kSteps]; // -1: no key. The rows that a thread copies are contiguous.

    __device__ __forceinline__ void set_initial(int c, float bias) {
      auto *pair = reinterpret_cast<float *>(&initial[c / 2]) + c % 2;
      pair[0] = pair[2] = bias;
    }
  };
  Slot slots[kSlots];

  __device__ __forceinline__ Slot &slot(int block) { return slots[uint32_t(block) % kSlots]; }
  __device__ __forceinline__ static int copy_index(int c) { return c % kRowsAtOnce * kSteps + c / kRowsAtOnce; }

  // Starts the copies of the rows of a slot to a tile; absent rows become zeros. AnySlot has the member `row` of
  // Slot.
  template <class AnySlot>
  __device__ __forceinline__ static void copy(uint32_t base, const AnySlot &slot, GatheredRows rows, int head_dim) {
    const int chunk = threadIdx.x % kThreadsPerRow, thread_row = threadIdx.x / kThreadsPerRow;
    if ((RingTile::kChunks != kThreadsPerRow && chunk >= RingTile::kChunks) ||
        (kThreads % kThreadsPerRow != 0 && thread_row >= kRowsAtOnce))
      return;
    int32_t row[kSteps];
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      if constexpr (kSteps % 4 == 0) {
        if (step % 4 == 0) {
          const int4 four = *reinterpret_cast<const int4 *>(&slot.row[thread_row * kSteps + step]);
          row[step] = four.x;
          row[step + 1] = four.y;
          row[step + 2] = four.z;
          row[step + 3] = four.w;
        }
      } else {
        row[step] = slot.row[thread_row * kSteps + step];
      }
    }
    // Without opaque(), the compiler adds both parts for each row.
    const char *source = ptx::opaque(rows.first + chunk * 16);
    const bool inside = chunk * 8 < head_dim;
    const uint32_t address = RingTile::chunk_address(base, thread_row, chunk);
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      const uint32_t target = kRowsAtOnce % 8 == 0
                                  ? address + step * kRowsAtOnce * RingTile::kRowBytes
                                  : RingTile::chunk_address(base, thread_row + step * kRowsAtOnce, chunk);
      if (kColumns % kRowsAtOnce == 0 || thread_row + step * kRowsAtOnce < kColumns)
        ptx::cp_async_16(target, source + int64_t(row[step]) * rows.bytes, inside && row[step] >= 0);
    }
  }
};

} // namespace fdm::cuda
