// SPDX-License-Identifier: BSD-3-Clause
// The elementwise work of the forward pass on a row tile, between the matrix products: scale, softcap, bias, mask,
// running softmax and epilogue.
//
// The accumulator layouts of mma.sync and wgmma are the same: kRowTiles tiles of 16 rows for each warp.
#pragma once

#include "../tile/key_ring.cuh"
#include "../tile/products.cuh"
#include "../tile/row_bias_tile.cuh"
#include "../tile/score.cuh"
#include "../tile/sink.cuh"
#include "forward.h"
#include "running_rows.cuh"

namespace fdm::cuda {

// The stored part of out: rounded elements, or their rests. Both have 16 bits in registers and shared memory.
enum class RowPart { rounded, rest };
template <RowPart kPart> using StoredPart = std::conditional_t<kPart == RowPart::rounded, uint16_t, uint8_t>;

// Stores eight elements.
template <RowPart kPart> __device__ __forceinline__ void store_part(StoredPart<kPart> *to, const uint32_t (&words)[4]) {
  if constexpr (kPart == RowPart::rounded)
    ptx::store_global_16(to, words);
  else
    *reinterpret_cast<uint2 *>(to) = {join_rests(words[0], words[1]), join_rests(words[2], words[3])};
}

// The base-2 reference of biases if products start from them. Such scores have errors of a few units in the last
// place of their value relative to the reference: 2^-13 each at 2^10. P in float16 is rounded to 2^-11 of itself. So
// quick_softmax() accepts only running maxima from -kMaxDistance to `max_above` relative to the reference.
struct BiasReference {
  static constexpr float kMaxDistance = 1024.0f, kMinMagnitude = 512.0f, kMaxMagnitude = 0x1p20f;
  float value = 0.0f, max_above = kMaxDistance;

  BiasReference() = default;
  // The reference for a bias far from 0, if rows keep no much lower bias. Rows may keep a larger one, nearer to 0:
  // `max_above` limits such a maximum, so that its errors do not exceed those without a reference. Near 0, beyond
  // kMaxMagnitude and for NaN, there is none.
  __device__ static BiasReference of(float bias) {
    BiasReference own;
    if (!(fabsf(bias) > kMinMagnitude && fabsf(bias) < kMaxMagnitude)) return own;
    own.value = bias;
    if (bias < 0.0f) own.max_above = fminf(kMaxDistance, 32.0f - 0.5f * bias);
    return own;
  }
};

// A thread block's part of the problem. It lies in shared memory: it is read seldom, and registers are scarce.
struct ForwardTask {
  Sequence s;
  int64_t sequence_index;
  int64_t head; // the first of heads_per_tile
  int64_t kv_head;
  int64_t first_row; // the first query of the block
  int split;
  TileColumns columns;
  ScoreView bias;
  float sink; // sink_score() of `head`, loaded early for the epilogue
  BiasReference reference;
  // For ForwardRows::write_aligned: the first row of the block in out and lse, and the number of its rows.
  void *out;
  float *lse;
  int32_t rows;

  // Sets all but the columns, for one head: rows of a sequence from `first` on.
  __device__ void set(const ForwardParams &params, const Sequence &sequence, int64_t number, int64_t own_head,
                      int64_t first) {
    const fdm_problem &p = params.p;
    s = sequence;
    sequence_index = number;
    head = own_head;
    kv_head = kv_head_of(p, head);
    first_row = first;
    bias = bias_view(p, s, number, head, first / kTileRows);
    sink = sink_score(p, head, bias);
    reference = {};
    set_results(params);
  }

