// SPDX-License-Identifier: BSD-3-Clause
// The tile of one query with a key list. Its rows are query heads of one KV head, its columns the listed keys. The rows
// of K and V are gathered once for all heads of the tile.
//
// Steps of columns go through a ring of two stages. While a step is computed, the rows of the next step are copied, and
// the indices and biases of the two steps after it are loaded.
#pragma once

#include "../tile/column_ring.cuh"
#include "../tile/copy_rows.cuh"
#include "../tile/products.cuh"
#include "../tile/score.cuh"
#include "lists.h"

namespace fdm::cuda {

// The columns of a step.
template <class Ring> struct ListSlot {
  // At Ring::copy_index(c): the row of column c in K and V, counted in its sequence or over all pages; -1: no key.
  alignas(16) int32_t row[Ring::kRowsAtOnce * Ring::kSteps];
  alignas(8) float bias[Ring::kColumns]; // to base 2; -inf: no key

  __device__ int32_t key(int c) const { return row[Ring::copy_index(c)]; }
};

// The tile of a thread block. It is in shared memory to save registers.
struct ListTask {
  Sequence s;
  int64_t sequence_index;
  int64_t query;         // in its sequence
  int64_t head, kv_head; // the first of the tile's heads
  int32_t heads;         // rows of the tile
  int32_t limit;         // keys of the sequence that the query may see
  int32_t length;        // entries of the list, or of places; 0 if the query sees no key
  const int32_t *indices;
  const uint16_t *places; // the list entries of this pass; null: all entries
  ScoreView bias;         // per key
  ScoreView index_bias;   // per list entry
  const uint16_t *k, *v;  // row 0

  __device__ void set(const fdm_problem &p, const ListTiles &tiles, int64_t number);

  // The list entry of column c.
  __device__ int64_t entry(int32_t c) const { return places ? places[c] : c; }

