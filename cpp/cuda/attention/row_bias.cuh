// SPDX-License-Identifier: BSD-3-Clause
// The gradient of a bias with a row for each query: one block of threads for a tile of rows of one (batch, head) of the
// bias.
//
// It walks the keys in order, a block at a time, and sums dS of a block over the query heads and batches that share its
// elements in registers; then it writes them, kept or not. So every element is written once, and nothing but the
// gradient itself has a size of queries times keys.
#pragma once

#include "products.cuh"
#include "score.cuh"

namespace fdm::cuda {

template <class ElementType, int kHeadDimension, int kRowCount, int kColumnCount, int kWarpCount> struct RowBiasConfig {
  using Element = ElementType;
  static constexpr int kHeadDim = kHeadDimension, kRows = kRowCount, kColumns = kColumnCount, kWarps = kWarpCount;
  static constexpr int kThreads = 32 * kWarps;
  using Tile = SharedTile<kHeadDim>;
  static constexpr int kRowBytes = Tile::bytes(kRows), kKeyBytes = Tile::bytes(kColumns);
  static_assert(kRows == 16 * kWarps && kRows % 32 == 0 && kTileRows % kRows == 0 && kColumns <= kThreads);
};

struct RowBiasTask {
  int64_t first_batch, batches, first_head, heads; // the sequences and query heads that share the bias
  int64_t first_row;
  int64_t columns;     // of the bias that belong to the rows
  int64_t bias_offset; // of the first row of the tile
};

template <class Config> struct RowBiasShared {
  alignas(1024) char q[Config::kRowBytes];
  char dout[Config::kRowBytes], k[Config::kKeyBytes], v[Config::kKeyBytes];
  uint32_t word[Config::kRows / 32][Config::kColumns];
  RowBiasTask task;
};

template <class Config> struct RowBiasBlock {
  using Element = typename Config::Element;
  using Tile = typename Config::Tile;
  static constexpr int kColumns = Config::kColumns, kHeadDim = Config::kHeadDim, kRows = Config::kRows;
  static constexpr int kColumnTiles = kColumns / 8;

  const BackwardParams &params;
  RowBiasShared<Config> &shared;
  uint32_t q_base, dout_base, k_base, v_base;
  float sums[1][kColumnTiles][4];
  float of_row[2] = {0.0f, 0.0f}; // all keys share an element
  int64_t loaded = -1;            // the source of Q and dO

  __device__ RowBiasBlock(const BackwardParams &parameters, RowBiasShared<Config> &memory)
      : params(parameters), shared(memory) {
    q_base = ptx::shared_address(shared.q), dout_base = ptx::shared_address(shared.dout);
    k_base = ptx::shared_address(shared.k), v_base = ptx::shared_address(shared.v);
  }

  struct Source {
    Sequence s;
    int64_t sequence_index, head;
  };
  __device__ Source source(int64_t number) const {
    const RowBiasTask &task = shared.task;
    const int64_t sequence_index = task.first_batch + number / task.heads;
    return {sequence(params.p, sequence_index), sequence_index, task.first_head + number % task.heads};
  }
  __device__ static int row(int half) { return threadIdx.x / 32 * 16 + accumulator_row(half); }

  // Which rows of the tile keep the columns of a block. Returns whether any does.
  __device__ bool load_words(const Source &of, int64_t first_column) {
    const fdm_problem &p = params.p;
    const int64_t key = first_column + threadIdx.x;
    uint32_t any = 0;
    if (int(threadIdx.x) < kColumns) {
      RowRange rows{0, 0};
      if (key < of.s.k_count) rows = rows_of_key(p, of.s, of.head, key);
      const int first = int(shared.task.first_row);
      RowWord keep;
      if (rows.first < rows.past && mask_kind(p) == FDM_MASK_ROWS) {
        int64_t bytes;
        const Plan plan = lay_out_plan(p, const_cast<void *>(params.plan), &bytes);
        keep = tile_words(p, plan, of.s, of.sequence_index, of.head, first / kTileRows)[key];
      } else {
#pragma unroll
        for (uint32_t &part : keep.part) part = ~0u;
      }
#pragma unroll
      for (int w = 0; w < kRows / 32; ++w) {
        const int at = first + 32 * w;
        const uint32_t word = row_bits(rows.first - at, rows.past - at);
        // A tile of kTileRows rows holds several of this one; which, is known at run time.
        uint32_t mask = 0;
#pragma unroll
        for (int part = 0; part < kTileRows / 32; ++part)
          if (part == at % kTileRows / 32) mask = keep.part[part];
        shared.word[w][threadIdx.x] = word & mask;
        any |= word & mask;
      }
    }
    return __syncthreads_or(any);
  }

  __device__ void load_tiles(const Source &of, int64_t number, int64_t first_column) {
    const fdm_problem &p = params.p;
    const int head_dim = int(p.head_dim);
    const auto copy_keys = [&](const fdm_tensor &t, uint32_t to) {
      const auto *base = static_cast<const uint16_t *>(t.data) + of.s.batch * t.stride[0] +
                         (of.s.k_begin + first_column) * t.stride[1] + of.head / group_size(p) * t.stride[2];
      copy_rows<Tile, kColumns, Config::kThreads>(to, params.aligned, head_dim, t.stride[3],
                                                  [&](int c) -> const uint16_t * {
                                                    uint32_t any = 0;
#pragma unroll
                                                    for (int w = 0; w < kRows / 32; ++w) any |= shared.word[w][c];
                                                    return any ? base + c * t.stride[1] : kZeroRow;
                                                  });
    };
    copy_keys(p.k, k_base), copy_keys(p.v, v_base);
    if (loaded == number) return;
    loaded = number;
    const auto copy = [&](const fdm_tensor &t, uint32_t to, bool aligned) {
      const auto *base = static_cast<const uint16_t *>(t.data) + row_offset(t, of.s, shared.task.first_row, of.head);
      copy_rows<Tile, kRows, Config::kThreads>(to, aligned, head_dim, t.stride[3], [&](int r) -> const uint16_t * {
        return statistics(of, r).empty() ? kZeroRow : base + r * t.stride[1];
      });
    };
    copy(p.q, q_base, params.aligned), copy(params.a.dout, dout_base, params.dout_aligned);
  }

  __device__ RowStatistics statistics(const Source &of, int r) const {
    if (shared.task.first_row + r >= of.s.q_count) return {INFINITY, 0.0f};
    return row_statistics(params, of.s, of.head, shared.task.first_row + r);
  }

  template <bool kCap> __device__ void add(const Source &of, int64_t first_column) {
    const RowStatistics rows[2] = {statistics(of, row(0)), statistics(of, row(1))};
    float scores[1][kColumnTiles][4], gradients[1][kColumnTiles][4];
    clear(scores), clear(gradients);
    const int first = threadIdx.x / 32 * 16;
    multiply_rows<Element, kHeadDim>(scores, Tile::left(q_base, first), Tile::right_rows(k_base));
    multiply_rows<Element, kHeadDim>(gradients, Tile::left(dout_base, first), Tile::right_rows(v_base));
    const ScoreFactors factors(params.p);
    const ScoreView bias = score_view(params.p, params.p.bias, of.s, of.head);
#pragma unroll
    for (int n = 0; n < kColumnTiles; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int column = 8 * n + accumulator_column() + i % 2, r = row(i / 2);
        if (!(shared.word[r / 32][column] >> (r % 32) & 1)) continue;
        const float b = to_base_2(bias.load(shared.task.first_row + r, first_column + column));
        if (b == -INFINITY) continue;
        float slope;
        const float x = factors.score<kCap>(scores[0][n][i], b, &slope) - rows[i / 2].lse;
        sums[0][n][i] += ptx::exp2_approximate(fminf(x, 0.0f)) * (gradients[0][n][i] - rows[i / 2].delta);
      }
  }

  __device__ void write(int64_t first_column) {
    const RowBiasTask &task = shared.task;
    const fdm_tensor &t = params.a.dbias;
    const int64_t rows = sequence(params.p, task.first_batch).q_count - task.first_row;
#pragma unroll
    for (int n = 0; n < kColumnTiles; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int64_t column = first_column + 8 * n + accumulator_column() + i % 2;
        if (t.shape[3] == 1) {
          of_row[i / 2] += sums[0][n][i];
        } else if (column < task.columns && row(i / 2) < rows) {
          store_element(t, task.bias_offset + row(i / 2) * t.stride[2] + column * t.stride[3], sums[0][n][i]);
        }
      }
  }

  __device__ void write_rows() {
    const RowBiasTask &task = shared.task;
    const fdm_tensor &t = params.a.dbias;
    if (t.shape[3] != 1) return;
    const int64_t rows = sequence(params.p, task.first_batch).q_count - task.first_row;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float sum = ptx::row_sum(of_row[half]);
      if (threadIdx.x % 4 == 0 && row(half) < rows) store_element(t, task.bias_offset + row(half) * t.stride[2], sum);
    }
  }

