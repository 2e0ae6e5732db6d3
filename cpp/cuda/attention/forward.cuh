// SPDX-License-Identifier: BSD-3-Clause
// Forward pass with mma.sync: one block of threads for a tile of query rows of one head.
//
// The block walks the tile's columns, kColumns at a time. K of a block is fetched while the scores of the block before
// it are turned into probabilities and multiplied with V; V is fetched while the scores are computed. Rows of K and V
// are gathered one by one, so kept keys cost the same wherever they lie. Full columns come first, so only the last
// blocks test which rows keep what.
//
// Where a whole group's queries fit one tile (decode), the rows of the tile are those of all heads of the group, which
// read the gathered keys once. Then the columns may also be divided over several blocks (splits), merged by combine.cu.
#pragma once

#include "forward.h"
#include "key_ring.cuh"
#include "products.cuh"
#include "score.cuh"

namespace fdm::cuda {

template <class ElementType, int kHeadDimension, int kRowCount, int kColumnCount, int kWarpCount, bool kIsGeneral>
struct ForwardConfig {
  using Element = ElementType;
  static constexpr int kHeadDim = kHeadDimension, kRows = kRowCount, kColumns = kColumnCount, kWarps = kWarpCount;
  // Also rows that cannot be copied 16 bytes at a time, and a bias with a row for each query: rare, and much code.
  static constexpr bool kGeneral = kIsGeneral;
  static constexpr int kThreads = 32 * kWarps;
  static constexpr int kRowTiles = kRows / kWarps / 16; // of 16 rows, of each warp
  using Tile = SharedTile<kHeadDim>;
  static constexpr int kQBytes = Tile::bytes(kRows), kKeyBytes = Tile::bytes(kColumns);
  static_assert(kRows <= kTileRows && kTileRows % kRows == 0 && kRowTiles >= 1 && kColumns <= kThreads);
};

// A block's part of the problem. It lies in shared memory: it is read seldom, and registers are scarce.
struct ForwardTask {
  Sequence s;
  int64_t sequence_index;
  int64_t head; // the first of heads_per_tile
  int64_t kv_head;
  int64_t first_row; // the first query of the block
  int split;
  TileColumns columns;
  ScoreView bias;
};

template <class Config> struct ForwardShared {
  alignas(1024) char q[Config::kQBytes];
  char k[Config::kKeyBytes], v[Config::kKeyBytes];
  KeyRing<Config::kColumns, Config::kThreads> ring;
  ForwardTask task;
};

template <class Config> struct ForwardBlock {
  using Element = typename Config::Element;
  using Tile = typename Config::Tile;
  using Ring = KeyRing<Config::kColumns, Config::kThreads>;
  static constexpr int kRowTiles = Config::kRowTiles, kColumns = Config::kColumns, kHeadDim = Config::kHeadDim;
  static constexpr int kColumnTiles = kColumns / 8, kDimTiles = kHeadDim / 8;
  static constexpr float kSlack = 8.0f;

  const ForwardParams &params;
  const ForwardTask &task;
  Ring &ring;
  uint32_t q_base, k_base, v_base;
  uint32_t q_fragment, k_fragment, v_fragment;
  float scores[kRowTiles][kColumnTiles][4];
  float out[kRowTiles][kDimTiles][4];
  float maximum[kRowTiles][2], sum[kRowTiles][2];

  __device__ ForwardBlock(const ForwardParams &parameters, ForwardShared<Config> &shared)
      : params(parameters), task(shared.task), ring(shared.ring) {
    q_base = ptx::shared_address(shared.q), k_base = ptx::shared_address(shared.k);
    v_base = ptx::shared_address(shared.v);
    q_fragment = Tile::left(q_base, threadIdx.x / 32 * (16 * kRowTiles));
    k_fragment = Tile::right_rows(k_base), v_fragment = Tile::right_columns(v_base);
  }

  // Row r of the block is query r / heads_per_tile of head r % heads_per_tile.
  __device__ int64_t query(int r) const { return task.first_row + r / params.heads_per_tile; }
  __device__ int64_t head(int r) const { return task.head + r % params.heads_per_tile; }
  __device__ bool exists(int r) const { return query(r) < task.s.q_count; }
  // The accumulator row of this thread: tile m of the warp, half 0 or 1.
  __device__ static int row(int m, int half) {
    return threadIdx.x / 32 * (16 * kRowTiles) + 16 * m + accumulator_row(half);
  }

  __device__ bool aligned() const { return !Config::kGeneral || params.aligned; }

  __device__ void load_queries() const {
    const fdm_tensor &q = params.p.q;
    copy_rows<Tile, Config::kRows, Config::kThreads>(
        q_base, aligned(), int(params.p.head_dim), q.stride[3], [&](int r) -> const uint16_t * {
          return exists(r) ? static_cast<const uint16_t *>(q.data) + row_offset(q, task.s, query(r), head(r))
                           : kZeroRow;
        });
  }

  template <bool kValues> __device__ void load_keys(int block) const {
    const fdm_tensor &t = kValues ? params.p.v : params.p.k;
    const typename Ring::Slot &slot = ring.at(block);
    copy_rows<Tile, kColumns, Config::kThreads>(kValues ? v_base : k_base, aligned(), int(params.p.head_dim),
                                                t.stride[3],
                                                [&](int c) { return kValues ? slot.v_row[c] : slot.k_row[c]; });
  }

  // The column that this thread fetches of the batch of blocks that begins with `block`.
  __device__ static int column(int block) { return block * kColumns + int(threadIdx.x); }
  __device__ void store(int block, const ColumnEntry &entry) {
    store_column<kColumns>(ring.at(block + int(threadIdx.x) / kColumns), params.p, task.s, task.sequence_index,
                           task.kv_head, task.columns, task.bias, column(block), entry);
  }

  // Scaled, capped and biased, to base 2; -inf where not kept.
  __device__ void finish_scores(int block) {
    const typename Ring::Slot &slot = ring.at(block);
    if (params.p.softcap > 0)
      add_column_bias<true>(slot);
    else
      add_column_bias<false>(slot);
    if (Config::kGeneral && task.bias.rows) add_row_bias(slot);
    if ((block + 1) * kColumns > task.columns.full) drop_columns(slot);
  }

  template <bool kCap> __device__ void add_column_bias(const typename Ring::Slot &slot) {
    const ScoreFactors factors(params.p);
#pragma unroll
    for (int n = 0; n < kColumnTiles; ++n) {
      const float2 bias = *reinterpret_cast<const float2 *>(&slot.bias[8 * n + accumulator_column()]);
#pragma unroll
      for (int m = 0; m < kRowTiles; ++m)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          float slope;
          scores[m][n][i] = factors.score<kCap>(scores[m][n][i], i % 2 ? bias.y : bias.x, &slope);
        }
    }
  }

