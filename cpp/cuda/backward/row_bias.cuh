// SPDX-License-Identifier: BSD-3-Clause
// The gradient of a bias per query. A thread block has a row tile of one (batch, head) of the bias.
//
// It iterates over the key blocks in order. For each key block it iterates over the sources: the query heads and
// batches that share the elements of the bias. It sums their dS in registers and then writes the block, kept or not.
// So every element is written once, and only the gradient itself has a size of queries times keys. Q and dO stay in
// shared memory if there are few sources; K and V stay while the KV head is the same. The other operands of a step
// are copied during the step before, or after that step if there is only one buffer.
#pragma once

#include "../host/launch.cuh"
#include "../tile/copy_rows.cuh"
#include "../tile/products.cuh"
#include "../tile/row_bias_tile.cuh"
#include "row_statistics.cuh"

namespace fdm::cuda {

// The buffer counts (one or two) of Q with dO and of K with V are for several sources. With one source, Q and dO have
// one buffer, K and V two.
template <class ElementType, int kHeadDimension, int kColumnCount, int kWarpCount, int kQueryBufferCount,
          int kKeyBufferCount>
struct RowBiasConfig {
  using Element = ElementType;
  static constexpr int kHeadDim = kHeadDimension, kColumns = kColumnCount, kWarps = kWarpCount;
  static constexpr int kThreads = 32 * kWarps, kRows = 16 * kWarps;
  static constexpr int kQueryBuffers = kQueryBufferCount, kKeyBuffers = kKeyBufferCount;
  static constexpr int kBiasPitch = kColumns + 8; // the pairs of words that a half warp reads cover all banks
  using Tile = SmemTile<kHeadDim>;
  static constexpr int kRowBytes = Tile::bytes(kRows), kKeyBytes = Tile::bytes(kColumns);
  static constexpr int kBufferBytes = 2 * (kQueryBuffers * kRowBytes + kKeyBuffers * kKeyBytes);
  static constexpr int kOneSourceBytes = 2 * (kRowBytes + 2 * kKeyBytes);
  static constexpr int kTileBytes = kBufferBytes > kOneSourceBytes ? kBufferBytes : kOneSourceBytes;
  static_assert(kRows % 32 == 0 && kTileRows % kRows == 0 && kColumns <= kThreads);
};

struct RowBiasTask {
  int first_batch, batches, first_head, heads; // the sequences and query heads that share the bias
  int64_t first_row;
  int64_t columns;     // columns of the bias that belong to the rows
  int64_t visible;     // columns before the causal limit of all rows
  int64_t bias_offset; // the offset of the first row of the tile
};

// The source of a step: a query head of a sequence.
struct RowBiasSource {
  Sequence s;
  int sequence_index, head, kv_head;
  TileWords words; // of the row tile, if there is a row plan
};

template <class Config> struct RowBiasShared {
  alignas(1024) char tiles[Config::kTileBytes]; // Q and dO of each buffer, then K and V
  alignas(16) uint32_t sBias[Config::kRows][Config::kBiasPitch];
  RowBiasSource source[4];                                // the sources of a step and the three after it
  uint32_t word[4][Config::kRows / 32][Config::kColumns]; // the words of a step and the two after it
  int32_t key[2][Config::kColumns];                       // the keys of a block and the next
  float lse[2][Config::kRows], delta[2][Config::kRows];   // see RowStatistics
  RowBiasTask task;
};

// One or two buffers, and their contents.
struct RowBiasBuffers {
  int count;
  int current = 0; // the buffer of the step
  int64_t held[2] = {-1, -1};

