// SPDX-License-Identifier: BSD-3-Clause
// Forward pass with mma.sync: one block of threads for a tile of query rows of one head.
//
// The block walks the tile's columns, kColumns at a time. V of a block is fetched while its scores are computed and turned
// into probabilities; K of the next while these are multiplied with V. Rows of K and V are gathered one by one, so kept
// keys cost the same wherever they lie. Full columns come first, so only the last blocks test which rows keep what. A
// bias with a row for each query is copied a block ahead, by each warp for its rows.
//
// Where scores are linear in it, a bias that is the same for every query is what the sums of Q K' begin with. Only the
// first block looks for the maximum of its rows: it mostly stays, and sums of probabilities show where it does not. The
// scores are then computed again, and K stays until that is known.
//
// Where a whole group's queries fit one tile (decode), the rows of the tile are those of all heads of the group, which
// read the gathered keys once. Then the columns may also be divided over several blocks (splits), merged by combine.cu.
#pragma once

#include <type_traits>

#include "../tile/column_ring.cuh"
#include "../tile/dead_columns.cuh"
#include "forward_rows.cuh"

namespace fdm::cuda {

template <class ElementType, int kHeadDimension, int kRowCount, int kColumnCount, int kWarpCount, int kBlockCount,
          bool kIsGeneral>
struct ForwardConfig {
  using Element = ElementType;
  static constexpr int kHeadDim = kHeadDimension, kRows = kRowCount, kColumns = kColumnCount, kWarps = kWarpCount;
  // The general kernel also takes rows that cannot be copied 16 bytes at a time, and a bias with a row for each query.
  // Both are rare, and need much code.
  static constexpr bool kGeneral = kIsGeneral;
  static constexpr int kThreads = 32 * kWarps, kBlocks = kBlockCount; // kBlocks is the least number of blocks on an SM
  static constexpr int kRowTiles = kRows / kWarps / 16;               // tiles of 16 rows of each warp
  using Tile = SmemTile<kHeadDim>;
  using Ring = std::conditional_t<kGeneral, KeyRing<kColumns, kThreads>, ColumnRing<Tile, kColumns, kThreads>>;
  static constexpr int kQBytes = Tile::bytes(kRows), kKeyBytes = Tile::bytes(kColumns);
  static constexpr int kBiasPitch = kColumns + 8; // the pairs of words that a half warp reads meet all banks
  static_assert(kRows <= kTileRows && kTileRows % kRows == 0 && kRowTiles >= 1 && kColumns <= kThreads);
};

template <class Config> struct ForwardShared {
  alignas(1024) char sQ[Config::kQBytes];
  char sK[Config::kKeyBytes], sV[Config::kKeyBytes];
  typename Config::Ring ring;
  GatheredRows k, v; // of the task; not in the general kernel
  ForwardTask task;
  alignas(16) uint32_t sBias[Config::kGeneral ? Config::kRows : 1][Config::kBiasPitch];
  DeadColumns<Config::kColumns, Config::kGeneral> dead;
};

template <class Config>
struct ForwardBlock : ForwardRows<typename Config::Element, Config::kRowTiles, Config::kColumns / 8,
                                  Config::kHeadDim / 8, Config::kGeneral> {
  using Rows = ForwardRows<typename Config::Element, Config::kRowTiles, Config::kColumns / 8, Config::kHeadDim / 8,
                           Config::kGeneral>;
  using Element = typename Config::Element;
  using Tile = typename Config::Tile;
  using Ring = typename Config::Ring;
  static constexpr int kRowTiles = Config::kRowTiles, kColumns = Config::kColumns, kHeadDim = Config::kHeadDim;
  using Rows::out, Rows::params, Rows::scores, Rows::softmax, Rows::task;

  // What is known of a column before its turn.
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

  __device__ void load_queries() const {
    const fdm_tensor &q = params.p.q;
    copy_rows<Tile, Config::kRows, Config::kThreads>(
        q_base, aligned(), int(params.p.head_dim), q.stride[3], [&](int r) -> const uint16_t * {
          if (!this->exists(r)) return kZeroRow;
          return static_cast<const uint16_t *>(q.data) + row_offset(q, task->s, this->query(r), this->head(r));
        });
  }

  template <bool kValues> __device__ void load_keys(int block) const {
    const typename Ring::Slot &slot = ring.slot(block);
    const uint32_t base = kValues ? v_base : k_base;
    const int head_dim = int(params.p.head_dim);
    if constexpr (Config::kGeneral) {
      const fdm_tensor &t = kValues ? params.p.v : params.p.k;
      copy_rows<Tile, kColumns, Config::kThreads>(base, params.aligned, head_dim, t.stride[3],
                                                  [&](int c) { return kValues ? slot.v_row[c] : slot.k_row[c]; });
    } else {
      Ring::copy(base, slot, kValues ? shared.v : shared.k, head_dim);
    }
  }

  __device__ void load_row_bias(int block) const {
    copy_own_rows<16 * kRowTiles>(shared.sBias, params.p.bias, *task, ring.slot(block).key);
  }

  __device__ bool is_partial(int block) const { return (block + 1) * kColumns > task->columns.full; }
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
      if (params.bias_factor != 0.0f && make_quickly(block, is_first)) return;
    clear(scores);
    gemm_ss<Element, kHeadDim>(scores, q_fragment, k_fragment);
    if constexpr (Config::kGeneral) {
      ptx::cp_async_wait<1>(); // the bias is there; V may not be
      __syncwarp();
    }
    finish_scores(block);
    if constexpr (Config::kGeneral) {
      if (shared.dead.clears) {
        ptx::cp_async_wait<0>();
        __syncthreads();
        shared.dead.template clear<Tile, Config::kThreads>(
            v_base, scores, -INFINITY, [&](int m, int half) { return this->exists(this->row(m, half)); });
      }
    }
    softmax();
  }

