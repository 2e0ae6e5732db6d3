// SPDX-License-Identifier: BSD-3-Clause
// What a kernel with mma.sync needs to know of the columns of a block before it fetches its keys: as key_ring.cuh, for rows
// that are copied 16 bytes at a time and a bias that is the same for every query. A column has the number of its row in K
// and V instead of two addresses, which take a multiplication to make when the row is copied.
#pragma once

#include "key_ring.cuh"

namespace fdm::cuda {

// A bias to base 2 times `factor`, in units of the product of Q and K; only a bias of -inf drops a key. It is cut off at
// 2^90: times the scale, which is between 2^-30 and 2^20, that is far beyond what quick_softmax() takes, and far from the
// lowest float, by which it shifts a row that has no maximum yet.
__device__ __forceinline__ float bias_in_products(float bias, float factor) {
  constexpr float kMost = 0x1p90f;
  const float scaled = bias * factor;
  return bias == -INFINITY ? bias : ptx::max_or_nan(ptx::min_or_nan(scaled, kMost), -kMost);
}

// Rows of K or V that are copied 16 bytes at a time, for one key/value head of a sequence.
struct GatheredRows {
  const char *first; // row 0
  int32_t bytes;     // from one row to the next
};

// Where the rows of K and V lie, by numbers that both have in common: keys, or with a block table places in its pages.
struct RowNumbers {
  int32_t k_bytes, v_bytes; // from one row to the next
  int32_t page_rows;        // from one page of a block table to the next
  bool possible;            // false where strides are too large for this, or pages lie differently in K and V

  RowNumbers() = default;
  explicit RowNumbers(const fdm_problem &p) {
    constexpr int64_t kMost = INT32_MAX;
    const auto bytes = [](const fdm_tensor &t) { return 2 * t.stride[1]; };
    k_bytes = int32_t(bytes(p.k));
    v_bytes = int32_t(bytes(p.v));
    possible = k_bytes == bytes(p.k) && v_bytes == bytes(p.v);
    page_rows = 0;
    if (!present(p.block_table)) return;
    const int64_t k_rows = p.k.stride[1] ? p.k.stride[0] / p.k.stride[1] : 0;
    possible = possible && k_rows * p.k.stride[1] == p.k.stride[0] && k_rows * p.v.stride[1] == p.v.stride[0] &&
               k_rows >= 0 && (k_rows == 0 || p.k.shape[0] <= kMost / k_rows - 1);
    page_rows = int32_t(k_rows);
  }

  __device__ __forceinline__ static GatheredRows rows(const fdm_problem &p, const fdm_tensor &t, int32_t bytes,
                                                      const Sequence &s, int64_t kv_head) {
    const auto *first = static_cast<const uint16_t *>(t.data) + kv_head * t.stride[2];
    if (!present(p.block_table)) first = first_key_row(t, s, kv_head);
    return {reinterpret_cast<const char *>(first), bytes};
  }

  // The row of key j of a sequence.
  __device__ __forceinline__ int32_t row(const fdm_problem &p, int64_t sequence_index, int32_t j) const {
    const fdm_tensor &table = p.block_table;
    if (!present(table)) return j;
    const auto page_size = static_cast<int32_t>(p.k.shape[1]);
    const int32_t entry = j / page_size;
    const int32_t page =
        static_cast<const int32_t *>(table.data)[sequence_index * table.stride[0] + entry * table.stride[1]];
    return max(0, min(page, int32_t(p.k.shape[0]) - 1)) * page_rows + (j - entry * page_size); // see sequence()
  }
};

template <class RingTile, int kColumnCount, int kThreadCount> struct ColumnRing {
  static constexpr int kColumns = kColumnCount, kThreads = kThreadCount;
  static constexpr int kBatch = kThreads / kColumns; // blocks that are fetched at a time
  static constexpr int kBlocks = kBatch + 1;         // the next batch is stored while the last block of one is used
  static_assert(kThreads % kColumns == 0, "each thread fetches one column");
  // Threads that copy a row, and rows that are copied at a time.
  static constexpr int kAcross = RingTile::kRowBytes / 16, kDown = kThreads / kAcross;
  static constexpr int kSteps = (kColumns + kDown - 1) / kDown;

  struct Slot : ColumnFacts<kColumns> {
    // The bias of two columns in units of q.k, where scores are linear in it: twice, as an accumulator has them.
    float4 initial[kColumns / 2];
    alignas(16) int32_t row[kDown * kSteps]; // -1: no key. The rows that a thread copies lie side by side.

    __device__ __forceinline__ void set_initial(int c, float bias) {
      auto *pair = reinterpret_cast<float *>(&initial[c / 2]) + c % 2;
      pair[0] = pair[2] = bias;
    }
  };
  Slot slots[kBlocks];

  __device__ __forceinline__ Slot &slot(int block) { return slots[uint32_t(block) % kBlocks]; }
  __device__ __forceinline__ static int place(int c) { return c % kDown * kSteps + c / kDown; }

  // Starts the copies of the rows of a slot to a tile. The others become zeros.
  __device__ __forceinline__ static void copy(uint32_t base, const Slot &slot, GatheredRows rows, int head_dim) {
    const int chunk = threadIdx.x % kAcross, own = threadIdx.x / kAcross;
    if ((RingTile::kChunks != kAcross && chunk >= RingTile::kChunks) || (kThreads % kAcross != 0 && own >= kDown))
      return;
    int32_t row[kSteps];
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      if constexpr (kSteps % 4 == 0) {
        if (step % 4 == 0) {
          const int4 four = *reinterpret_cast<const int4 *>(&slot.row[own * kSteps + step]);
          row[step] = four.x;
          row[step + 1] = four.y;
          row[step + 2] = four.z;
          row[step + 3] = four.w;
        }
      } else {
        row[step] = slot.row[own * kSteps + step];
      }
    }
    const char *source = rows.first + chunk * 16;
    asm("" : "+l"(source)); // the compiler would add both parts to each row apart
    const bool inside = chunk * 8 < head_dim;
    const uint32_t address = RingTile::chunk_address(base, own, chunk);
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      const uint32_t target = kDown % 8 == 0 ? address + step * kDown * RingTile::kRowBytes
                                             : RingTile::chunk_address(base, own + step * kDown, chunk);
      if (kColumns % kDown == 0 || own + step * kDown < kColumns)
        ptx::cp_async_16(target, source + int64_t(row[step]) * rows.bytes, inside && row[step] >= 0);
    }
  }
};

} // namespace fdm::cuda