  // Sets the direction of the walk and the reference. Kernels search the maxima of rows in the first block only, and
  // accept few maxima far from the reference. So if biases rise with the column by more than kRise, the distance that
  // a maximum may fall behind, blocks are walked from last to first. The reference is the value nearest to 0 of the
  // largest biases that rows keep, judged by the first and last columns. `columns` and `bias` must be set.
  template <int kColumns> __device__ void set_walk_and_reference() {
    constexpr float kRise = 8.0f;
    constexpr int kListedColumns = 2048; // with fewer, the loads take longer than the reversed walk saves
    reference = {};
    if (!bias.data || bias.per_query || columns.full == 0 || (columns.column_keys && columns.count < kListedColumns))
      return;
    // All three loads overlap.
    const int32_t places[3] = {0, columns.full - 1, columns.count - 1};
    int32_t keys[3];
    uint32_t bits[3];
    float biases[3];
#pragma unroll
    for (int i = 0; i < 3; ++i) keys[i] = column_key(columns, places[i]);
#pragma unroll
    for (int i = 0; i < 3; ++i) bits[i] = bias.load_bits(keys[i]);
#pragma unroll
    for (int i = 0; i < 3; ++i) biases[i] = to_base_2(bias.convert(bits[i]));
    if (biases[1] > biases[0] + kRise) columns.walk_begin = (columns.count - 1) / kColumns;
    const float full_max = fmaxf(biases[0], biases[1]), any_max = fmaxf(full_max, biases[2]);
    if (full_max > 0.0f || any_max < 0.0f) reference = BiasReference::of(full_max > 0.0f ? full_max : any_max);
  }
  __device__ void set_results(const ForwardParams &params) {
    const fdm_tensor &t = params.a.out;
    out = static_cast<uint16_t *>(t.data) + row_offset(t, s, first_row, head);
    lse = static_cast<float *>(params.a.lse.data) + head_major_offset(params.a.lse, s, first_row, head);
    rows = static_cast<int32_t>(min64(s.q_count - first_row, INT32_MAX));
  }
};

// The rows of a warp. usual, general: rows may be of several heads. decode: all warps of the block have the same
// rows, and each its own columns. one_head: heads_per_tile is 1, and the block's tile is that of the plan. one_query:
// rows are heads, and queries take the place of heads, with exchanged strides of Q and of the results
// (lists/sm90/forward.cuh).
enum class RowLayout { usual, general, decode, one_head, one_query };

template <class Element, int kRowTileCount, int kColumnTileCount, int kDimTileCount, RowLayout kRowLayout>
struct ForwardRows : RunningRows<Element, kRowTileCount, kColumnTileCount, kDimTileCount> {
  static constexpr bool kGeneral = kRowLayout == RowLayout::general || kRowLayout == RowLayout::decode;
  static constexpr bool kSharedRows = kRowLayout == RowLayout::decode, kOneQuery = kRowLayout == RowLayout::one_query,
                        kOneHead = kRowLayout == RowLayout::one_head || kOneQuery;
  static constexpr int kRowTiles = kRowTileCount, kColumnTiles = kColumnTileCount, kDimTiles = kDimTileCount;
  using Running = RunningRows<Element, kRowTileCount, kColumnTileCount, kDimTileCount>;
  using Running::kSlack, Running::scores, Running::out, Running::maximum, Running::sum;

  const ForwardParams &params;
  const ForwardTask *task;

  __device__ ForwardRows(const ForwardParams &parameters, const ForwardTask &own_task)
      : params(parameters), task(&own_task) {}

  // Row r of the block is query r / heads_per_tile of head r % heads_per_tile.
  __device__ int query_of_block(int r) const { return kOneHead ? r : int(uint32_t(r) * params.heads_reciprocal >> 16); }
  __device__ int64_t query(int r) const { return task->first_row + query_of_block(r); }
  __device__ int64_t head(int r) const {
    return task->head + (kOneHead ? 0 : r - query_of_block(r) * params.heads_per_tile);
  }
  // The offset in elements of row r from the first row of the block, in a (B, rows, heads, D) tensor.
  __device__ int64_t offset_in_block(const fdm_tensor &t, int r) const {
    const uint32_t query = query_of_block(r), head = uint32_t(r) - query * params.heads_per_tile;
    return query * t.stride[1] + head * t.stride[2];
  }
  // The same row in the plan's tile, which several thread blocks may share.
  __device__ int row_of_tile(int r) const { return kOneHead ? r : int(query(r) - task->columns.first_row); }
  __device__ bool exists(int r) const { return query(r) < task->s.q_count; }
  // The row of the block that this thread accumulates in tile m of the warp, half 0 or 1.
  __device__ static int row(int m, int half) {
    return (kSharedRows ? 0 : threadIdx.x / 32 * (16 * kRowTiles)) + 16 * m + accumulator_row(half);
  }

  // Applies scale, softcap and bias to the scores, to base 2, and sets dropped pairs to -inf. `partial`: some pairs
  // may be dropped. row_bias reads a bias per query, like RowBiasReader; its values for absent rows and keys are
  // ignored.
  template <class Slot, class RowBias>
  __device__ void finish_scores(const Slot &slot, bool partial, const RowBias &row_bias) {
    if (params.p.softcap > 0)
      add_column_bias<true>(slot);
    else
      add_column_bias<false>(slot);
    if constexpr (kGeneral)
      if (task->bias.per_query) add_row_bias(row_bias);
    if (partial) drop_columns(slot);
  }
  template <class Slot> __device__ void finish_scores(const Slot &slot, bool partial) {
    static_assert(!kGeneral);
    finish_scores(slot, partial, nullptr);
  }

