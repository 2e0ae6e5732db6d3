// SPDX-License-Identifier: BSD-3-Clause
// Forward pass with mma.sync: one block of threads for a tile of query rows of one head.
//
// The block walks the tile's columns, kColumns at a time. K of a block is fetched while the scores of the block before
// it are turned into probabilities and multiplied with V; V is fetched while the scores are computed. Rows of K and V
// are gathered one by one, so kept keys cost the same wherever they lie. Full columns come first, so only the last
// blocks test which rows keep what. A bias with a row for each query is copied a block ahead, by each warp for its
// rows.
//
// Where a whole group's queries fit one tile (decode), the rows of the tile are those of all heads of the group, which
// read the gathered keys once. Then the columns may also be divided over several blocks (splits), merged by combine.cu.
#pragma once

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
  static constexpr int kQBytes = Tile::bytes(kRows), kKeyBytes = Tile::bytes(kColumns);
  static constexpr int kBiasPitch = kColumns + 8; // the pairs of words that a half warp reads meet all banks
  static_assert(kRows <= kTileRows && kTileRows % kRows == 0 && kRowTiles >= 1 && kColumns <= kThreads);
};

template <class Config> struct ForwardShared {
  alignas(1024) char sQ[Config::kQBytes];
  char sK[Config::kKeyBytes], sV[Config::kKeyBytes];
  KeyRing<Config::kColumns, Config::kThreads> ring;
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
  using Ring = KeyRing<Config::kColumns, Config::kThreads>;
  static constexpr int kRowTiles = Config::kRowTiles, kColumns = Config::kColumns, kHeadDim = Config::kHeadDim;
  using Rows::out, Rows::params, Rows::scores, Rows::softmax, Rows::task;

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
    const fdm_tensor &t = kValues ? params.p.v : params.p.k;
    const typename Ring::Slot &slot = ring.slot(block);
    copy_rows<Tile, kColumns, Config::kThreads>(kValues ? v_base : k_base, aligned(), int(params.p.head_dim),
                                                t.stride[3],
                                                [&](int c) { return kValues ? slot.v_row[c] : slot.k_row[c]; });
  }

  __device__ void load_row_bias(int block) const {
    copy_own_rows<16 * kRowTiles>(shared.sBias, params.p.bias, *task, ring.slot(block).key);
  }

  __device__ void finish_scores(int block) {
    const typename Ring::Slot &slot = ring.slot(block);
    const bool partial = (block + 1) * kColumns > task->columns.full;
    if constexpr (Config::kGeneral) {
      const RowBiasReader<Element, Config::kBiasPitch> row_bias({params.p.bias, task->bias}, shared.sBias, slot.key,
                                                                task->first_row, this->row(0, 0));
      Rows::finish_scores(slot, partial, row_bias);
    } else {
      Rows::finish_scores(slot, partial);
    }
  }

  // The column that this thread fetches of the batch of blocks that begins with `block`.
  __device__ static int column(int block) { return block * kColumns + int(threadIdx.x); }
  __device__ void store(int block, const ColumnEntry &entry) {
    store_column<kColumns>(ring.slot(block + int(threadIdx.x) / kColumns), params.p, task->s, task->sequence_index,
                           task->kv_head, task->columns, task->bias, column(block), entry);
  }

  // The prologue loads Q and starts the copies of the first block; the mainloop goes through the blocks [begin, end).
  __device__ void run(int begin, int end) {
    this->start();
    load_queries();
    const TileColumns &columns = task->columns;
    store(begin, fetch_column(columns, task->bias, column(begin), fetch_key(columns, column(begin))));
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
      const int ahead = block + Ring::kBatch;
      const bool fetch_ahead = (block - begin) % Ring::kBatch == 0 && ahead < end;
      ColumnEntry entry;
      if (fetch_ahead) {
        entry = fetch_column(columns, task->bias, column(ahead), next_key);
        next_key = fetch_key(columns, column(ahead + Ring::kBatch));
      }
      clear(scores);
      gemm_ss<Element, kHeadDim>(scores, q_fragment, k_fragment);
      if (fetch_ahead) store(ahead, entry);
      ptx::cp_async_wait<0>();
      __syncthreads(); // V is there; nobody reads K any more
      if (block + 1 < end) load_keys<false>(block + 1);
      ptx::cp_async_fence();
      finish_scores(block);
      if constexpr (Config::kGeneral) {
        if (shared.dead.clears)
          shared.dead.template clear<Tile, Config::kThreads>(
              v_base, scores, -INFINITY, [&](int m, int half) { return this->exists(this->row(m, half)); });
        __syncwarp(); // the bias has been read
        if (block + 1 < end) load_row_bias(block + 1);
        ptx::cp_async_fence();
      }
      softmax();
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