  __device__ void add_row_bias(const typename Ring::Slot &slot) {
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int r = row(m, half);
        if (!exists(r)) continue;
        const ScoreView view =
            params.heads_per_tile == 1 ? task.bias : score_view(params.p, params.p.bias, task.s, head(r));
#pragma unroll
        for (int n = 0; n < kColumnTiles; ++n)
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            const int32_t key = slot.key[8 * n + accumulator_column() + i];
            if (key < 0) continue;
            const float b = to_base_2(view.load(query(r), key));
            float &s = scores[m][n][2 * half + i];
            s = b == -INFINITY ? b : s + b;
          }
      }
  }

  __device__ void drop_columns(const typename Ring::Slot &slot) {
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        // Rows of the plan's tile: several blocks may share one.
        const int r = int(query(row(m, half)) - task.columns.first_row);
#pragma unroll
        for (int n = 0; n < kColumnTiles; ++n) {
          const uint2 word = *reinterpret_cast<const uint2 *>(&slot.word[r / 32 % 4][8 * n + accumulator_column()]);
          if (!(word.x >> (r % 32) & 1)) scores[m][n][2 * half] = -INFINITY;
          if (!(word.y >> (r % 32) & 1)) scores[m][n][2 * half + 1] = -INFINITY;
        }
      }
  }

  // Scores to probabilities, relative to the row's running maximum; what was summed before is scaled to it. The maximum
  // follows only where it falls behind by kSlack: probabilities of up to 2^kSlack do no harm, and most blocks then need
  // not touch the accumulators.
  __device__ void softmax() {
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float largest = maximum[m][half];
#pragma unroll
        for (int n = 0; n < kColumnTiles; ++n)
          largest = fmaxf(largest, fmaxf(scores[m][n][2 * half], scores[m][n][2 * half + 1]));
        largest = ptx::row_max(largest);
        if (largest <= maximum[m][half] + kSlack) largest = maximum[m][half];
        const float shift = largest == -INFINITY ? 0.0f : largest;
        const float factor = ptx::exp2_approximate(maximum[m][half] - shift);
        maximum[m][half] = largest;
        float added = 0.0f;
#pragma unroll
        for (int n = 0; n < kColumnTiles; ++n)
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            float &s = scores[m][n][2 * half + i];
            s = ptx::exp2_approximate(s - shift);
            added += s;
          }
        sum[m][half] = sum[m][half] * factor + added;
        if (__any_sync(0xffffffffu, factor != 1.0f)) {
#pragma unroll
          for (int d = 0; d < kDimTiles; ++d) out[m][d][2 * half] *= factor, out[m][d][2 * half + 1] *= factor;
        }
      }
  }

  __device__ void run(int begin, int end) {
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m)
#pragma unroll
      for (int half = 0; half < 2; ++half) maximum[m][half] = -INFINITY, sum[m][half] = 0.0f;
    clear(out);
    load_queries();
    const TileColumns &columns = task.columns;
    store(begin, fetch_column(columns, task.bias, column(begin), fetch_key(columns, column(begin))));
    int32_t next_key = fetch_key(columns, column(begin + Ring::kBatch));
    __syncthreads();
    if (begin < end) load_keys<false>(begin);
    ptx::commit_copies();
    for (int block = begin; block < end; ++block) {
      ptx::wait_copies<0>();
      __syncthreads(); // K of this block is there; nobody reads V of the last one any more
      load_keys<true>(block);
      ptx::commit_copies();
      const int ahead = block + Ring::kBatch;
      const bool fetch_ahead = (block - begin) % Ring::kBatch == 0 && ahead < end;
      ColumnEntry entry;
      if (fetch_ahead) {
        entry = fetch_column(columns, task.bias, column(ahead), next_key);
        next_key = fetch_key(columns, column(ahead + Ring::kBatch));
      }
      clear(scores);
      multiply_rows<Element, kHeadDim>(scores, q_fragment, k_fragment);
      if (fetch_ahead) store(ahead, entry);
      ptx::wait_copies<0>();
      __syncthreads(); // V is there; nobody reads K any more
      if (block + 1 < end) load_keys<false>(block + 1);
      ptx::commit_copies();
      finish_scores(block);
      softmax();
      multiply_columns<Element, kHeadDim>(out, scores, v_fragment);
    }
    ptx::wait_copies<0>();
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m)
#pragma unroll
      for (int half = 0; half < 2; ++half) sum[m][half] = ptx::row_sum(sum[m][half]);
  }

  __device__ void write() const {
    const fdm_tensor &t = params.a.out;
    const int head_dim = int(params.p.head_dim);
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int r = row(m, half);
        if (!exists(r)) continue;
        const float total = sum[m][half], inverse = total == 0.0f ? 0.0f : 1.0f / total;
        auto *to = static_cast<Element *>(t.data) + row_offset(t, task.s, query(r), head(r));
        write_row(to, t.stride[3], head_dim, out[m], half, inverse);
        if (threadIdx.x % 4 == 0)
          static_cast<float *>(params.a.lse.data)[lse_offset(params.a.lse, task.s, query(r), head(r))] =
              total == 0.0f ? -INFINITY : (maximum[m][half] + log2f(total)) / kLog2E;
      }
  }

  __device__ void write_partial() const {
    const int64_t rows = params.p.batch * params.p.heads * params.p.queries;
    const int head_dim = int(params.p.head_dim);
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int r = row(m, half);
        if (!exists(r)) continue;
        const int64_t at =
            task.split * rows + (task.sequence_index * params.p.heads + head(r)) * params.p.queries + query(r);
#pragma unroll
        for (int d = 0; d < kDimTiles; ++d)
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            const int column = 8 * d + accumulator_column() + i;
            if (column < head_dim) params.partial_out[at * head_dim + column] = out[m][d][2 * half + i];
          }
        if (threadIdx.x % 4 == 0) params.partial_max[at] = maximum[m][half], params.partial_sum[at] = sum[m][half];
      }
  }
};

