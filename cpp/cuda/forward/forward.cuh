// SPDX-License-Identifier: BSD-3-Clause
// Forward pass with mma.sync: one thread block for each tile of query rows of one head.
//
// The mainloop takes kColumns columns of the tile at a time. V of a block is copied while its scores and
// probabilities are computed; K of the next block is copied during the product with V. Rows of K and V are gathered
// one by one, so kept keys cost the same wherever they are. Full columns come first, so only the last blocks test
// which rows keep a key. Each warp copies a bias per query for its rows one block ahead.
//
// If scores are linear in a bias per key, the accumulators of Q K' start from it. Only the first block searches the
// maximum of its rows. It mostly stays; sums of probabilities show if it does not. The scores are then computed
// again, so K stays until that is known.
//
// If the queries of a whole GQA group fit one tile (decode), the tile's rows are those of all heads of the group,
// which share the gathered keys. The columns may then be split over several thread blocks, merged by combine.cu.
#pragma once

#include <type_traits>

#include "../tile/column_ring.cuh"
#include "../tile/dead_columns.cuh"
#include "../tile/row_tile_config.cuh"
#include "forward_rows.cuh"
#include "ptx/dependent.cuh"

namespace fdm::cuda {

template <class Element, int kHeadDim, int kRows, int kColumns, int kWarps, int kBlocks, TileKind kKind>
struct ForwardConfig : RowTileConfig<Element, kHeadDim, kRows, kColumns, kWarps, kBlocks, kKind> {
  static constexpr RowLayout kRowLayout = kKind == TileKind::general ? RowLayout::general : RowLayout::usual;
  using Ring = std::conditional_t<kKind == TileKind::general, KeyRing<kColumns, ForwardConfig::kThreads>,
                                  ColumnRing<typename ForwardConfig::Tile, kColumns, ForwardConfig::kThreads>>;
  static_assert(kColumns <= ForwardConfig::kThreads);
};

template <class Config> struct ForwardShared {
  alignas(1024) char sQ[Config::kQBytes];
  char sK[Config::kKeyBytes], sV[Config::kKeyBytes];
  typename Config::Ring ring;
  int32_t next_key[Config::kThreads]; // of the column that each thread looks up next
  GatheredRows k, v;                  // of the task; not in the general kernel
  ForwardTask task;
  int first_block; // of this split
  alignas(16) uint32_t sBias[Config::kGeneral ? Config::kRows : 1][Config::kBiasPitch];
  DeadColumns<Config::kColumns, Config::kGeneral> dead;
};

template <class Config>
struct ForwardBlock : ForwardRows<typename Config::Element, Config::kRowTiles, Config::kColumns / 8,
                                  Config::kHeadDim / 8, Config::kRowLayout> {
  using Rows = ForwardRows<typename Config::Element, Config::kRowTiles, Config::kColumns / 8, Config::kHeadDim / 8,
                           Config::kRowLayout>;
  using Element = typename Config::Element;
  using Tile = typename Config::Tile;
  using Ring = typename Config::Ring;
  static constexpr int kRowTiles = Config::kRowTiles, kColumns = Config::kColumns, kHeadDim = Config::kHeadDim;
  using Rows::out, Rows::params, Rows::scores, Rows::softmax, Rows::task;

  // The facts about a column that are fetched early.
  struct KeyAndBias {
    int32_t key;
    uint32_t bias_bits;
  };
  using Entry = std::conditional_t<Config::kGeneral, ColumnEntry, KeyAndBias>;

  ForwardShared<Config> &shared;
  Ring &ring;
  uint32_t q_base, k_base, v_base;
  uint32_t q_fragment, k_fragment, v_fragment;

  __device__ ForwardBlock(const ForwardParams &parameters, ForwardShared<Config> &memory)
      : Rows(parameters, memory.task), shared(memory), ring(memory.ring) {
    q_base = ptx::shared_address(shared.sQ);
    k_base = ptx::shared_address(shared.sK);
    v_base = ptx::shared_address(shared.sV);
    q_fragment = Tile::left(q_base, threadIdx.x / 32 * (16 * kRowTiles));
    k_fragment = Tile::right_rows(k_base);
    v_fragment = Tile::right_columns(v_base);
  }

  __device__ bool aligned() const { return !Config::kGeneral || params.aligned; }

  // Needs no task, so it runs while the task is made.
  __device__ void load_queries(const Sequence &s, int64_t head, int64_t first_row) const {
    const fdm_tensor &q = params.p.q;
    const auto *first = static_cast<const uint16_t *>(q.data) + row_offset(q, s, first_row, head);
    const int valid_rows = int(min64(s.q_count - first_row, Config::kRows));
    if (params.heads_per_tile == 1 && aligned())
      return copy_tile_rows<Tile, Config::kThreads>(q_base, 0, first, Config::kRows, valid_rows, q, params.p.head_dim);
    copy_any_rows<Tile, Config::kRows, Config::kThreads>(q_base, aligned(), int(params.p.head_dim), q, [&](int r) {
      return this->query_of_block(r) < valid_rows ? first + this->offset_in_block(q, r) : kZeroRow;
    });
  }

  template <bool kLoadsV> __device__ void load_keys(int block) const {
    const typename Ring::Slot &slot = ring.slot(block);
    const uint32_t base = kLoadsV ? v_base : k_base;
    const int head_dim = int(params.p.head_dim);
    if constexpr (Config::kGeneral) {
      const fdm_tensor &t = kLoadsV ? params.p.v : params.p.k;
      copy_any_rows<Tile, kColumns, Config::kThreads>(base, params.aligned, head_dim, t,
                                                      [&](int c) { return kLoadsV ? slot.v_row[c] : slot.k_row[c]; });
    } else {
      Ring::copy(base, slot, kLoadsV ? shared.v : shared.k, head_dim);
    }
  }

  __device__ void load_row_bias(int block) const {
    copy_row_bias<16 * kRowTiles>(shared.sBias, params.p.bias, *task, ring.slot(block).key);
  }

  // The index among the columns of a block of the walk.
  __device__ int column_block_of(int block) const {
    if constexpr (Config::kGeneral) return block;
    return column_block(task->columns, block);
  }
  __device__ bool is_partial(int block) const { return (column_block_of(block) + 1) * kColumns > task->columns.full; }
  __device__ void finish_scores(int block) {
    const typename Ring::Slot &slot = ring.slot(block);
    if constexpr (Config::kGeneral) {
      const RowBiasReader<Element, Config::kBiasPitch> row_bias({params.p.bias, task->bias}, shared.sBias, slot.key,
                                                                task->first_row, this->row(0, 0));
      Rows::finish_scores(slot, is_partial(block), row_bias);
    } else {
      Rows::finish_scores(slot, is_partial(block));
    }
  }

  // Computes the scores of a block and turns them into probabilities.
  __device__ void make_probabilities(int block, bool is_first) {
    if constexpr (!Config::kGeneral)
      if (params.bias_factor != 0.0f && try_quick_probabilities(block, is_first)) return;
    clear(scores);
    gemm_ss<Element, kHeadDim>(scores, q_fragment, k_fragment);
    if constexpr (Config::kGeneral) {
      ptx::cp_async_wait<1>(); // the bias is complete; V may not be
      __syncwarp();
    }
    finish_scores(block);
    if constexpr (Config::kGeneral) {
      if (shared.dead.is_second_pass) {
        ptx::cp_async_wait<0>();
        __syncthreads();
        shared.dead.template clear<Tile, Config::kThreads>(
            v_base, scores, -INFINITY, [&](int m, int half) { return this->exists(this->row(m, half)); });
      }
    }
    softmax();
  }

  // The same if scores are linear in the bias. Returns whether the maxima of this warp's rows stay valid.
  __device__ bool try_quick_probabilities(int block, bool is_first) {
    const typename Ring::Slot &slot = ring.slot(block);
    const float scale = params.factors.scale;
    gemm_ss_from<Element, kHeadDim>(scores, q_fragment, k_fragment,
                                    [&](int n) { return slot.initial[4 * n + threadIdx.x % 4]; });
    if (is_partial(block)) this->drop_columns(slot);
    const BiasReference reference = present(params.p.bias) ? task->reference : BiasReference();
    if (is_first) this->find_maximum(scale, reference);
    float added[2 * kRowTiles];
    this->quick_softmax(scale, reference, added);
    bool fits = true;
#pragma unroll
    for (int i = 0; i < 2 * kRowTiles; ++i) fits = fits && added[i] <= Rows::kSumLimit;
    if (__all_sync(0xffffffffu, fits)) {
#pragma unroll
      for (int i = 0; i < 2 * kRowTiles; ++i) this->sum[i / 2][i % 2] += added[i];
      return true;
    }
    if (is_first) this->start_sums();
    return false;
  }

  // This thread's column in the batch of blocks that begins with `block`.
  __device__ int column(int block) const {
    const int thread = int(threadIdx.x);
    return column_block_of(block + thread / kColumns) * kColumns + thread % kColumns;
  }
  // Copies the column's key to shared memory a batch ahead, so it takes no register. Only this thread reads it.
  __device__ void fetch_key(int block) const {
    const TileColumns &columns = task->columns;
    const int c = column(block);
    int32_t &next = shared.next_key[threadIdx.x];
    if (c < columns.count && columns.column_keys)
      ptx::cp_async_4(ptx::shared_address(&next), column_key_address(columns, c));
    else
      next = c < columns.count ? key_of_run(columns, c) : -1;
  }
  // Most columns are full. The row facts of other columns are not prefetched, since they take registers.
  __device__ Entry fetch(int block) const {
    const ScoreView bias = task->bias;
    const int32_t key = shared.next_key[threadIdx.x];
    if constexpr (Config::kGeneral)
      return fetch_column(task->columns, bias, column(block), key);
    else
      return {key, key >= 0 && bias.data ? bias.load_bits(key) : 0u};
  }
  __device__ void store(int block, const Entry &entry) {
    const int c = column(block), i = int(threadIdx.x) % kColumns;
    typename Ring::Slot &slot = ring.slot(block + int(threadIdx.x) / kColumns);
    const TileColumns &columns = task->columns;
    if constexpr (Config::kGeneral) {
      store_column<kColumns>(slot, params.p, task->s, task->sequence_index, task->kv_head, columns, task->bias, c,
                             entry);
    } else {
      const bool partial = c - i + kColumns > columns.full;
      ColumnEntry whole{};
      whole.key = entry.key;
      whole.bias_bits = entry.bias_bits;
      if (c >= columns.full && entry.key >= 0) fetch_kept_rows(whole, columns);
      const int32_t key = store_facts<kColumns>(slot, columns, task->bias, c, partial, whole);
      slot.set_initial(i, bias_in_products(slot.bias[i] - task->reference.value, params.bias_factor));
      slot.row[Ring::copy_index(i)] = key < 0 ? -1 : params.rows.row(params.p, task->sequence_index, key);
    }
  }

  // The prologue starts the copies of the first block; the mainloop goes through the blocks [begin, end).
  __device__ void run(int begin, int end) {
    this->start();
    const int batch = begin / Ring::kBlocksAtOnce * Ring::kBlocksAtOnce;
    fetch_key(batch);
    ptx::cp_async_fence();
    ptx::cp_async_wait<0>();
    const Entry first = fetch(batch);
    fetch_key(batch + Ring::kBlocksAtOnce);
    store(batch, first);
    if (threadIdx.x == 0) shared.first_block = begin; // where it takes no register
    __syncthreads();
    if (begin < end) load_keys<false>(begin);
    ptx::cp_async_fence();
    if constexpr (Config::kGeneral) {
      if (begin < end) load_row_bias(begin);
      ptx::cp_async_fence();
    }
    if (begin != batch) ptx::cp_async_wait<0>(); // a split's first block may look up a batch and need its keys
    for (int block = begin; block < end; ++block) {
      const int ahead = block + 1;
      const bool looks_up = ahead % Ring::kBlocksAtOnce == 0 && ahead < end;
      Entry entry;
      if (looks_up) {
        entry = fetch(ahead);
        fetch_key(ahead + Ring::kBlocksAtOnce);
      }
      ptx::cp_async_wait<Config::kGeneral ? 1 : 0>(); // the bias may take longer
      __syncthreads(); // K of this block is complete; all reads of the previous V are too
      load_keys<true>(block);
      ptx::cp_async_fence();
      if (looks_up) store(ahead, entry);
      make_probabilities(block, block == shared.first_block);
      ptx::cp_async_wait<0>();
      __syncthreads(); // V is complete; all reads of K are too
      if (ahead < end) load_keys<false>(ahead);
      ptx::cp_async_fence();
      if constexpr (Config::kGeneral) {
        if (ahead < end) load_row_bias(ahead);
        ptx::cp_async_fence();
      }
      gemm_rs<Element, kHeadDim>(out, scores, v_fragment);
    }
    ptx::cp_async_wait<0>();
    this->finish();
  }

  // The epilogue writes normalized rows and their LSE. A warp rounds its rows into the place of its rows of Q, which
  // no other warp reads, and writes them 16 bytes at a time if they are aligned.
  __device__ void write() {
    const int lane = threadIdx.x % 32, first = this->row(0, 0) - lane / 4;
    const int valid_rows = int(min64(task->s.q_count - task->first_row, Config::kRows));
    float own_lse = 0.0f;
    bool blank = false;
#pragma unroll
    for (int i = 0; i < 2 * kRowTiles; ++i) blank |= this->sum[i / 2][i % 2] == 0.0f;
    if (__any_sync(0xffffffffu, blank)) clear_blank_rows();
    for_pairs<kRowTiles>([&](int m, int half) {
      const float total = this->sum[m][half], maximum = this->maximum[m][half];
      const float inverse = row_normalizer(this->sink(this->row(m, half)), maximum, total);
#pragma unroll
      for (int d = 0; d < kHeadDim / 8; ++d)
#pragma unroll
        for (int i = 2 * half; i < 2 * half + 2; ++i) out[m][d][i] *= inverse;
      const float lse = total == 0.0f ? -INFINITY : (maximum + log2f(total)) / kLog2E;
      if (lane % 4 == 2 * m + half) own_lse = lse;
    });
    const int lse_row = first + lane % 4 * 8 + lane / 4;
    if (lane % 4 < 2 * kRowTiles && this->query_of_block(lse_row) < valid_rows)
      static_cast<float *>(
          params.a.lse.data)[head_major_offset(params.a.lse, task->s, this->query(lse_row), this->head(lse_row))] =
          own_lse;
    store_accumulators<Element, Tile>(out, q_base, first, 0);
    __syncwarp();
    write_rows<RowPart::rounded>(params.a.out, first, valid_rows);
    if (!present(params.a.out_rest)) return;
    __syncwarp(); // all lanes have read the rows of out
    store_packed<Tile>(out, q_base, first, 0, [](float low, float high) { return pack_rests<Element>(low, high); });
    __syncwarp();
    write_rows<RowPart::rest>(params.a.out_rest, first, valid_rows);
  }
  // Without a kept key the output is 0, even if a value that other rows keep is non-finite.
  __device__ void clear_blank_rows() {
    for_pairs<kRowTiles>([&](int m, int half) {
      if (this->sum[m][half] == 0.0f) this->clear_row(m, half);
    });
  }
  template <RowPart kPart> __device__ void write_rows(const fdm_tensor &t, int first, int valid_rows) const {
    using Stored = StoredPart<kPart>;
    constexpr int kThreadsPerRow = Tile::kChunks <= 4 ? 4 : Tile::kChunks <= 8 ? 8 : Tile::kChunks <= 16 ? 16 : 32;
    const int lane = threadIdx.x % 32, head_dim = int(params.p.head_dim);
    auto *const block_rows = static_cast<Stored *>(t.data) + row_offset(t, task->s, task->first_row, task->head);
    if (aligned()) {
      const int chunk = lane % kThreadsPerRow, lane_row = first + lane / kThreadsPerRow;
      const bool alone = params.heads_per_tile == 1;
      const int rows_left = chunk * 8 < head_dim ? valid_rows : 0;
      Stored *target = block_rows + (alone ? uint32_t(lane_row) * t.stride[1] : 0) + chunk * 8;
#pragma unroll
      for (int i = 0; i < 16 * kRowTiles; i += 32 / kThreadsPerRow) {
        const int r = lane_row + i;
        if (this->query_of_block(r) < rows_left) {
          const uint4 c = ptx::load_shared_16_bytes(Tile::chunk_address(q_base, r, chunk));
          store_part<kPart>(alone ? target : target + this->offset_in_block(t, r), {c.x, c.y, c.z, c.w});
        }
        if (alone) target += 32 / kThreadsPerRow * t.stride[1];
      }
      return;
    }
#pragma unroll 1
    for (int i = lane; i < 16 * kRowTiles * kHeadDim; i += 32) {
      const int r = first + i / kHeadDim, d = i % kHeadDim;
      if (d < head_dim && this->query_of_block(r) < valid_rows)
        block_rows[this->offset_in_block(t, r) + d * t.stride[3]] =
            ptx::load_shared_2_bytes(Tile::chunk_address(q_base, r, d / 8) + d % 8 * 2);
    }
  }
};

// The position of a thread block in the problem. Numbers of blocks fit 32 bits.
struct ForwardPlace {
  int64_t sequence_index, head, tile;
  int split;

