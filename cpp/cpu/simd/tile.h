// SPDX-License-Identifier: BSD-3-Clause
// A tile of query rows and the scores of one block of its columns: the common part of forward and backward.
#pragma once

#include "../scratch.h"
#include "gather.h"
#include "gemm.h"
#include "listed.h"

namespace fdm::cpu::FDM_SIMD_NAMESPACE {
namespace {

constexpr float kInfinity = __builtin_inff(), kNan = __builtin_nanf("");

// A gathered block of at most kBlockKeys columns of a tile.
struct Block {
  int64_t count, padded;        // padded to whole vectors
  bool masked;                  // true if a row drops one of the columns
  int32_t low[kBlockKeys];      // bit r: row r keeps the column, for rows 0 ... 31
  int32_t high[kBlockKeys];     // for rows 32 ... 63
  int32_t *index;               // key, or -1 if the bias drops it from all rows of all heads: such keys are not read
  const int32_t *list_position; // of each column, if rows have key lists
  uint8_t *dropped;             // for each bias head: true if it drops the column from all rows
  uint8_t *mixed;               // true if a head drops a column that another head keeps
};

struct Tile {
  const fdm_problem &p;
  const void *plan;
  TileTask task;
  TileBuffers buffers;
  TileColumns columns;
  int64_t dim;     // padded
  bool reads_rows; // K and V of a block are in key_rows and value_rows, not in buffers
  Block block;
  RowPointers key_rows, value_rows;

  Tile(const fdm_problem &problem, const void *columns_plan, const TileTask &t, bool backward, void *scratch)
      : p(problem), plan(columns_plan), task(t), dim(padded_head_dim(problem)),
        reads_rows(has_key_lists(problem) && t.heads < kMinHeadsToTranspose) {
    int64_t bytes;
    buffers = carve_tile_buffers(p, backward, scratch, &bytes);
  }

  // Calls body() for each tile of the task: the task itself, or each of its rows with key lists. Those rows have
  // different columns. The next row of the tensors in `next`, such as q, is too far away for the hardware prefetcher,
  // so it is prefetched here.
  template <int kTensors, class Body> void for_each(const fdm_tensor *const (&next)[kTensors], const Body &body) {
    const int64_t past = task.first_row + task.rows;
    if (has_key_lists(p)) task.rows = 1;
    for (; task.first_row < past; task.first_row += task.rows) {
      tile_columns(p, plan, task.sequence, task.sequence_index, task.head, task.first_row, task.rows, buffers.columns,
                   &columns);
      find_references();
      if (task.first_row + 1 < past && has_key_lists(p))
        for (const fdm_tensor *t : next) prefetch_row(*t, task.first_row + 1);
      body();
    }
  }

  // The value that is subtracted in float64 from a float64 bias: the largest finite bias of the tile's columns, so
  // that the differences that matter are small. Scores and derived values are relative to it. 0 for other biases.
  double reference(int64_t g) const { return buffers.references[bias_heads(p, task.heads) > 1 ? g : 0]; }

  int64_t row_count() const { return task.heads * task.rows; }
  // Heads whose scores are held at a time.
  int64_t heads_at_once() const { return max64(1, kBlockRows / task.rows); }

  // Loads rows of q, out or dout, heads first, into a contiguous buffer.
  void load_rows(const fdm_tensor &t, float *out) const {
    for (int64_t g = 0; g < task.heads; ++g)
      for (int64_t i = 0; i < task.rows; ++i, out += dim)
        load_padded_row(t, row_offset(t, task.sequence, task.first_row + i, task.head + g), p.head_dim, dim, out);
  }

  float *bias_row(int64_t g, int64_t i) const {
    const int64_t heads = summed_bias_heads(p, task.heads), rows = bias_rows(p, task.rows);
    return buffers.bias + ((heads > 1 ? g : 0) * rows + (rows > 1 ? i : 0)) * kBlockKeys;
  }