  __device__ bool holds(int64_t id) const { return held[0] == id || held[1] == id; }
  __device__ int find(int64_t id) const { return held[0] == id ? 0 : 1; }
  // Makes room in the buffer that the step does not use, or in the only buffer.
  __device__ int replace(int64_t id) {
    const int buffer = count == 2 && current == 0 ? 1 : 0;
    if (buffer == 0)
      held[0] = id;
    else
      held[1] = id;
    return buffer;
  }
};

template <class Config> struct RowBiasBlock {
  using Element = typename Config::Element;
  using Tile = typename Config::Tile;
  static constexpr int kColumns = Config::kColumns, kHeadDim = Config::kHeadDim, kRows = Config::kRows;
  static constexpr int kColumnTiles = kColumns / 8, kWords = kRows / 32;

  struct Step {
    int64_t number; // counted over all blocks and sources
    int block, source;

    __device__ int slot() const { return int(number & 3); } // the place in the rings of shared memory
  };
  // This thread's facts about a column of a step: the rows that may keep it, and its words in a row plan.
  struct KeptRows {
    RowRange rows;
    uint32_t word[kWords];
  };

  const BackwardParams &params;
  RowBiasShared<Config> &shared;
  int sources;
  float sums[kColumnTiles][4];
  float row_sums[2] = {0.0f, 0.0f}; // used if all keys share an element
  RowBiasBuffers queries, keys;
  int bias_block = -1, key_block = -1; // the last blocks whose bias and whose keys were copied to shared memory

  __device__ RowBiasBlock(const BackwardParams &parameters, RowBiasShared<Config> &memory)
      : params(parameters), shared(memory), sources(memory.task.batches * memory.task.heads),
        queries{sources > 1 ? Config::kQueryBuffers : 1}, keys{sources > 1 ? Config::kKeyBuffers : 2} {}

  // The addresses of the tiles of Q (of dO if `second`), and of K (of V if `second`).
  __device__ uint32_t query_tile(int buffer, int second) const {
    return ptx::shared_address(shared.tiles) + (2 * buffer + second) * Config::kRowBytes;
  }
  __device__ uint32_t key_tile(int buffer, int second) const {
    return query_tile(queries.count, 0) + (2 * buffer + second) * Config::kKeyBytes;
  }

  __device__ const RowBiasSource &source(const Step &step) const { return shared.source[step.slot()]; }
  __device__ void advance(Step &step) const {
    ++step.number;
    if (++step.source == sources) {
      step.source = 0;
      ++step.block;
    }
  }
  // One thread calls this three steps ahead, one turn before fetch() reads the source.
  __device__ void store_source(const Step &step) const {
    const fdm_problem &p = params.p;
    const RowBiasTask &task = shared.task;
    RowBiasSource &stored = shared.source[step.slot()];
    stored.sequence_index = task.first_batch + step.source / task.heads;
    stored.head = task.first_head + step.source % task.heads;
    stored.s = sequence(p, stored.sequence_index);
    stored.kv_head = int(kv_head_of(p, stored.head));
    stored.words = {};
    if (mask_kind(p) != FDM_MASK_ROWS) return;
    stored.words = tile_words(p, params.plan, stored.s, stored.sequence_index, stored.head, task.first_row / kTileRows);
  }
  __device__ static int row(int half) { return threadIdx.x / 32 * 16 + accumulator_row(half); }
  __device__ int row_count(const Sequence &s) const { return int(min64(kRows, s.q_count - shared.task.first_row)); }
  // Steps with the same K and V have the same id.
  __device__ int64_t keys_id(const Step &step) const {
    const RowBiasSource &src = source(step);
    return (int64_t(step.block) * params.p.batch + src.sequence_index) * params.p.kv_heads + src.kv_head;
  }

  __device__ KeptRows fetch(const Step &step) const {
    KeptRows kept{};
    if (int(threadIdx.x) >= kColumns) return kept;
    const RowBiasSource &src = source(step);
    const int64_t key = int64_t(step.block) * kColumns + threadIdx.x;
    if (key >= src.s.k_count) return kept;
    kept.rows = rows_of_key(params.p, src.s, src.head, key);
    const int first_word = int(shared.task.first_row) % kTileRows / 32;
#pragma unroll
    for (int w = 0; w < kWords; ++w) kept.word[w] = src.words.words ? src.words.of(key)->part[first_word + w] : ~0u;
    return kept;
  }

  // Stores which rows of the tile keep this thread's column. Returns whether any row does.
  __device__ bool store(int buffer, const KeptRows &kept) {
    if (int(threadIdx.x) >= kColumns) return false;
    const int first = int(shared.task.first_row);
    uint32_t any = 0;
#pragma unroll
    for (int w = 0; w < kWords; ++w) {
      const uint32_t word = row_bits(kept.rows.first - first - 32 * w, kept.rows.past - first - 32 * w) & kept.word[w];
      shared.word[buffer][w][threadIdx.x] = word;
      any |= word;
    }
    return any != 0;
  }

  __device__ void load_queries(const Step &step) {
    const int buffer = queries.replace(step.source);
    const RowBiasSource &src = source(step);
    const int rows = row_count(src.s);
    const auto copy = [&](const fdm_tensor &t, uint32_t tile) {
      const auto *base = static_cast<const uint16_t *>(t.data) + row_offset(t, src.s, shared.task.first_row, src.head);
      copy_rows<Tile, kRows, Config::kThreads>(tile, int(params.p.head_dim), [&](int r) -> const uint16_t * {
        return r < rows ? base + r * t.stride[1] : kZeroRow;
      });
    };
    copy(params.p.q, query_tile(buffer, 0));
    copy(params.a.dout, query_tile(buffer, 1));
    if (int(threadIdx.x) >= rows) return;
    const RowStatistics &statistics = row_statistics(params, src.s, src.head, shared.task.first_row + threadIdx.x);
    ptx::cp_async_4(ptx::shared_address(&shared.lse[buffer][threadIdx.x]), &statistics.lse);
    ptx::cp_async_4(ptx::shared_address(&shared.delta[buffer][threadIdx.x]), &statistics.delta);
  }

  __device__ void load_keys(const Step &step) {
    const RowBiasSource &src = source(step);
    const int64_t id = keys_id(step), first = int64_t(step.block) * kColumns;
    const int buffer = keys.replace(id), count = int(min64(kColumns, src.s.k_count - first));
    const auto copy = [&](const fdm_tensor &t, uint32_t tile) {
      const auto *base = static_cast<const uint16_t *>(t.data) + src.s.batch * t.stride[0] +
                         (src.s.k_begin + first) * t.stride[1] + src.kv_head * t.stride[2];
      copy_rows<Tile, kColumns, Config::kThreads>(tile, int(params.p.head_dim), [&](int c) -> const uint16_t * {
        return c < count ? base + c * t.stride[1] : kZeroRow;
      });
    };
    copy(params.p.k, key_tile(buffer, 0));
    copy(params.p.v, key_tile(buffer, 1));
    if (key_block == step.block) return;
    key_block = step.block;
    if (int(threadIdx.x) < kColumns)
      shared.key[step.block % 2][threadIdx.x] = int(threadIdx.x) < count ? int32_t(first) + int32_t(threadIdx.x) : -1;
  }

  __device__ RowBiasTile bias_tile(const RowBiasSource &src) const {
    return {params.p.bias, score_view(params.p, params.p.bias, src.s, src.head)};
  }

  // Copies the bias of the warp's rows, which is the same for all sources.
  __device__ void load_bias(const Step &step) {
    bias_block = step.block;
    const RowBiasSource &src = source(step);
    const int first = threadIdx.x / 32 * 16;
    bias_tile(src).template copy<16, kColumns, Config::kBiasPitch>(shared.sBias[first], shared.key[step.block % 2],
                                                                   shared.task.first_row + first,
                                                                   min(16, row_count(src.s) - first));
  }

  template <bool kHasSoftcap> __device__ void add(const Step &step) {
    const RowBiasSource &src = source(step);
    const int q = queries.current, k = keys.current, first = threadIdx.x / 32 * 16;
    const int32_t *key = shared.key[step.block % 2];
    float scores[1][kColumnTiles][4], gradients[1][kColumnTiles][4];
    clear(scores);
    clear(gradients);
    gemm_ss<Element, kHeadDim>(scores, Tile::left(query_tile(q, 0), first), Tile::right_rows(key_tile(k, 0)));
    gemm_ss<Element, kHeadDim>(gradients, Tile::left(query_tile(q, 1), first), Tile::right_rows(key_tile(k, 1)));
    const ScoreFactors factors(params.p);
    const RowBiasReader<Element, Config::kBiasPitch> bias(bias_tile(src), shared.sBias, key, shared.task.first_row,
                                                          row(0));
    float lse[2], delta[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      lse[half] = shared.lse[q][row(half)];
      delta[half] = shared.delta[q][row(half)];
    }
#pragma unroll
    for (int n = 0; n < kColumnTiles; ++n) {
      const int column = 8 * n + accumulator_column();
      const uint2 kept = *reinterpret_cast<const uint2 *>(&shared.word[step.slot()][first / 32][column]);
      const uint2 shifts = bias.shifts(column);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float2 b = bias.elements(0, half, column, shifts);
        const auto add_one = [&](uint32_t word, float bias_value, int i) {
          float slope;
          const float x =
              with_row_bias(factors.score<kHasSoftcap>(scores[0][n][i], 0.0f, &slope), bias_value) - lse[half];
          const float ds = ptx::exp2_approximate(ptx::min_or_nan(x, 0.0f)) * (gradients[0][n][i] - delta[half]);
          // dO of a row without a gradient may hold any value.
          if ((word >> (row(half) % 32) & 1) && bias_value != -INFINITY && lse[half] != INFINITY) sums[n][i] += ds;
        };
        add_one(kept.x, b.x, 2 * half);
        add_one(kept.y, b.y, 2 * half + 1);
      }
    }
  }