  template <bool kHasSoftcap, class Slot> __device__ void add_column_bias(const Slot &slot) {
#pragma unroll
    for (int n = 0; n < kColumnTiles; ++n) {
      const float2 bias = *reinterpret_cast<const float2 *>(&slot.bias[8 * n + accumulator_column()]);
#pragma unroll
      for (int m = 0; m < kRowTiles; ++m)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          float slope;
          scores[m][n][i] = params.factors.score<kHasSoftcap>(scores[m][n][i], i % 2 ? bias.y : bias.x, &slope);
        }
    }
  }

  template <class RowBias> __device__ void add_row_bias(const RowBias &row_bias) {
#pragma unroll
    for (int n = 0; n < kColumnTiles; ++n) {
      const int column = 8 * n + accumulator_column();
      const auto shifts = row_bias.shifts(column);
      for_pairs<kRowTiles>([&](int m, int half) {
        const float2 bias = row_bias.elements(m, half, column, shifts);
        float &s = scores[m][n][2 * half], &t = scores[m][n][2 * half + 1];
        s = bias.x == -INFINITY ? bias.x : with_row_bias(s, bias.x);
        t = bias.y == -INFINITY ? bias.y : with_row_bias(t, bias.y);
      });
    }
  }

  template <class Slot> __device__ void drop_columns(const Slot &slot) {
    if (kOneHead || params.heads_per_tile == 1)
      drop_columns_of<true>(slot);
    else
      drop_columns_of<false>(slot);
  }
  // kSameHead: all rows of the block are of one head, so those of a warp share a word.
  template <bool kSameHead, class Slot> __device__ void drop_columns_of(const Slot &slot) {
    static_assert(kRowTiles <= 2, "a word has the bits of 32 rows");
    int rows[kRowTiles][2];
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m)
#pragma unroll
      for (int half = 0; half < 2; ++half)
        rows[m][half] = kSameHead ? row_of_tile(row(0, 0)) + 16 * m + 8 * half : row_of_tile(row(m, half));
#pragma unroll
    for (int n = 0; n < kColumnTiles; ++n) {
      uint2 word;
#pragma unroll
      for (int m = 0; m < kRowTiles; ++m)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int r = rows[m][half];
          if (!kSameHead || (m == 0 && half == 0))
            word = *reinterpret_cast<const uint2 *>(&slot.word[r / 32 % 4][8 * n + accumulator_column()]);
          if (!(word.x >> (r % 32) & 1)) scores[m][n][2 * half] = -INFINITY;
          if (!(word.y >> (r % 32) & 1)) scores[m][n][2 * half + 1] = -INFINITY;
        }
    }
  }

  // The largest sum of a thread and row in quick_softmax() if no score exceeds the maximum by more than kSlack.
  static constexpr float kSumLimit = 2 * kColumnTiles * 256.0f;
  static_assert(kSlack == 8.0f);

  // Sets the maximum to that of these products. `scale` converts them to base-2 scores relative to the reference.
  __device__ void find_maximum(float scale, const BiasReference &reference) {
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float largest = -INFINITY;
#pragma unroll
        for (int n = 0; n < kColumnTiles; ++n)
          largest = fmaxf(largest, fmaxf(scores[m][n][2 * half], scores[m][n][2 * half + 1]));
        maximum[m][half] = fmaf(ptx::row_max(largest), scale, reference.value);
      }
  }

  // Turns products into probabilities relative to the current running maximum. `scale` converts products to base-2
  // scores relative to the reference. `added` receives the sums, which are not added yet. If one exceeds kSumLimit or
  // is NaN, the maximum must be searched.
  __device__ void quick_softmax(float scale, const BiasReference &reference, float (&added)[2 * kRowTiles]) {
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float top = maximum[m][half] - reference.value;
        // If a row has no maximum yet, any score makes infinity.
        const float shift = top >= -BiasReference::kMaxDistance && top <= reference.max_above ? top
                            : top == -INFINITY                                                ? -3.4e38f
                                                                                              : NAN;
        float sums[2] = {0.0f, 0.0f};
#pragma unroll
        for (int n = 0; n < kColumnTiles; ++n)
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            float &s = scores[m][n][2 * half + i];
            s = ptx::exp2_approximate(fmaf(s, scale, -shift));
            sums[i] += s;
          }
        added[2 * m + half] = sums[0] + sums[1];
      }
  }

  __device__ void finish() {
    if (!__any_sync(0xffffffffu, this->finish_sums())) return;
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        // A row without a kept key has a NaN sum if its query has a NaN: its keys are zeros here, or masked by adding
        // -inf.
        if (isnan(sum[m][half]) && !has_kept_key(row(m, half))) clear_row(m, half);
      }
  }

  __device__ void clear_row(int m, int half) {
    maximum[m][half] = -INFINITY;
    sum[m][half] = 0.0f;
#pragma unroll
    for (int d = 0; d < kDimTiles; ++d) out[m][d][2 * half] = out[m][d][2 * half + 1] = 0.0f;
  }

  // Whether row r keeps a key. If it does, the first column mostly shows it.
  __device__ bool has_kept_key(int r) const {
    if constexpr (kOneQuery) return true; // the words drop listed columns without a key
    const TileColumns &columns = task->columns;
    const int tile_row = row_of_tile(r), part = tile_row / 32;
#pragma unroll 1
    for (int32_t c = 0; exists(r) && c < columns.count; ++c) {
      const int32_t key = column_key(columns, c);
      if (task->bias.data && task->bias.load(query(r), key) == -INFINITY) continue;
      const ColumnEntry entry = fetch_column(columns, task->bias, c, key);
      const RowWord word = column_word(columns, c, key, entry.start, entry.end, entry.word);
      uint32_t bits = 0;
#pragma unroll
      for (int p = 0; p < kTileRows / 32; ++p) bits = p == part ? word.part[p] : bits;
      if (bits >> (tile_row % 32) & 1) return true;
    }
    return false;
  }

  __device__ float sink(int r) const {
    if constexpr (kOneQuery) return exists(r) ? sink_score(params.p, task->s.q_begin + query(r)) : -INFINITY;
    if constexpr (kOneHead) return task->sink;
    return params.heads_per_tile == 1 ? task->sink : sink_score(params.p, head(r), task->bias);
  }

  // The epilogue of kernels of one head whose rows can be written 16 bytes at a time: normalized rows and their LSE.
  __device__ void write_aligned() const {
    store_rows<RowPart::rounded>(task->out);
    if (!present(params.a.out_rest)) return;
    const auto place = static_cast<Element *>(task->out) - static_cast<Element *>(params.a.out.data);
    store_rows<RowPart::rest>(static_cast<uint8_t *>(params.a.out_rest.data) + place);
  }

  // Stores rounded rows and their LSE, or the rests of the rows. Only the sums stay live between the two calls.
  template <RowPart kPart> __device__ void store_rows(void *first_row) const {
    static_assert(kOneHead && kRowTiles == 1);
    const int value_dim = int(params.p.v.shape[3]);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int r = row(0, half);
      const float total = sum[0][half], top = maximum[0][half];
      const float inverse = __fdividef(1.0f, total + ptx::exp2_approximate(sink(r) - top));
      const bool exists = r < task->rows, blank = total == 0.0f;
      auto *out_row = static_cast<StoredPart<kPart> *>(first_row) + r * params.a.out.stride[1];
#pragma unroll
      for (int d = 0; d < kDimTiles; d += 4) {
        uint32_t words[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const float *sums = out[0][d + i];
          const float low = sums[2 * half] * inverse, high = sums[2 * half + 1] * inverse;
          const uint32_t both =
              kPart == RowPart::rounded ? ptx::pack<Element>(low, high) : pack_rests<Element>(low, high);
          words[i] = blank ? 0u : both;
        }
        transpose_quad(words);
        const int column = 8 * (d + int(threadIdx.x) % 4);
        if (exists && column < value_dim) store_part<kPart>(out_row + column, words);
      }
      if (kPart == RowPart::rounded && exists && threadIdx.x % 4 == 0)
        task->lse[r * params.a.lse.stride[2]] =
            blank ? -INFINITY : (top + ptx::log2_approximate(total)) * (1.0f / kLog2E);
    }
  }

  // The epilogue of a split writes unnormalized rows with their maximum and sum.
  __device__ void write_partial() const {
    const int64_t rows = partial_rows(params.p);
    const int head_dim = int(params.p.head_dim);
    for_pairs<kRowTiles>([&](int m, int half) {
      const int r = row(m, half);
      if (!exists(r)) return;
      const int64_t partial_row =
          task->split * rows + (task->sequence_index * params.p.heads + head(r)) * params.p.queries + query(r);
      for_pairs<kDimTiles>([&](int d, int i) {
        const int column = 8 * d + accumulator_column() + i;
        if (column < head_dim) params.partials.out[partial_row * head_dim + column] = out[m][d][2 * half + i];
      });
      if (threadIdx.x % 4 == 0) {
        params.partials.max[partial_row] = maximum[m][half];
        params.partials.sum[partial_row] = sum[m][half];
      }
    });
  }
};

} // namespace fdm::cuda
