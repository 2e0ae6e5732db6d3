// SPDX-License-Identifier: BSD-3-Clause
// A ring of column facts that kernels need before they copy the keys of a block: the addresses of K and V, the bias,
// and the rows that keep each key. Each thread fetches one column. All threads together fetch several blocks, some
// blocks ahead. The kernel then never waits for the load chain plan -> bias -> address, and all warps have equal
// work.
#pragma once

#include <cfloat>

#include "../../indexing.h"
#include "columns.cuh"
#include "copy_rows.cuh"
#include "ptx/matrix.cuh"

namespace fdm::cuda {

constexpr float kLog2E = 1.44269504088896341f;

// A float64 bias of one head of a sequence, minus a reference so that float32 can hold it. The reference is the
// largest bias of a tile's columns. host/relative_bias.cu makes one for each tile of kTileRows rows.
struct RelativeBias {
  const double *first; // of key 0
  double reference;

  // A finite bias stays finite.
  __device__ __forceinline__ float load(int64_t index) const {
    const double bias = first[index];
    const auto relative = static_cast<float>(bias - reference);
    return relative == -INFINITY && bias > -INFINITY ? -FLT_MAX : relative;
  }
};

// A bias or another tensor of scores, for one head of a sequence.
struct ScoreView {
  const void *data; // null: absent; float64: a RelativeBias
  int64_t row, col; // strides in elements
  int32_t dtype;
  bool per_query; // one row for each query