  // Returns the base-2 bias of column c and sets its key. Without a key, the bias is -inf and the key is -1.
  __device__ float column(int32_t c, int64_t stride, int32_t *key) const {
    *key = c < length ? indices[c * stride] : -1;
    float sum = 0.0f;
    if (*key < 0 || *key >= limit) {
      sum = -INFINITY;
    } else {
      if (bias.data) sum = bias.load(0, *key);
      if (index_bias.data) sum += index_bias.load(0, c);
      sum = to_base_2(sum);
    }
    if (sum == -INFINITY) *key = -1;
    return sum;
  }
};

// The first sequence that ends after a packed row. The row may also lie before this sequence.
__device__ inline int64_t sequence_of_row(const fdm_problem &p, int64_t row) {
  int64_t first = 0, last = p.batch - 1;
  while (first < last) {
    const int64_t middle = (first + last) / 2;
    if (cu_bound(p.cu_seqlens_q, middle + 1) > row)
      last = middle;
    else
      first = middle + 1;
  }
  return first;
}

// The KV head varies slowest with the number, so concurrent thread blocks read the keys of one KV head.
__device__ inline void ListTask::set(const fdm_problem &p, const ListTiles &tiles, int64_t number) {
  const int64_t of_tile = quotient(number, tiles.head_tiles), rows = total_rows(p);
  const int64_t of_head = quotient(of_tile, rows), row = of_tile - of_head * rows;
  const int64_t batch = quotient(of_head, p.kv_heads), group = group_size(p);
  const int64_t first = (number - of_tile * tiles.head_tiles) * tiles.heads_per_tile;
  kv_head = of_head - batch * p.kv_heads;
  head = kv_head * group + first;
  heads = int32_t(min64(tiles.heads_per_tile, group - first));
  sequence_index = batch;
  if (is_varlen(p)) sequence_index = p.batch > 0 ? sequence_of_row(p, row) : -1;
  if (sequence_index >= 0) s = sequence(p, sequence_index);
  if (sequence_index < 0 || row < s.q_begin || row >= s.q_begin + s.q_count) {
    // A row outside all sequences is a query without keys.
    s = {0, row, 1, 0, 0, 0};
    sequence_index = 0;
  }
  query = row - s.q_begin;
  limit = int32_t(is_causal(p) ? clamp64(query + s.causal_off + 1, 0, s.k_count) : s.k_count);
  const fdm_tensor &lists = p.indices;
  places = nullptr;
  length = limit > 0 ? int32_t(min64(lists.shape[3], INT32_MAX)) : 0;
  indices = static_cast<const int32_t *>(lists.data) + s.batch * lists.stride[0] +
            head_index(p, lists, head) * lists.stride[1] + row * lists.stride[2];
  bias = score_view(p, p.bias, s, head);
  index_bias = {};
  if (const fdm_tensor &t = p.index_bias; present(t)) {
    const int64_t offset = s.batch * t.stride[0] + head_index(p, t, head) * t.stride[1] + row * t.stride[2];
    index_bias = {static_cast<const char *>(t.data) + offset * dtype_size(t.dtype), 0, t.stride[3], t.dtype, false};
  }
  const auto first_row = [&](const fdm_tensor &t) {
    if (!present(p.block_table)) return first_key_row(t, s, kv_head);
    return static_cast<const uint16_t *>(t.data) + kv_head * t.stride[2];
  };
  k = first_row(p.k);
  v = first_row(p.v);
}

template <class ElementType, int kHeadDimension, int kRowTileCount, int kRowWarpCount, int kKeyWarpCount,
          int kColumnCount>
struct ListConfig {
  using Element = ElementType;
  using Tile = SmemTile<kHeadDimension>;
  static constexpr int kHeadDim = kHeadDimension, kRowTiles = kRowTileCount, kRowWarps = kRowWarpCount,
                       kKeyWarps = kKeyWarpCount, kColumns = kColumnCount;
  static constexpr int kRows = 16 * kRowTiles * kRowWarps, kThreads = 32 * kRowWarps * kKeyWarps;
  using Ring = ColumnRing<Tile, kColumns, kThreads>; // for its copies; the slots are ListSlot
  static constexpr int kWarpColumns = kColumns / kKeyWarps;
  // The columns whose scores a warp holds at a time. Registers that hold accumulators of 32 x 128 have room for 32.
  static constexpr int kPartColumns = kRowTiles > 1 && kHeadDim > 64 && kWarpColumns > 32 ? 32 : kWarpColumns;
  static constexpr int kStages = 2, kSlots = 3;
  static constexpr int kKeyBytes = Tile::bytes(kColumns);
  static_assert(kThreads >= kColumns, "each thread has a column at most");
  static_assert(kPartColumns % 16 == 0);
};
template <class Element, int kHeadDim, ListTileChoice (*kTile)(int, ListHeads), ListHeads kHeads>
using ListConfigOf = ListConfig<Element, kHeadDim, kTile(kHeadDim, kHeads).row_tiles, kTile(kHeadDim, kHeads).row_warps,
                                kTile(kHeadDim, kHeads).key_warps, kTile(kHeadDim, kHeads).columns>;

// The shared memory of both passes.
template <class Config> struct ListShared {
  alignas(1024) char sQ[Config::Tile::bytes(Config::kRows)];
  char sKV[Config::kStages][2][Config::kKeyBytes]; // K and V
  ListSlot<typename Config::Ring> slots[Config::kSlots];
  ListTask task;
};

template <class Config> struct ListTile {
  using Element = typename Config::Element;
  using Tile = typename Config::Tile;
  using Ring = typename Config::Ring;
  using Slot = ListSlot<Ring>;
  static constexpr int kColumns = Config::kColumns, kRowTiles = Config::kRowTiles;
  static constexpr int kColumnTiles = Config::kPartColumns / 8;

  const ListParams &params;
  ListShared<Config> &shared;
  const ListTask &task;

  // The loads of a thread for its column. They are read a step later, when they have arrived.
  struct Entry {
    int32_t index; // -1: no key
    uint32_t bias_bits, index_bits;
  };

  __device__ ListTile(const ListParams &parameters, ListShared<Config> &memory)
      : params(parameters), shared(memory), task(memory.task) {}

  __device__ static int warp() { return threadIdx.x / 32; }
  __device__ static int row_warp() { return warp() % Config::kRowWarps; }
  __device__ static int key_warp() { return warp() / Config::kRowWarps; }
  // The row of this thread's accumulators in row tile m of its warp; half is 0 or 1.
  __device__ static int row(int m, int half) { return row_warp() * (16 * kRowTiles) + 16 * m + accumulator_row(half); }
  // Whether the warp has any row. Warps without rows still copy keys and join barriers.
  __device__ bool has_rows_of_warp() const { return row_warp() * (16 * kRowTiles) < task.heads; }
  __device__ int steps() const { return (task.length + kColumns - 1) / kColumns; }

  // The offset of row r of the tile in a (B, rows, heads, D) tensor.
  __device__ int64_t row_place(const fdm_tensor &t, int r) const {
    return row_offset(t, task.s, task.query, task.head + r);
  }
  __device__ int32_t fetch_index(int step) const {
    const int32_t c = step * kColumns + int(threadIdx.x);
    if (int(threadIdx.x) >= kColumns || c >= task.length) return -1;
    return task.indices[task.entry(c) * params.p.indices.stride[3]];
  }
  __device__ Entry fetch(int step, int32_t index) const {
    Entry entry{index, 0, 0};
    if (index < 0 || index >= task.limit) {
      entry.index = -1;
      return entry;
    }
    if (task.bias.data) entry.bias_bits = task.bias.load_bits(index);
    if (task.index_bias.data)
      entry.index_bits = task.index_bias.load_bits(task.entry(step * kColumns + int(threadIdx.x)));
    return entry;
  }
  __device__ void store(int step, const Entry &entry) {
    if (int(threadIdx.x) >= kColumns) return;
    Slot &slot = shared.slots[step % Config::kSlots];
    float bias = entry.index < 0 ? -INFINITY : 0.0f;
    if (entry.index >= 0) {
      if (task.bias.data) bias = task.bias.convert(entry.bias_bits);
      if (task.index_bias.data) bias += task.index_bias.convert(entry.index_bits);
      bias = to_base_2(bias);
    }
    slot.bias[threadIdx.x] = bias;
    slot.row[Ring::copy_index(threadIdx.x)] = bias == -INFINITY ? -1 : row_of_key(entry.index);
  }
  __device__ int32_t row_of_key(int32_t index) const {
    const fdm_problem &p = params.p;
    const fdm_tensor &table = p.block_table;
    if (!present(table)) return index;
    const auto page_size = static_cast<int32_t>(p.k.shape[1]);
    const int64_t entry = task.sequence_index * table.stride[0] + (index / page_size) * table.stride[1];
    const int64_t page =
        clamp64(static_cast<const int32_t *>(table.data)[entry], 0, p.k.shape[0] - 1); // see sequence()
    return int32_t(page) * params.page_rows + index % page_size;
  }

  // The offset of a row that is copied element by element.
  __device__ int64_t offset(const fdm_tensor &t, int32_t row) const {
    if (!present(params.p.block_table)) return row * t.stride[1];
    return row / params.page_rows * t.stride[0] + row % params.page_rows * t.stride[1];
  }

  __device__ uint32_t stage(int step, int values) const {
    return ptx::shared_address(shared.sKV[step % Config::kStages][values]);
  }

  // Starts the copies of a step's rows of K and V.
  __device__ void load_keys(int step) const {
    const fdm_problem &p = params.p;
    const Slot &slot = shared.slots[step % Config::kSlots];
    const auto load = [&](const fdm_tensor &t, const uint16_t *first, int values) {
      if (params.copies_rows)
        Ring::copy(stage(step, values), slot, {reinterpret_cast<const char *>(first), int32_t(2 * t.stride[1])},
                   int(p.head_dim));
      else
        load_elements(step, t, first, values);
    };
    load(p.k, task.k, 0);
    load(p.v, task.v, 1);
  }
  __device__ void load_elements(int step, const fdm_tensor &t, const uint16_t *first, int values) const {
    const Slot &slot = shared.slots[step % Config::kSlots];
#pragma unroll 1
    for (int i = threadIdx.x; i < kColumns * Tile::kChunks; i += Config::kThreads) {
      const int r = i / Tile::kChunks, chunk = i % Tile::kChunks;
      const int32_t key = slot.key(r);
      copy_chunk_by_elements(Tile::chunk_address(stage(step, values), r, chunk),
                             key < 0 ? kZeroRow : first + offset(t, key), chunk * 8, int(params.p.head_dim),
                             key < 0 ? 1 : t.stride[3]);
    }
  }

  // Calls work(step) for each step, when its K, V and slot are in shared memory. The caller has committed the copies of
  // Q before, so they are complete, too. All threads of the block call this.
  template <class Work> __device__ void for_steps(const Work &work) {
    const int count = steps();
    store(0, fetch(0, fetch_index(0)));
    store(1, fetch(1, fetch_index(1)));
    int32_t next = fetch_index(2);
    __syncthreads();
#pragma unroll
    for (int step = 0; step < Config::kStages; ++step) {
      if (step < count) load_keys(step);
      ptx::cp_async_fence();
    }
#pragma unroll 1
    for (int step = 0; step < count; ++step) {
      ptx::cp_async_wait<Config::kStages - 1>();
      __syncthreads();
      const Entry entry = fetch(step + 2, next);
      next = fetch_index(step + 3);
      work(step);
      store(step + 2, entry);
      __syncthreads(); // all threads have read the stage, and the slot of the next copies is stored
      if (step + Config::kStages < count) load_keys(step + Config::kStages);
      ptx::cp_async_fence();
    }
    ptx::cp_async_wait<0>();
    __syncthreads();
  }

  // The address of this warp's columns in K or V, from its column `first` on.
  __device__ uint32_t columns_of_warp(int step, int values, int first) const {
    return stage(step, values) + (key_warp() * Config::kWarpColumns + first) * Tile::kRowBytes;
  }

  // Computes the products of the warp's rows with its columns of K or V, from its column `first` on.
  __device__ void multiply(float (&sums)[kRowTiles][kColumnTiles][4], const char *rows, int step, int values,
                           int first) const {
    clear(sums);
    const uint32_t left = Tile::left(ptx::shared_address(rows), row_warp() * (16 * kRowTiles));
    gemm_ss<Element, Config::kHeadDim>(sums, left, Tile::right_rows(columns_of_warp(step, values, first)));
  }

  // Turns the products into base-2 scores, -inf for columns without a key. Calls slopes(m, n, i, slope) with the
  // derivative of the softcap.
  template <bool kHasSoftcap, class Slopes>
  __device__ void finish_scores(float (&scores)[kRowTiles][kColumnTiles][4], int step, int first,
                                const Slopes &slopes) const {
    const Slot &slot = shared.slots[step % Config::kSlots];
#pragma unroll
    for (int n = 0; n < kColumnTiles; ++n) {
      const int column = key_warp() * Config::kWarpColumns + first + 8 * n + accumulator_column();
      const float2 bias = *reinterpret_cast<const float2 *>(&slot.bias[column]);
#pragma unroll
      for (int m = 0; m < kRowTiles; ++m)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const float column_bias = i % 2 ? bias.y : bias.x;
          float slope;
          const float score = params.factors.score<kHasSoftcap>(scores[m][n][i], column_bias, &slope);
          scores[m][n][i] = column_bias == -INFINITY ? column_bias : score; // even if the query holds NaN
          slopes(m, n, i, slope);
        }
    }
  }
};

} // namespace fdm::cuda