template <class Config>
__global__ void __launch_bounds__(Config::kThreads) forward_kernel(const __grid_constant__ ForwardParams params) {
  extern __shared__ __align__(1024) char dynamic_shared[];
  auto &shared = *reinterpret_cast<ForwardShared<Config> *>(dynamic_shared);
  const fdm_problem &p = params.p;
  // Heads fastest, so that those of a group meet in the second-level cache; the last tiles, which a causal mask makes
  // the longest, first.
  const int64_t groups = p.heads / params.heads_per_tile;
  int64_t number = blockIdx.x / groups;
  const int64_t head = blockIdx.x % groups * params.heads_per_tile;
  const int split = int(number % params.splits);
  number /= params.splits;
  const int64_t tile = params.tiles - 1 - number % params.tiles, sequence_index = number / params.tiles;
  const int64_t first_row = tile * (Config::kRows / params.heads_per_tile);
  const Sequence s = sequence(p, sequence_index);
  if (first_row >= s.q_count) return;
  if (threadIdx.x == 0)
    shared.task = {s,
                   sequence_index,
                   head,
                   head / group_size(p),
                   first_row,
                   split,
                   tile_columns(p, params.plan, s, sequence_index, head, first_row / kTileRows),
                   score_view(p, p.bias, s, head)};
  __syncthreads();

  ForwardBlock<Config> block(params, shared);
  const int blocks = (shared.task.columns.count + Config::kColumns - 1) / Config::kColumns;
  block.run(int(int64_t(blocks) * split / params.splits), int(int64_t(blocks) * (split + 1) / params.splits));
  if (params.splits > 1)
    block.write_partial();
  else
    block.write();
}

} // namespace fdm::cuda