  __device__ __forceinline__ uint32_t load_bits(int64_t j, int64_t i = 0) const {
    const int64_t index = (per_query ? i * row : 0) + j * col;
    if (dtype == FDM_FLOAT16 || dtype == FDM_BFLOAT16) return static_cast<const uint16_t *>(data)[index];
    if (dtype == FDM_FLOAT32) return static_cast<const uint32_t *>(data)[index];
    return __float_as_uint(static_cast<const RelativeBias *>(data)->load(index));
  }
  __device__ __forceinline__ float convert(uint32_t bits) const {
    if (dtype == FDM_FLOAT16) return __half2float(__ushort_as_half(static_cast<uint16_t>(bits)));
    if (dtype == FDM_BFLOAT16) return __uint_as_float(bits << 16);
    return __uint_as_float(bits);
  }
  __device__ __forceinline__ float load(int64_t i, int64_t j) const { return convert(load_bits(j, i)); }
};

__device__ __forceinline__ ScoreView score_view(const fdm_problem &p, const fdm_tensor &t, const Sequence &s,
                                                int64_t head) {
  if (!present(t)) return {};
  const Matrix m = score_matrix(p, t, s, head, t.dtype == FDM_FLOAT32 ? 4 : 2);
  return {m.base, m.row, m.col, t.dtype, is_per_query(t)};
}

// The bias of the rows of a tile of kTileRows rows. A table of RelativeBias, one for each sequence, query head and
// tile, replaces a float64 bias (relative_bias_tensor).
__device__ __forceinline__ ScoreView bias_view(const fdm_problem &p, const Sequence &s, int64_t sequence_index,
                                               int64_t head, int64_t tile) {
  const fdm_tensor &t = p.bias;
  ScoreView view = score_view(p, t, s, head);
  if (t.dtype == FDM_FLOAT64)
    view.data = static_cast<const RelativeBias *>(t.data) + sequence_index * t.stride[0] + head * t.stride[1] + tile;
  return view;
}

// Converts a bias to base 2. finfo.min does not become -inf, and NaN stays NaN.
__device__ __forceinline__ float to_base_2(float bias) {
  const float scaled = bias * kLog2E;
  return bias == -INFINITY ? bias : ptx::max_or_nan(scaled, -3.4e38f);
}

// The facts about a block's columns that every kernel needs.
template <int kColumns> struct ColumnFacts {
  float bias[kColumns];                    // base-2 bias; -inf: no row keeps the column
  uint32_t word[kTileRows / 32][kColumns]; // set in blocks with partial columns
};

template <int kColumns, int kThreads> struct KeyRing {
  static constexpr int kBlocksAtOnce = kThreads / kColumns; // blocks that are fetched at a time
  static constexpr int kSlots = 2 * kBlocksAtOnce;
  static_assert(kThreads % kColumns == 0, "each thread fetches one column");

  struct Slot : ColumnFacts<kColumns> {
    const uint16_t *k_row[kColumns], *v_row[kColumns]; // kZeroRow: no key
    int32_t key[kColumns];
  };
  Slot slots[kSlots];

  __device__ __forceinline__ Slot &slot(int block) { return slots[block % kSlots]; }
};

// The facts that one thread fetches for one column. They are stored raw and converted after the latency of the loads.
// The key is fetched one step earlier, since all other loads depend on it.
struct ColumnEntry {
  int32_t key;        // -1: no column
  uint32_t bias_bits; // the bits of an element of the bias's dtype
  int32_t start, end;
  RowWord word;
};

__device__ __forceinline__ int32_t fetch_key(const TileColumns &t, int32_t c) {
  return c < t.count ? column_key(t, c) : -1;
}

// Fetches the rows that keep the key of a partial column.
__device__ __forceinline__ void fetch_kept_rows(ColumnEntry &entry, const TileColumns &t) {
  if (t.words.words) entry.word = *t.words.of(entry.key);
  if (t.start) {
    entry.start = t.start[entry.key * t.start_stride];
    entry.end = t.end[entry.key * t.end_stride];
  }
}

__device__ __forceinline__ ColumnEntry fetch_column(const TileColumns &t, const ScoreView &bias, int32_t c,
                                                    int32_t key) {
  ColumnEntry entry{};
  entry.key = key;
  if (key < 0) return entry;
  if (bias.data && !bias.per_query) entry.bias_bits = bias.load_bits(key);
  if (c >= t.full) fetch_kept_rows(entry, t);
  return entry;
}

// The row of key 0 of a sequence in k or v, without a block table.
__device__ __forceinline__ const uint16_t *first_key_row(const fdm_tensor &t, const Sequence &s, int64_t kv_head) {
  return static_cast<const uint16_t *>(t.data) + s.batch * t.stride[0] + s.k_begin * t.stride[1] +
         kv_head * t.stride[2];
}

// The row of key j of a sequence in k or v, through the block table if there is one.
__device__ __forceinline__ const uint16_t *key_row(const fdm_problem &p, const fdm_tensor &t, const Sequence &s,
                                                   int64_t sequence_index, int64_t kv_head, int32_t j) {
  const auto *base = static_cast<const uint16_t *>(t.data);
  const fdm_tensor &table = p.block_table;
  if (!present(table)) return first_key_row(t, s, kv_head) + j * t.stride[1];
  const int32_t page_size = static_cast<int32_t>(t.shape[1]);
  const int64_t entry = sequence_index * table.stride[0] + (j / page_size) * table.stride[1];
  const int64_t page = clamp64(static_cast<const int32_t *>(table.data)[entry], 0, t.shape[0] - 1); // see sequence()
  return base + page * t.stride[0] + (j % page_size) * t.stride[1] + kv_head * t.stride[2];
}

// Stores the facts about column c. Returns its key, or -1 if no row keeps it. `partial`: the block has partial
// columns.
template <int kColumns>
__device__ __forceinline__ int32_t store_facts(ColumnFacts<kColumns> &facts, const TileColumns &t,
                                               const ScoreView &bias, int32_t c, bool partial,
                                               const ColumnEntry &entry) {
  const int i = c % kColumns;
  float column_bias = entry.key < 0 ? -INFINITY : 0.0f;
  if (entry.key >= 0 && bias.data && !bias.per_query) column_bias = to_base_2(bias.convert(entry.bias_bits));
  if (partial) {
    const RowWord word = column_word(t, c, entry.key, entry.start, entry.end, entry.word);
    uint32_t any = 0;
#pragma unroll
    for (int part = 0; part < kTileRows / 32; ++part) {
      facts.word[part][i] = word.part[part];
      any |= word.part[part];
    }
    if (any == 0) column_bias = -INFINITY; // in tiles that overflow
  }
  facts.bias[i] = column_bias;
  return column_bias == -INFINITY ? -1 : entry.key;
}

template <int kColumns, class Slot>
__device__ __forceinline__ void store_column(Slot &slot, const fdm_problem &p, const Sequence &s,
                                             int64_t sequence_index, int64_t kv_head, const TileColumns &t,
                                             const ScoreView &bias, int32_t c, const ColumnEntry &entry) {
  const int i = c % kColumns;
  const bool partial = c / kColumns * kColumns + kColumns > t.full;
  const int32_t key = store_facts<kColumns>(slot, t, bias, c, partial, entry);
  slot.key[i] = key;
  slot.k_row[i] = key < 0 ? kZeroRow : key_row(p, p.k, s, sequence_index, kv_head, key);
  slot.v_row[i] = key < 0 ? kZeroRow : key_row(p, p.v, s, sequence_index, kv_head, key);
}

} // namespace fdm::cuda