  __device__ void clear_sums() {
    for_accumulators(sums, [&](int n, int i) { sums[n][i] = 0.0f; });
  }

  // Writes a block of columns, and clears the sums for the next one.
  __device__ void write(int block) {
    const RowBiasTask &task = shared.task;
    const fdm_tensor &t = params.a.dbias;
    const int rows = row_count(sequence(params.p, task.first_batch));
    for_pairs<kColumnTiles>([&](int n, int half) {
      const int64_t column = int64_t(block) * kColumns + 8 * n + accumulator_column();
      const float2 pair = {sums[n][2 * half], sums[n][2 * half + 1]};
      if (t.shape[3] == 1)
        row_sums[half] += pair.x + pair.y;
      else if (row(half) < rows)
        store_pair(t, task.bias_offset + row(half) * t.stride[2] + column * t.stride[3], pair, task.columns - column);
    });
    clear_sums();
  }

  // Stores two neighbours of a row; only the first if `columns_left` is 1, none if it is 0 or less.
  __device__ static void store_pair(const fdm_tensor &t, int64_t offset, float2 pair, int64_t columns_left) {
    auto *halves = static_cast<Element *>(t.data) + offset;
    if (columns_left >= 2 && t.dtype != FDM_FLOAT32 && t.stride[3] == 1 &&
        reinterpret_cast<uintptr_t>(halves) % 4 == 0) {
      *reinterpret_cast<uint32_t *>(halves) = ptx::pack<Element>(pair.x, pair.y);
      return;
    }
    if (columns_left >= 1) store_element(t, offset, pair.x);
    if (columns_left >= 2) store_element(t, offset + t.stride[3], pair.y);
  }