  // The same where scores are linear in the bias. Returns whether the maxima of this warp's rows can stay as they are.
  __device__ bool make_quickly(int block, bool is_first) {
    const typename Ring::Slot &slot = ring.slot(block);
    const float scale = params.factors.scale;
    gemm_ss_from<Element, kHeadDim>(scores, q_fragment, k_fragment,
                                    [&](int n) { return slot.initial[4 * n + threadIdx.x % 4]; });
    if (is_partial(block)) this->drop_columns(slot);
    if (is_first) this->find_maximum(scale);
    float added[2 * kRowTiles];
    this->quick_softmax(scale, added);
    bool fits = true;
#pragma unroll
    for (int i = 0; i < 2 * kRowTiles; ++i) fits = fits && added[i] <= Rows::kMostSum;
    if (__all_sync(0xffffffffu, fits)) {
#pragma unroll
      for (int i = 0; i < 2 * kRowTiles; ++i) this->sum[i / 2][i % 2] += added[i];
      return true;
    }
    if (is_first) this->start_sums();
    return false;
  }

  // The column that this thread fetches of the batch of blocks that begins with `block`.
  __device__ static int column(int block) { return block * kColumns + int(threadIdx.x); }
  // Most columns are full. What is known of the rows of others is not asked for ahead, since it takes registers.
  __device__ Entry fetch(int block, int32_t key) const {
    if constexpr (Config::kGeneral) {
      return fetch_column(task->columns, task->bias, column(block), key);
    } else {
      const ScoreView bias = task->bias;
      return {key, key >= 0 && bias.data ? bias.load_bits(key) : 0u};
    }
  }
  __device__ void store(int block, const Entry &entry) {
    typename Ring::Slot &slot = ring.slot(block + int(threadIdx.x) / kColumns);
    const TileColumns &columns = task->columns;
    if constexpr (Config::kGeneral) {
      store_column<kColumns>(slot, params.p, task->s, task->sequence_index, task->kv_head, columns, task->bias,
                             column(block), entry);
    } else {
      const int c = column(block), i = int(threadIdx.x) % kColumns;
      const bool partial = c - i + kColumns > columns.full;
      ColumnEntry whole{};
      whole.key = entry.key;
      whole.bias_bits = entry.bias_bits;
      if (c >= columns.full && entry.key >= 0) fetch_rows(whole, columns);
      const int32_t key = store_facts<kColumns>(slot, columns, task->bias, c, partial, whole);
      slot.set_initial(i, bias_in_products(slot.bias[i], params.bias_factor));
      slot.row[Ring::place(i)] = key < 0 ? -1 : params.rows.row(params.p, task->sequence_index, key);
    }
  }