  int64_t block_count() const { return ceil_div(columns.count, kBlockKeys); }

  // Makes a block the current one. Its column data lasts until another block of the same slot is loaded.
  void open_block(int64_t number) {
    const int64_t slot = min64(number, buffers.saved_blocks), heads = summed_bias_heads(p, task.heads);
    block.count = min64(kBlockKeys, columns.count - number * kBlockKeys);
    block.padded = round_up(block.count, kLanes);
    block.index = buffers.index + slot * kBlockKeys;
    block.list_position = columns.list_position ? columns.list_position + number * kBlockKeys : nullptr;
    block.dropped = buffers.dropped + slot * heads * kBlockKeys;
    block.mixed = buffers.mixed + slot;
  }

  // Loads bias, masks and K of a block. The passes load V, which they need in other layouts.
  void load_block(int64_t number) {
    open_block(number);
    const int64_t first = number * kBlockKeys;
    block.masked = first + block.count > columns.full;
    for (int64_t c = 0; c < block.count; ++c) block.index[c] = columns.index[first + c];
    if (block.masked)
      for (int64_t c = 0; c < block.padded; ++c) {
        const uint64_t word = c < block.count ? column_word(columns, first + c) : 0;
        block.low[c] = int32_t(uint32_t(word));
        block.high[c] = int32_t(uint32_t(word >> 32));
      }
    load_bias();
    find_dropped();
    load_keys();
    if (!reads_rows) transpose(buffers.keys, block.padded, dim, buffers.keys_t, kBlockKeys);
  }

  void load_keys() { load_key_rows(p.k, buffers.keys, key_rows); }
  void load_values() { load_key_rows(p.v, buffers.values, value_rows); }

  // out += weights K, or weights V, for heads from `head` on. `spare` has room for a copy of the block.
  void add_weighted(int64_t head, int64_t heads, const float *weights, const float *rows, float *spare,
                    const RowPointers &row_pointers, float *out) const {
    if (reads_rows) {
      for (int64_t h = head; h < head + heads; ++h, weights += kBlockKeys) {
        if (!*block.mixed) {
          add_rows_to(block.count, dim, weights, row_pointers, out + h * dim);
          continue;
        }
        RowPointers kept;
        for (int64_t c = 0; c < block.count; ++c)
          kept[c] = block.dropped[h * kBlockKeys + c] ? kZeroRow : row_pointers[c];
        add_rows_to(block.count, dim, weights, kept, out + h * dim);
      }
      return;
    }
    with_kept_rows(head, heads, rows, spare, [&](int64_t part, int64_t parts, const float *kept) {
      product(parts * task.rows, dim, block.count, {weights + (part - head) * task.rows * kBlockKeys, kBlockKeys, 1},
              kept, dim, out + part * task.rows * dim, dim, true);
    });
  }

  // out (heads x columns) = x K' or x V'; `transposed` is the transpose of the block.
  void multiply(int64_t head, int64_t heads, const float *x, const float *transposed, const RowPointers &row_pointers,
                float *out) const {
    const float *const first = x + head * task.rows * dim;
    if (!reads_rows)
      return product(heads * task.rows, block.padded, dim, {first, dim, 1}, transposed, kBlockKeys, out, kBlockKeys,
                     false);
    for (int64_t h = 0; h < heads; ++h) dot_rows(block.count, dim, first + h * dim, row_pointers, out + h * kBlockKeys);
  }

  // Calls body(head, heads, rows) for `heads` heads from `head` on. Each head sees zeros for the rows of K or V that
  // it drops. Another head keeps those rows, so they are loaded, and 0 times a non-finite value is not 0. `spare` has
  // room for such a copy.
  template <class Body>
  void with_kept_rows(int64_t head, int64_t heads, const float *rows, float *spare, const Body &body) const {
    if (!*block.mixed) return body(head, heads, rows);
    for (int64_t h = head; h < head + heads; ++h) {
      for (int64_t c = 0; c < block.count; ++c) {
        float *row = spare + c * dim;
        if (block.dropped[h * kBlockKeys + c])
          zero(row, dim);
        else
          for (int64_t d = 0; d < dim; d += kLanes) store(row + d, load(rows + c * dim + d));
      }
      body(h, 1, spare);
    }
  }