  __device__ void write_rows() {
    const RowBiasTask &task = shared.task;
    const fdm_tensor &t = params.a.dbias;
    if (t.shape[3] != 1) return;
    const int rows = row_count(sequence(params.p, task.first_batch));
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float sum = ptx::row_sum(row_sums[half]);
      if (threadIdx.x % 4 == 0 && row(half) < rows) store_element(t, task.bias_offset + row(half) * t.stride[2], sum);
    }
  }

  __device__ void run() {
    const int visible_blocks = int(ceil_div(shared.task.visible, kColumns));
    const int64_t steps = int64_t(visible_blocks) * sources;
    clear_sums();
    Step step{-1, 0, sources - 1}, next{0, 0, 0}, second = next, third; // second and third come after the next
    advance(second);
    third = second;
    advance(third);
    if (threadIdx.x == 0) {
      store_source(next);
      store_source(second);
    }
    __syncthreads();
    bool active = false;
    bool next_active = __syncthreads_or(steps > 0 && store(0, fetch(next)));
    // The first turn only starts the copies of the first step.
    while (step.number < steps) {
      KeptRows kept{};
      if (second.number < steps) kept = fetch(second);
      ptx::cp_async_wait<0>();
      __syncthreads(); // this step's operands have arrived; all threads have read the previous step's
      if (threadIdx.x == 0) store_source(third);
      const bool loads_queries = next_active && !queries.holds(next.source);
      const bool loads_keys = next_active && !keys.holds(keys_id(next));
      if (loads_queries && queries.count == 2) load_queries(next);
      if (loads_keys && keys.count == 2) load_keys(next);
      ptx::cp_async_fence();
      if (active) {
        if (params.p.softcap > 0)
          add<true>(step);
        else
          add<false>(step);
      }
      if (step.number >= 0 && next.source == 0) write(step.block);
      const bool any = store(second.slot(), kept);
      const bool second_active = __syncthreads_or(any); // also: all threads have read this step's tiles
      if (loads_queries && queries.count == 1) load_queries(next);
      if (loads_keys && keys.count == 1) {
        load_keys(next);
        __syncthreads(); // shared.key is stored
      }
      if (next_active) {
        if (bias_block != next.block) load_bias(next);
        queries.current = queries.find(next.source);
        keys.current = keys.find(keys_id(next));
      }
      ptx::cp_async_fence();
      active = next_active;
      next_active = second_active;
      step = next;
      next = second;
      second = third;
      advance(third);
    }
    for (int block = visible_blocks; int64_t(block) * kColumns < shared.task.columns; ++block) write(block);
    write_rows();
  }
};