  // The order.heads heads of a pass vary fastest, so heads of a GQA group meet in L2. The last tiles, the longest
  // with a causal mask, come first.
  __device__ explicit ForwardPlace(const ForwardParams &params) {
    const auto of_tile = static_cast<uint32_t>(params.heads_per_tile),
               heads = static_cast<uint32_t>(params.order.heads);
    const uint32_t groups = heads / of_tile;
    uint32_t block = blockIdx.x, first_head = 0;
    if (params.order.heads != params.p.heads) {
      const uint32_t blocks = gridDim.x / (uint32_t(params.p.heads) / of_tile) * groups, before = block / blocks;
      first_head = before * heads;
      block -= before * blocks;
    }
    const uint32_t tile_of_heads = block / groups;
    const uint32_t number = params.splits == 1 ? tile_of_heads : tile_of_heads / uint32_t(params.splits);
    const uint32_t sequence = number / uint32_t(params.tiles);
    head = first_head + (block - tile_of_heads * groups) * of_tile;
    split = int(tile_of_heads - number * params.splits);
    sequence_index = sequence;
    tile = params.tiles - 1 - int(number - sequence * params.tiles);
  }
};

template <class Config>
__global__ void __launch_bounds__(Config::kThreads, Config::kBlocks)
    forward_kernel(const __grid_constant__ ForwardParams params) {
  auto &shared = dynamic_memory<ForwardShared<Config>>();
  const fdm_problem &p = params.p;
  ptx::start_dependents();
  const ForwardPlace place(params);
  const int64_t first_row = place.tile * (Config::kRows / uint32_t(params.heads_per_tile));
  const Sequence s = sequence(p, place.sequence_index);
  if (first_row >= s.q_count) return;
  ForwardBlock<Config> block(params, shared);
  block.load_queries(s, place.head, first_row);
  // One thread of each warp makes a part of the task.
  ForwardTask &task = shared.task;
  if (threadIdx.x == 0) {
    find_columns(task.columns, p, params.plan, s, place.sequence_index, place.head, first_row / kTileRows);
  } else if (threadIdx.x == 96) {
    find_column_intervals(task.columns, p, s, place.head);
  } else if (threadIdx.x == 32) {
    task.bias = bias_view(p, s, place.sequence_index, place.head, first_row / kTileRows);
    task.sink = sink_score(p, place.head, task.bias);
  } else if (threadIdx.x == 64) {
    shared.dead.is_second_pass = false;
    task.s = s;
    task.sequence_index = place.sequence_index;
    task.head = place.head;
    task.kv_head = kv_head_of(p, place.head);
    task.first_row = first_row;
    task.split = place.split;
    task.reference = {};
    if constexpr (!Config::kGeneral) {
      shared.k = RowPlaces::rows(p, p.k, params.rows.k_bytes, s, task.kv_head);
      shared.v = RowPlaces::rows(p, p.v, params.rows.v_bytes, s, task.kv_head);
    }
  }
  __syncthreads();
  if constexpr (!Config::kGeneral) {
    if (present(p.bias)) {
      if (threadIdx.x == 0) task.template set_walk_and_reference<Config::kColumns>();
      __syncthreads();
    }
  }

  const int blocks = (shared.task.columns.count + Config::kColumns - 1) / Config::kColumns;
  int begin = 0, end = blocks;
  if (params.splits > 1) { // at most 32 splits
    begin = int(uint32_t(blocks) * uint32_t(place.split) / uint32_t(params.splits));
    end = int(uint32_t(blocks) * uint32_t(place.split + 1) / uint32_t(params.splits));
  }
  const auto exists = [&](int m, int half) { return block.exists(block.row(m, half)); };
  do block.run(begin, end);
  while (Config::kGeneral && shared.task.bias.per_query && shared.dead.needs_recompute(block.out, exists));
  if (params.splits > 1)
    block.write_partial();
  else
    block.write();
}

} // namespace fdm::cuda