  // Computes the scores of `heads` heads from `head` on: scaled, capped, biased, -inf where dropped. If tanh is not
  // null, it receives the hyperbolic tangents of the softcap, which the backward pass needs.
  void make_scores(int64_t head, int64_t heads, float *scores, float *tanh) const {
    multiply(head, heads, buffers.q, buffers.keys_t, key_rows, scores);
    for (int64_t g = 0; g < heads; ++g)
      for (int64_t i = 0; i < task.rows; ++i) {
        const int64_t offset = (g * task.rows + i) * kBlockKeys;
        if (p.softcap > 0)
          finish_row<true>(i, bias_row(head + g, i), scores + offset, tanh ? tanh + offset : nullptr);
        else
          finish_row<false>(i, bias_row(head + g, i), scores + offset, nullptr);
      }
  }

private:
  // Always inline: GCC treats a function that only prefetches as free of effects and drops its calls.
  __attribute__((always_inline)) void prefetch_row(const fdm_tensor &t, int64_t row) const {
    constexpr int64_t kLine = 64;
    const int64_t element = dtype_size(t.dtype), bytes = p.head_dim * element;
    if (t.stride[3] != 1) return;
    for (int64_t g = 0; g < task.heads; ++g) {
      const char *const first =
          static_cast<const char *>(t.data) + row_offset(t, task.sequence, row, task.head + g) * element;
      for (int64_t byte = 0; byte < bytes; byte += kLine) __builtin_prefetch(first + byte);
    }
  }

  void load_key_rows(const fdm_tensor &t, float *out, RowPointers &rows) const {
    if (reads_rows)
      find_rows(p, t, task, block.index, block.count, out, rows);
    else
      gather_keys(p, t, task, block.index, block.count, block.padded, out);
  }

  void find_references() {
    for (int64_t g = 0; g < bias_heads(p, task.heads); ++g) {
      buffers.references[g] = 0.0;
      if (!present(p.bias) || p.bias.dtype != FDM_FLOAT64) continue;
      const Matrix m = score_matrix(p, p.bias, task.sequence, task.head + g, dtype_size(p.bias.dtype));
      constexpr double kLowest = -__builtin_inf();
      double largest = kLowest;
      for (int64_t c = 0; c < columns.count; ++c) {
        const double bias = load_double(m.base, FDM_FLOAT64, columns.index[c] * m.col);
        if (bias > largest && bias < -kLowest) largest = bias;
      }
      if (largest > kLowest) buffers.references[g] = largest;
    }
  }

  // Loads a float64 bias relative to its reference. A finite bias stays finite.
  void load_relative(const Matrix &m, double reference, float *out) const {
    constexpr float kLargest = __FLT_MAX__;
    for (int64_t c = 0; c < block.count; ++c) {
      const double bias = load_double(m.base, FDM_FLOAT64, block.index[c] * m.col);
      const float relative = float(bias - reference);
      out[c] = relative == -kInfinity && bias > -__builtin_inf() ? -kLargest : relative;
    }
  }

  void load_bias() {
    const int64_t heads = summed_bias_heads(p, task.heads), rows = bias_rows(p, task.rows);
    if (!present(p.bias))
      for (int64_t g = 0; g < heads; ++g) {
        float *out = buffers.bias + g * kBlockKeys;
        zero(out, block.count);
        for (int64_t c = block.count; c < block.padded; ++c) out[c] = -kInfinity;
      }
    else
      load_own_bias(heads, rows);
    if (present(p.index_bias)) add_index_bias(heads);
  }

