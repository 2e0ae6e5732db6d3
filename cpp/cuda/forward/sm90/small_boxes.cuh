// SPDX-License-Identifier: BSD-3-Clause
// The columns of small_forward.cuh for consecutive keys. One warpgroup has 64 query rows of a head. One thread copies
// Q, K and V as TMA boxes, as far ahead as the stages allow. The bias and the kept rows of a block's columns are
// loaded two blocks ahead and stored one block ahead.
#pragma once

#include "../../tile/sm90/bias_operand.cuh"
#include "../../tile/sm90/key_columns.cuh"
#include "box_params.cuh"
#include "small_forward.cuh"

namespace fdm::cuda {

template <class ElementType, int kHeadDimension, int kStageCount, int kBlockCount> struct SmallBoxesConfig {
  using Element = ElementType;
  static constexpr int kHeadDim = kHeadDimension, kColumns = kSmallBoxColumns, kStages = kStageCount;
  static constexpr int kRows = kSmallBoxRows, kThreads = 128, kBlocks = kBlockCount; // kBlocks share an SM
  static constexpr int kParts = kTileRows / kRows;                                   // of a tile of the scheduler
  using QTile = SmemTile<kHeadDim, kRows>;
  using KeyTile = SmemTile<kHeadDim, kColumns>;
  using Rows = ForwardRows<Element, 1, kColumns / 8, kHeadDim / 8, RowLayout::one_head>;
};

template <class Config> struct SmallBoxesShared {
  static constexpr int kColumns = Config::kColumns;
  enum : int32_t { kPartial = 1, kDead = 2 }; // a row drops a column; no row keeps one
  // The bias and the kept rows of a block's columns.
  struct alignas(16) Facts {
    float bias[kColumns];                        // base-2 bias; -inf: no row keeps the column
    uint32_t word[Config::kRows / 32][kColumns]; // of the block's rows
    int32_t flags[kColumns / 32];                // kPartial, kDead, of each 32 columns
  };
  // These are 1024-byte aligned, since dynamic shared memory is. With alignas(1024), the size of the struct would be
  // rounded up to 1024, and an SM would have no room for the last thread block.
  char sQ[Config::QTile::kBytes];
  char sK[Config::kStages][Config::KeyTile::kBytes], sV[Config::kStages][Config::KeyTile::kBytes];
  SmallBiasOperand<typename Config::Element, kColumns, 2> bias;
  Facts facts[2];
  uint64_t q_full, k_full[Config::kStages], v_full[Config::kStages];
  ForwardTask task;
  int32_t blocks; // of columns; -1: there are no rows
  static_assert(Config::QTile::kBytes % 1024 == 0 && Config::KeyTile::kBytes % 1024 == 0);

  // One thread of the block calls this, before the others use the barriers.
  __device__ void init() {
    ptx::init_barrier(q_full, 1);
    for (uint64_t &barrier : k_full) ptx::init_barrier(barrier, 1);
    for (uint64_t &barrier : v_full) ptx::init_barrier(barrier, 1);
    ptx::fence_async_proxy(); // TMA uses them
  }
};

template <class ConfigType> struct SmallBoxes : ConfigType::Rows {
  using Config = ConfigType;
  using Params = BoxForwardParams;
  using Rows = typename Config::Rows;
  using Element = typename Config::Element;
  using QTile = typename Config::QTile;
  using KeyTile = typename Config::KeyTile;
  using Shared = SmallBoxesShared<Config>;
  static constexpr int kColumns = Config::kColumns, kHeadDim = Config::kHeadDim, kStages = Config::kStages;
  using Rows::params, Rows::scores, Rows::task;

  const BoxForwardParams &boxes;
  Shared &shared;
  int32_t blocks;     // of columns
  uint32_t bias_bits; // of this thread's column of the next block

  __device__ SmallBoxes(const BoxForwardParams &parameters, Shared &memory)
      : Rows(parameters.forward, memory.task), boxes(parameters), shared(memory) {}

  __device__ static int blocks_of(const TileSpan &span) { return (span.count + kColumns - 1) / kColumns; }

  // One thread calls this.
  __device__ void make_task(const HeadTile &tile, int64_t first_row) const {
    const TileSpan span = consecutive_columns(params.p, tile.s, first_row, Config::kRows);
    shared.blocks = blocks_of(span);
    shared.task.set(params, tile.s, tile.sequence_index, tile.head, first_row);
    TileColumns &columns = shared.task.columns;
    columns = {};
    columns.count = span.count;
    columns.full = span.full;
    columns.first_row = int32_t(first_row);
    columns.causal_off = int32_t(tile.s.causal_off);
    columns.causal = is_causal(params.p);
  }

  // Starts the copies of a block, if there is one.
  __device__ void copy_keys(int block, BoxCoordinates coordinates) const {
    if (block >= blocks) return;
    const int stage = block % kStages;
    coordinates.row += block * kColumns;
    copy_tile_and_arrive<KeyTile>(shared.sK[stage], boxes.k, coordinates, shared.k_full[stage]);
    copy_tile_and_arrive<KeyTile>(shared.sV[stage], boxes.v, coordinates, shared.v_full[stage]);
  }
  // The same after the task is made.
  __device__ void copy_keys(int block) const {
    copy_keys(block, {int32_t(task->s.k_begin), int32_t(task->kv_head), int32_t(task->s.batch)});
  }
  // One thread starts the first copies.
  __device__ void start_copies(const HeadTile &tile, int64_t first_row) {
    shared.init();
    const auto batch = int32_t(tile.s.batch);
    const BoxCoordinates keys{int32_t(tile.s.k_begin), int32_t(kv_head_of(params.p, tile.head)), batch};
    blocks = blocks_of(consecutive_columns(params.p, tile.s, first_row, Config::kRows));
    if (blocks > 0)
      copy_tile_and_arrive<QTile>(shared.sQ, boxes.q, {int32_t(tile.s.q_begin + first_row), int32_t(tile.head), batch},
                                  shared.q_full);
#pragma unroll 1
    for (int block = 0; block < kStages; ++block) copy_keys(block, keys);
  }

  __device__ bool folds_bias() const { return params.bias_factor != 0.0f && present(params.p.bias); }
  // Whether scores are scaled products, except for dropped keys.
  __device__ bool scores_are_products() const { return params.bias_factor != 0.0f && !present(params.p.bias); }

  // Whether the scores of a block depend on facts of its columns. Scaled products need none for full columns.
  __device__ bool has_facts(int block) const {
    return block < blocks && (!scores_are_products() || (block + 1) * kColumns > task->columns.full);
  }

  // Starts Q K', plus the bias if scores are linear in it.
  __device__ void start_scores(int block) {
    const uint64_t q = QTile::descriptor(ptx::shared_address(shared.sQ));
    const uint64_t k = KeyTile::descriptor(ptx::shared_address(shared.sK[block % kStages]));
    ptx::warpgroup_arrive();
    // Two separate products: with a run-time `accumulate`, the registers of scores would stay live throughout. Each
    // branch commits its own batch; otherwise ptxas adds a product.
    if (folds_bias()) {
      ptx::wgmma_ss<Element, ptx::Major::k, ptx::Major::k>(scores[0], shared.bias.ones_descriptor(),
                                                           shared.bias.descriptor(block % 2), false);
      warpgroup_gemm_ss<Element, QTile, KeyTile, kHeadDim>(scores[0], q, k, true);
      ptx::warpgroup_commit_batch();
    } else {
      warpgroup_gemm_ss<Element, QTile, KeyTile, kHeadDim>(scores[0], q, k, false);
      ptx::warpgroup_commit_batch();
    }
  }

  // The last threads find the facts of a block, one column each. The first thread has copies to start.
  static constexpr int kFirstLookupThread = Config::kThreads - kColumns;
  __device__ static bool is_lookup_thread() { return threadIdx.x >= kFirstLookupThread; }
  __device__ static int own_column() { return int(threadIdx.x) - kFirstLookupThread; }

  // Loads the bias of this thread's column of a block from global memory.
  __device__ uint32_t load_bias_bits(int block) const {
    const int c = block * kColumns + own_column();
    return task->bias.data && c < task->columns.count ? task->bias.load_bits(c) : 0u;
  }
  // Stores the facts of this thread's column of a block.
  __device__ void store(int block, uint32_t bias_bits) const {
    const TileColumns &columns = task->columns;
    auto &facts = shared.facts[block % 2];
    const int i = own_column(), c = block * kColumns + i, warp = i / 32;
    float bias = present(params.p.bias) ? to_base_2(task->bias.convert(bias_bits)) : 0.0f;
    uint32_t low = ~0u, high = ~0u;
    if ((block + 1) * kColumns > columns.full) {
      const RowWord word = column_word(columns, c, c, 0, 0, {});
      low = word.part[0];
      high = word.part[1];
      if ((low | high) == 0) bias = -INFINITY;
    }
    const bool dead = bias == -INFINITY;
    if (dead) low = high = 0u;
    facts.bias[i] = bias;
    facts.word[0][i] = low;
    facts.word[1][i] = high;
    if (folds_bias()) {
      shared.bias.store(block % 2, i, bias, params.bias_factor);
      ptx::fence_async_proxy();
    }
    const bool partial = __any_sync(0xffffffffu, (low & high) != ~0u), any_dead = __any_sync(0xffffffffu, dead);
    if (i % 32 == 0) facts.flags[warp] = (partial ? Shared::kPartial : 0) | (any_dead ? Shared::kDead : 0);
  }

  // Whether any of the block's columns has the flag.
  __device__ bool has_flag(int flag, int block) const {
    const auto &flags = shared.facts[block % 2].flags;
    return has_facts(block) && ((flags[0] | flags[1]) & flag);
  }
  __device__ bool is_partial(int block) const { return has_flag(Shared::kPartial, block); }
  __device__ void drop_columns(int block) {
    if (is_partial(block)) Rows::drop_columns(shared.facts[block % 2]);
  }

  // Recomputes the products of this warp's rows and the keys, without the bias.
  __device__ void recompute_scores(int block) {
    const uint32_t sQ = ptx::shared_address(shared.sQ), sK = ptx::shared_address(shared.sK[block % kStages]);
    const int lane = threadIdx.x % 32, row = threadIdx.x / 32 * 16;
    clear(scores);
#pragma unroll 1
    for (int d = 0; d < kHeadDim / 8; d += 2) {
      uint32_t left[4];
      ptx::ldmatrix(left, QTile::chunk_address(sQ, row + lane % 16, d + lane / 16));
      warp_add_transposed<Element, KeyTile>(scores[0], left, sK, d);
    }
  }

  // Turns products into probabilities. The first block gives the maximum of its rows. It mostly stays; other blocks
  // search it only if their sums show that it does not.
  __device__ void make_probabilities(int block) {
    const float scale = params.factors.scale;
    const auto &facts = shared.facts[block % 2];
    if (params.bias_factor != 0.0f) {
      drop_columns(block);
      if (block == 0) Rows::find_maximum(scale, {});
      float added[2];
      Rows::quick_softmax(scale, {}, added);
      if (__all_sync(0xffffffffu, added[0] <= Rows::kSumLimit && added[1] <= Rows::kSumLimit)) {
        Rows::sum[0][0] += added[0];
        Rows::sum[0][1] += added[1];
        return;
      }
      recompute_scores(block);
      if (block == 0) Rows::start_sums();
    }
    const bool products = scores_are_products();
    if (products)
      drop_columns(block);
    else
      Rows::finish_scores(facts, is_partial(block));
    Rows::softmax(products ? scale : 1.0f);
  }

  // Zeroes V of columns that no row keeps: 0 * NaN is NaN. All threads call this.
  __device__ void clear_values(int block) const {
    const auto &facts = shared.facts[block % 2];
    if (!has_flag(Shared::kDead, block)) return;
    if (threadIdx.x < kColumns && facts.bias[threadIdx.x] == -INFINITY) {
      const uint32_t tile = ptx::shared_address(shared.sV[block % kStages]);
#pragma unroll 1
      for (int chunk = 0; chunk < 8 * KeyTile::kPanels; ++chunk)
        ptx::store_shared(KeyTile::chunk_address(tile, threadIdx.x, chunk), uint4{});
    }
    ptx::fence_async_proxy();
    __syncthreads();
  }

  // The first warp starts copies, and the last makes the task.
  __device__ void start_tile() {
    constexpr int kLastWarp = Config::kThreads / 32 - 1;
    const int warp = threadIdx.x / 32;
    if (warp > 0 && warp < kLastWarp) return;
    const HeadTile tile = find_tile(params.p, params.order, blockIdx.x / Config::kParts);
    // The last rows of a tile, which have the most columns, come first.
    const int64_t first_row =
        tile.tile * kTileRows + (Config::kParts - 1 - blockIdx.x % Config::kParts) * Config::kRows;
    const bool has_rows = tile.has_rows() && first_row < tile.s.q_count;
    if (threadIdx.x % 32 > 0) return;
    if (warp == kLastWarp) {
      shared.blocks = -1;
      if (has_rows) make_task(tile, first_row);
    } else if (has_rows) {
      start_copies(tile, first_row);
    }
  }

  // Returns whether there are rows.
  __device__ bool load_first() {
    start_tile();
    if (present(params.p.bias)) shared.bias.init();
    __syncthreads();
    blocks = shared.blocks;
    if (blocks < 0) return false;
    bias_bits = 0;
    if (is_lookup_thread()) {
      const uint32_t first = load_bias_bits(0);
      bias_bits = load_bias_bits(1);
      if (has_facts(0)) store(0, first);
    }
    if (has_facts(0)) __syncthreads();
    Rows::start();
    if (blocks > 0) ptx::wait(shared.q_full, 0);
    return true;
  }

  __device__ static uint32_t phase(int block) { return block / kStages % 2; }
  __device__ void wait_for_keys(int block) const { ptx::wait(shared.k_full[block % kStages], phase(block)); }
  __device__ void look_ahead(int block) {
    if (!is_lookup_thread() || !has_facts(block + 1)) return;
    store(block + 1, bias_bits);
    bias_bits = load_bias_bits(block + 2);
  }
  __device__ void wait_for_values(int block) const {
    ptx::wait(shared.v_full[block % kStages], phase(block));
    clear_values(block);
  }
  __device__ void release(int block) const {
    if (block + 1 == blocks) return;
    __syncthreads(); // all reads of the block are complete, and the facts of the next are stored
    if (threadIdx.x == 0) copy_keys(block + kStages);
  }
};

} // namespace fdm::cuda