  __device__ void run() {
    const RowBiasTask &task = shared.task;
    const int64_t sources = task.batches * task.heads;
    for (int64_t column = 0; column < task.columns; column += kColumns) {
      clear(sums);
      for (int64_t number = 0; number < sources; ++number) {
        const Source of = source(number);
        if (load_words(of, column)) {
          load_tiles(of, number, column);
          ptx::commit_copies();
          ptx::wait_copies<0>();
          __syncthreads();
          if (params.p.softcap > 0)
            add<true>(of, column);
          else
            add<false>(of, column);
        }
        __syncthreads(); // nobody reads the words and tiles any more
      }
      write(column);
    }
    write_rows();
  }
};

template <class Config>
__global__ void __launch_bounds__(Config::kThreads) row_bias_kernel(const __grid_constant__ BackwardParams params) {
  extern __shared__ char dynamic_shared[];
  auto &shared = *reinterpret_cast<RowBiasShared<Config> *>(dynamic_shared);
  const fdm_problem &p = params.p;
  const fdm_tensor &t = params.a.dbias;
  const int64_t tiles = ceil_div(p.queries, Config::kRows);
  const int64_t head = blockIdx.x % t.shape[1], number = blockIdx.x / t.shape[1];
  const int64_t first_row = (tiles - 1 - number % tiles) * Config::kRows, batch = number / tiles;
  const Sequence s = sequence(p, batch);
  if (first_row >= s.q_count) return;
  if (threadIdx.x == 0) {
    const bool shares_batch = !is_varlen(p) && t.shape[0] == 1;
    const int64_t heads = p.heads / t.shape[1];
    shared.task = {batch,
                   shares_batch ? p.batch : 1,
                   head * heads,
                   heads,
                   first_row,
                   t.shape[3] == 1 ? s.k_count : t.shape[3],
                   (is_varlen(p) ? 0 : batch) * t.stride[0] + head * t.stride[1] +
                       (s.q_begin + first_row) * t.stride[2]};
  }
  __syncthreads();
  RowBiasBlock<Config>(params, shared).run();
}

} // namespace fdm::cuda