  void add_index_bias(int64_t heads) {
    const fdm_tensor &t = p.index_bias;
    for (int64_t g = 0; g < heads; ++g) {
      float *out = buffers.bias + g * kBlockKeys;
      const int64_t row = head_major_offset(t, task.sequence, task.first_row, head_index(p, t, task.head + g));
      for (int64_t c = 0; c < block.count; ++c)
        out[c] += load_scalar(t.data, t.dtype, row + block.list_position[c] * t.stride[3]);
    }
  }

  void load_own_bias(int64_t heads, int64_t rows) {
    const bool run = is_run(block.index, block.count);
    for (int64_t g = 0; g < heads; ++g) {
      const Matrix m = score_matrix(p, p.bias, task.sequence, task.head + g, dtype_size(p.bias.dtype));
      for (int64_t i = 0; i < rows; ++i) {
        float *out = buffers.bias + (g * rows + i) * kBlockKeys;
        const int64_t row = (task.first_row + i) * m.row;
        if (p.bias.dtype == FDM_FLOAT64)
          load_relative(m, reference(g), out);
        else if (run)
          load_elements(m.base, p.bias.dtype, row + block.index[0] * m.col, m.col, block.count, out);
        else
          for (int64_t c = 0; c < block.count; ++c)
            out[c] = load_scalar(m.base, p.bias.dtype, row + block.index[c] * m.col);
        for (int64_t c = block.count; c < block.padded; ++c) out[c] = -kInfinity;
      }
    }
  }

  // Finds the columns that each head drops: no row keeps the column under both bias and mask.
  void find_dropped() {
    *block.mixed = 0;
    if (!present(p.bias) && !present(p.index_bias)) return;
    const int64_t heads = summed_bias_heads(p, task.heads), rows = bias_rows(p, task.rows);
    const bool by_row = block.masked && rows > 1;
    for (int64_t g = 0; g < heads; ++g) {
      uint8_t *dropped = block.dropped + g * kBlockKeys;
      const float *bias = buffers.bias + g * rows * kBlockKeys;
      for (int64_t c = 0; c < block.padded; c += kLanes) {
        vint kept{};
        for (int64_t i = 0; i < rows; ++i) {
          vint keeps = load(bias + i * kBlockKeys + c) != -kInfinity;
          if (by_row) keeps &= (load((i < 32 ? block.low : block.high) + c) & int32_t(uint32_t(1) << (i % 32))) != 0;
          kept |= keeps;
        }
        for (int lane = 0; lane < kLanes; ++lane) dropped[c + lane] = kept[lane] == 0;
      }
    }
    for (int64_t c = 0; c < block.count; ++c) {
      int64_t droppers = 0;
      for (int64_t g = 0; g < heads; ++g) droppers += block.dropped[g * kBlockKeys + c];
      if (droppers == heads)
        block.index[c] = -1;
      else if (droppers > 0)
        *block.mixed = 1;
    }
  }

  template <bool Capped> void finish_row(int64_t row, const float *bias, float *scores, float *tanh) const {
    const int32_t *words = row < 32 ? block.low : block.high;
    const int32_t bit = int32_t(uint32_t(1) << (row % 32));
    for (int64_t c = 0; c < block.padded; c += kLanes) {
      vfloat s = load(scores + c) * p.scale;
      if constexpr (Capped) {
        const vfloat t = hyperbolic_tangent(s / p.softcap);
        if (tanh) store(tanh + c, t);
        s = t * p.softcap;
      }
      const vfloat b = load(bias + c);
      s = b == -kInfinity ? b : s + b; // regardless of the score, which may be NaN
      if (block.masked) s = (load(words + c) & bit) != 0 ? s : splat(-kInfinity);
      store(scores + c, s);
    }
  }
};

} // namespace
} // namespace fdm::cpu::FDM_SIMD_NAMESPACE
