// SPDX-License-Identifier: BSD-3-Clause
// The columns of small_forward.cuh from a plan. Two warpgroups have 64 rows each. All of their threads also find
// columns and gather rows of K and V, some blocks ahead.
#pragma once

#include "ptx/barrier.cuh"
#include "small_forward.cuh"

namespace fdm::cuda {

template <class ElementType, int kHeadDimension, int kColumnCount, int kStageCount> struct SmallTilesConfig {
  using Element = ElementType;
  static constexpr int kHeadDim = kHeadDimension, kRows = kTileRows, kColumns = kColumnCount, kStages = kStageCount;
  static constexpr int kThreads = 2 * kRows, kWarps = kThreads / 32, kBlocks = 2; // kBlocks share an SM
  using QTile = SmemTile<kHeadDim, kRows>;
  using KeyTile = SmemTile<kHeadDim, kColumns>;
  using Ring = KeyRing<kColumns, kThreads>;
  using Rows = ForwardRows<Element, 1, kColumns / 8, kHeadDim / 8, RowLayout::one_head>;
  static_assert(kStages <= Ring::kBlocksAtOnce,
                "what is known of a block is stored a step before its copies are started");
};

template <class Config> struct SmallTilesShared {
  alignas(1024) char sQ[Config::QTile::kBytes];
  char sK[Config::kStages][Config::KeyTile::kBytes], sV[Config::kStages][Config::KeyTile::kBytes];
  typename Config::Ring ring;
  ForwardTask task;
};

template <class ConfigType> struct SmallTile : ConfigType::Rows {
  using Config = ConfigType;
  using Params = ForwardParams;
  using Shared = SmallTilesShared<Config>;
  using Rows = typename Config::Rows;
  using Element = typename Config::Element;
  using QTile = typename Config::QTile;
  using KeyTile = typename Config::KeyTile;
  using Ring = typename Config::Ring;
  static constexpr int kColumns = Config::kColumns, kHeadDim = Config::kHeadDim, kStages = Config::kStages;
  using Rows::params, Rows::scores, Rows::task;

  Shared &shared;
  int blocks;       // of columns
  int32_t next_key; // of this thread, in the batch of blocks after the stored one

  __device__ SmallTile(const ForwardParams &parameters, Shared &memory)
      : Rows(parameters, memory.task), shared(memory) {}

  __device__ static int warp() { return int(threadIdx.x) / 32; }

  __device__ void load_queries(const HeadTile &tile) const {
    constexpr int kOwnRows = Config::kRows / Config::kWarps;
    const fdm_tensor &q = params.p.q;
    const int lane = threadIdx.x % 32;
    const int64_t i = tile.tile * kTileRows + warp() * kOwnRows + lane;
    const uint16_t *row = kZeroRow;
    if (lane < kOwnRows && i < tile.s.q_count)
      row = static_cast<const uint16_t *>(q.data) + row_offset(q, tile.s, i, tile.head);
    QTile::template gather<Config::kWarps>(ptx::shared_address(shared.sQ), warp(), row, int(params.p.head_dim));
  }

  // One thread of each of four warps makes a part of the task.
  __device__ void make_task(const HeadTile &tile) const {
    const fdm_problem &p = params.p;
    ForwardTask &made = shared.task;
    if (threadIdx.x == 0) {
      find_columns(made.columns, p, params.plan, tile.s, tile.sequence_index, tile.head, tile.tile);
    } else if (threadIdx.x == 32) {
      find_column_intervals(made.columns, p, tile.s, tile.head);
    } else if (threadIdx.x == 64) {
      made.bias = bias_view(p, tile.s, tile.sequence_index, tile.head, tile.tile);
      made.sink = sink_score(p, tile.head, made.bias);
    } else if (threadIdx.x == 96) {
      made.s = tile.s;
      made.sequence_index = tile.sequence_index;
      made.head = tile.head;
      made.kv_head = kv_head_of(p, tile.head);
      made.first_row = tile.tile * kTileRows;
      made.split = 0;
      made.set_results(params);
    }
  }

  // Starts the copies of a block, if there is one.
  __device__ void load_keys(int block) const {
    if (block < blocks) {
      // Half of the warps copy K, the others V.
      constexpr int kWarps = Config::kWarps / 2, kOwnKeys = kColumns / kWarps;
      const auto &slot = shared.ring.slot(block);
      const bool values = warp() >= kWarps;
      const int own_warp = warp() % kWarps, stage = block % kStages;
      const int c = own_warp * kOwnKeys + int(threadIdx.x) % kOwnKeys;
      KeyTile::template gather<kWarps>(ptx::shared_address(values ? shared.sV[stage] : shared.sK[stage]), own_warp,
                                       values ? slot.v_row[c] : slot.k_row[c], int(params.p.head_dim));
    }
    ptx::cp_async_fence();
  }

  // This thread's column in the batch of blocks that begins with `block`.
  __device__ static int column(int block) { return block * kColumns + int(threadIdx.x); }
  __device__ void store(int block, const ColumnEntry &entry) {
    store_column<kColumns>(shared.ring.slot(block + int(threadIdx.x) / kColumns), params.p, task->s,
                           task->sequence_index, task->kv_head, task->columns, task->bias, column(block), entry);
  }

  // Returns whether the tile has rows.
  __device__ bool load_first() {
    const HeadTile tile = find_tile(params.p, params.order, blockIdx.x);
    if (!tile.has_rows()) return false;
    make_task(tile);
    load_queries(tile);
    __syncthreads();
    const TileColumns &columns = task->columns;
    blocks = (columns.count + kColumns - 1) / kColumns;
    store(0, fetch_column(columns, task->bias, column(0), fetch_key(columns, column(0))));
    next_key = fetch_key(columns, column(Ring::kBlocksAtOnce));
    __syncthreads();
    for (int block = 0; block < kStages - 1; ++block) load_keys(block);
    this->start();
    return true;
  }

  __device__ void wait_for_keys(int block) const {
    ptx::cp_async_wait<kStages - 2>();
    ptx::fence_async_proxy();
    __syncthreads(); // this block is complete, and all reads of the previous one are too
    load_keys(block + kStages - 1);
  }
  __device__ void start_scores(int block) {
    const uint64_t q = QTile::descriptor(ptx::shared_address(shared.sQ)) + QTile::offset(64, 0) * (warp() / 4);
    ptx::warpgroup_arrive();
    warpgroup_gemm_ss<Element, QTile, KeyTile, kHeadDim>(
        scores[0], q, KeyTile::descriptor(ptx::shared_address(shared.sK[block % kStages])), false);
    ptx::warpgroup_commit_batch();
  }
  __device__ void look_ahead(int block) {
    if (block % Ring::kBlocksAtOnce != 0 || block + Ring::kBlocksAtOnce >= blocks) return;
    const TileColumns &columns = task->columns;
    const int ahead = block + Ring::kBlocksAtOnce;
    store(ahead, fetch_column(columns, task->bias, column(ahead), next_key));
    next_key = fetch_key(columns, column(ahead + Ring::kBlocksAtOnce));
  }
  __device__ void make_probabilities(int block) {
    Rows::finish_scores(shared.ring.slot(block), (block + 1) * kColumns > task->columns.full);
    Rows::softmax();
  }
  __device__ void wait_for_values(int) const {} // they are copied with the keys
  __device__ void release(int) const {}
  __device__ void finish() {
    ptx::cp_async_wait<0>();
    Rows::finish();
  }
};

} // namespace fdm::cuda