  // The prologue loads Q and starts the copies of the first block; the mainloop goes through the blocks [begin, end).
  __device__ void run(int begin, int end) {
    this->start();
    load_queries();
    const TileColumns &columns = task->columns;
    store(begin, fetch(begin, fetch_key(columns, column(begin))));
    int32_t next_key = fetch_key(columns, column(begin + Ring::kBatch));
    __syncthreads();
    if (begin < end) load_keys<false>(begin);
    ptx::cp_async_fence();
    if constexpr (Config::kGeneral) {
      if (begin < end) load_row_bias(begin);
      ptx::cp_async_fence();
    }
    for (int block = begin; block < end; ++block) {
      ptx::cp_async_wait<Config::kGeneral ? 1 : 0>(); // the bias may take longer
      __syncthreads(); // K of this block is there; nobody reads V of the last one any more
      load_keys<true>(block);
      ptx::cp_async_fence();
      const int ahead = block + 1;
      const bool fetch_ahead = (ahead - begin) % Ring::kBatch == 0 && ahead < end;
      Entry entry;
      if (fetch_ahead) {
        entry = fetch(ahead, next_key);
        next_key = fetch_key(columns, column(ahead + Ring::kBatch));
      }
      make_probabilities(block, block == begin);
      if (fetch_ahead) store(ahead, entry);
      ptx::cp_async_wait<0>();
      __syncthreads(); // V is there; nobody reads K any more
      if (block + 1 < end) load_keys<false>(block + 1);
      ptx::cp_async_fence();
      if constexpr (Config::kGeneral) {
        if (block + 1 < end) load_row_bias(block + 1);
        ptx::cp_async_fence();
      }
      gemm_rs<Element, kHeadDim>(out, scores, v_fragment);
    }
    ptx::cp_async_wait<0>();
    this->finish();
  }
};

template <class Config>
__global__ void __launch_bounds__(Config::kThreads, Config::kBlocks)
    forward_kernel(const __grid_constant__ ForwardParams params) {
  extern __shared__ __align__(1024) char dynamic_shared[];
  auto &shared = *reinterpret_cast<ForwardShared<Config> *>(dynamic_shared);
  const fdm_problem &p = params.p;
  // Heads go fastest, and those of a group meet in L2. The last tiles, which a causal mask makes the longest, come
  // first.
  const int64_t groups = quotient(p.heads, params.heads_per_tile);
  const int64_t tile_of_heads = quotient(blockIdx.x, groups), number = quotient(tile_of_heads, params.splits);
  const int64_t head = (blockIdx.x - tile_of_heads * groups) * params.heads_per_tile;
  const int split = int(tile_of_heads - number * params.splits);
  const int64_t sequence_index = quotient(number, params.tiles);
  const int64_t tile = params.tiles - 1 - (number - sequence_index * params.tiles);
  const int64_t first_row = tile * quotient(Config::kRows, params.heads_per_tile);
  const Sequence s = sequence(p, sequence_index);
  if (first_row >= s.q_count) return;
  if (threadIdx.x == 0) {
    shared.dead.clears = false;
    shared.task = {s,
                   sequence_index,
                   head,
                   quotient(head, group_size(p)),
                   first_row,
                   split,
                   tile_columns(p, params.plan, s, sequence_index, head, first_row / kTileRows),
                   score_view(p, p.bias, s, head),
                   sink_score(p, head)};
    if constexpr (!Config::kGeneral) {
      shared.k = RowPlaces::rows(p, p.k, params.rows.k_bytes, s, shared.task.kv_head);
      shared.v = RowPlaces::rows(p, p.v, params.rows.v_bytes, s, shared.task.kv_head);
    }
  }
  __syncthreads();

  ForwardBlock<Config> block(params, shared);
  const int blocks = (shared.task.columns.count + Config::kColumns - 1) / Config::kColumns;
  const int begin = int(int64_t(blocks) * split / params.splits);
  const int end = int(int64_t(blocks) * (split + 1) / params.splits);
  const auto exists = [&](int m, int half) { return block.exists(block.row(m, half)); };
  do block.run(begin, end);
  while (Config::kGeneral && shared.task.bias.rows && shared.dead.may_have_spoilt(block.out, exists));
  if (params.splits > 1)
    block.write_partial();
  else
    block.write();
}

} // namespace fdm::cuda