template <class Config>
__global__ void __launch_bounds__(Config::kThreads) row_bias_kernel(const __grid_constant__ BackwardParams params) {
  auto &shared = dynamic_memory<RowBiasShared<Config>>();
  const fdm_problem &p = params.p;
  const fdm_tensor &t = params.a.dbias;
  const int64_t tiles = ceil_div(p.queries, Config::kRows);
  const int64_t head = blockIdx.x % t.shape[1], number = blockIdx.x / t.shape[1];
  const int64_t first_row = (tiles - 1 - number % tiles) * Config::kRows, batch = number / tiles;
  const Sequence s = sequence(p, batch);
  if (first_row >= s.q_count) return;
  if (threadIdx.x == 0) {
    const bool shares_batch = !is_varlen(p) && t.shape[0] == 1;
    const int64_t heads = p.heads / t.shape[1], last_row = min64(s.q_count, first_row + Config::kRows) - 1;
    shared.task = {int(batch),
                   int(shares_batch ? p.batch : 1),
                   int(head * heads),
                   int(heads),
                   first_row,
                   t.shape[3] == 1 ? s.k_count : t.shape[3],
                   is_causal(p) ? clamp64(last_row + s.causal_off + 1, 0, s.k_count) : s.k_count,
                   (is_varlen(p) ? 0 : batch) * t.stride[0] + head * t.stride[1] +
                       (s.q_begin + first_row) * t.stride[2]};
  }
  __syncthreads();
  RowBiasBlock<Config>(params, shared).run();
}

template <class Element, int kHeadDim> cudaError_t launch_row_bias(const BackwardLaunch &work, cudaStream_t stream) {
  constexpr RowBiasTileChoice tile = row_bias_tile(FDM_TILE_ARCH, kHeadDim);
  using Config = RowBiasConfig<Element, kHeadDim, tile.columns, tile.warps, tile.query_buffers, tile.key_buffers>;
  return launch_with_shared<RowBiasShared<Config>, row_bias_kernel<Config>>(work.params, work.route.row_bias_blocks,
                                                                            Config::kThreads, stream);
}

} // namespace fdm::cuda
