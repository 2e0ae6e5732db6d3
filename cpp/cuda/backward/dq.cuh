// SPDX-License-Identifier: BSD-3-Clause
// The gradient of the queries. A thread block has a row tile of one head.
//
// It iterates over the tile's columns as the forward pass does, and recomputes the probabilities from lse:
//   S = Q K', P = exp(S - lse), dP = dO V', dS = P (dP - delta), dQ = scale dS K.
// The copies of the next block's K and V overlap the products of this block. Each warp copies the bias per query of
// its rows a block ahead, too.
#pragma once

#include "../tile/dead_columns.cuh"
#include "../tile/row_tile_config.cuh"
#include "dq_rows.cuh"

namespace fdm::cuda {

template <class Element, int kHeadDim, int kRows, int kColumns, int kWarps, int kBlocks, TileKind kKind>
struct DqConfig : RowTileConfig<Element, kHeadDim, kRows, kColumns, kWarps, kBlocks, kKind> {
  static constexpr TileKind kTileKind = kKind;
  // Keys are copied one block ahead, so the facts about them must arrive two blocks ahead.
  static_assert(KeyRing<kColumns, DqConfig::kThreads>::kBlocksAtOnce >= 2);
};

template <class Config> struct DqShared {
  alignas(1024) char sQ[Config::kQBytes];
  char sdO[Config::kQBytes];
  char sK[2][Config::kKeyBytes], sV[2][Config::kKeyBytes];
  KeyRing<Config::kColumns, Config::kThreads> ring;
  DqTask task;
  alignas(16) uint32_t sBias[Config::kGeneral ? Config::kRows : 1][Config::kBiasPitch];
  DeadColumns<Config::kColumns, Config::kGeneral> dead;
};

template <class Config>
struct DqBlock
    : DqRows<typename Config::Element, Config::kRowTiles, Config::kColumns / 8, Config::kHeadDim, Config::kTileKind> {
  using Rows =
      DqRows<typename Config::Element, Config::kRowTiles, Config::kColumns / 8, Config::kHeadDim, Config::kTileKind>;
  using Element = typename Config::Element;
  using Tile = typename Config::Tile;
  using Ring = KeyRing<Config::kColumns, Config::kThreads>;
  static constexpr int kRowTiles = Config::kRowTiles, kColumns = Config::kColumns, kHeadDim = Config::kHeadDim;
  using Rows::dq, Rows::gradients, Rows::params, Rows::scores, Rows::task;

  DqShared<Config> &shared;
  Ring &ring;
  uint32_t q_base, dout_base, k_base, v_base;
  uint32_t q_fragment, dout_fragment;             // the left operands
  uint32_t row_offset_right, column_offset_right; // offsets of the right operands in their tile

  __device__ DqBlock(const BackwardParams &parameters, DqShared<Config> &memory)
      : Rows(parameters, memory.task), shared(memory), ring(memory.ring) {
    q_base = ptx::shared_address(shared.sQ);
    dout_base = ptx::shared_address(shared.sdO);
    k_base = ptx::shared_address(shared.sK);
    v_base = ptx::shared_address(shared.sV);
    const int first = threadIdx.x / 32 * (16 * kRowTiles);
    q_fragment = Tile::left(q_base, first);
    dout_fragment = Tile::left(dout_base, first);
    row_offset_right = Tile::right_rows(0);
    column_offset_right = Tile::right_columns(0);
  }

  // Rows without a gradient are loaded as zeros, so that non-finite values in their dO reach no result.
  __device__ void load_rows() {
    const auto copy = [&](const fdm_tensor &t, uint32_t tile) {
      const auto *base = static_cast<const uint16_t *>(t.data) + row_offset(t, task.s, task.first_row, task.head);
      copy_rows<Tile, Config::kRows, Config::kThreads>(tile, int(params.p.head_dim), [&](int r) -> const uint16_t * {
        return this->statistics(r).empty() ? kZeroRow : base + r * t.stride[1];
      });
    };
    copy(params.p.q, q_base);
    copy(params.a.dout, dout_base);
    bool large = false;
    for_pairs<kRowTiles>(
        [&](int m, int half) { large |= this->set_statistics(m, half, this->statistics(this->row(m, half))); });
    this->cuts_probabilities = __syncthreads_or(large);
  }

  __device__ void load_keys(int block) const {
    const typename Ring::Slot &slot = ring.slot(block);
    const auto copy = [&](const uint16_t *const *rows, uint32_t tile) {
      copy_rows<Tile, kColumns, Config::kThreads>(tile + block % 2 * Config::kKeyBytes, int(params.p.head_dim),
                                                  [&](int c) { return rows[c]; });
    };
    copy(slot.k_row, k_base);
    copy(slot.v_row, v_base);
  }

  // The column that this thread fetches in the batch of blocks that begins with `block`.
  __device__ static int column(int block) { return block * kColumns + int(threadIdx.x); }
  __device__ void store(int block, const ColumnEntry &entry) {
    store_column<kColumns>(ring.slot(block + int(threadIdx.x) / kColumns), params.p, task.s, task.sequence_index,
                           task.kv_head, task.columns, task.bias, column(block), entry);
  }

  __device__ void load_row_bias(int block) const {
    copy_row_bias<16 * kRowTiles>(shared.sBias, params.p.bias, task, ring.slot(block).key);
  }

  __device__ void compute_ds(int block) {
    const typename Ring::Slot &slot = ring.slot(block);
    const bool partial = (block + 1) * kColumns > task.columns.full;
    if constexpr (Config::kGeneral) {
      const RowBiasReader<Element, Config::kBiasPitch> row_bias({params.p.bias, task.bias}, shared.sBias, slot.key,
                                                                task.first_row, this->row(0, 0));
      Rows::compute_ds(slot, partial, row_bias);
    } else {
      Rows::compute_ds(slot, partial);
    }
  }

  __device__ void multiply(int block, int blocks) {
    const uint32_t k = k_base + block % 2 * Config::kKeyBytes, v = v_base + block % 2 * Config::kKeyBytes;
    clear(scores);
    gemm_ss<Element, kHeadDim>(scores, q_fragment, k + row_offset_right);
    clear(gradients);
    gemm_ss<Element, kHeadDim>(gradients, dout_fragment, v + row_offset_right);
    compute_ds(block);
    if constexpr (Config::kGeneral) {
      if (shared.dead.is_second_pass)
        shared.dead.template clear<Tile, Config::kThreads>(
            k, scores, 0.0f, [&](int m, int half) { return this->exists(this->row(m, half)); });
      __syncwarp(); // the bias has been read
      if (block + 1 < blocks) load_row_bias(block + 1);
      ptx::cp_async_fence();
    }
    gemm_rs<Element, kHeadDim>(dq, scores, k + column_offset_right);
  }

  // The prologue loads Q and dO and starts the copies of the first block. The mainloop iterates over the blocks.
  __device__ void run() {
    const int blocks = (task.columns.count + kColumns - 1) / kColumns;
    clear(dq);
    store(0, fetch_column(task.columns, task.bias, column(0), fetch_key(task.columns, column(0))));
    int32_t next_key = fetch_key(task.columns, column(Ring::kBlocksAtOnce));
    load_rows(); // its barrier also makes the ring's first blocks visible
    if (blocks > 0) {
      load_keys(0);
      if constexpr (Config::kGeneral) load_row_bias(0);
    }
    ptx::cp_async_fence();
    for (int block = 0; block < blocks; ++block) {
      ptx::cp_async_wait<0>();
      __syncthreads(); // this block has arrived; all threads have read the previous one
      if (block + 1 < blocks) load_keys(block + 1);
      ptx::cp_async_fence();
      const int ahead = block + Ring::kBlocksAtOnce;
      const bool fetch_ahead = block % Ring::kBlocksAtOnce == 0 && ahead < blocks;
      ColumnEntry entry;
      if (fetch_ahead) {
        entry = fetch_column(task.columns, task.bias, column(ahead), next_key);
        next_key = fetch_key(task.columns, column(ahead + Ring::kBlocksAtOnce));
      }
      multiply(block, blocks);
      if (fetch_ahead) store(ahead, entry);
    }
    ptx::cp_async_wait<0>();
  }
};

template <class Config>
__global__ void __launch_bounds__(Config::kThreads, Config::kBlocks)
    dq_kernel(const __grid_constant__ BackwardParams params) {
  auto &shared = dynamic_memory<DqShared<Config>>();
  const fdm_problem &p = params.p;
  // The order is the forward pass's: heads vary fastest, and the longest tiles of a causal mask come first.
  const int64_t tiles = ceil_div(p.queries, Config::kRows);
  const int64_t head = blockIdx.x % p.heads, number = blockIdx.x / p.heads;
  const int64_t first_row = (tiles - 1 - number % tiles) * Config::kRows, sequence_index = number / tiles;
  const Sequence s = sequence(p, sequence_index);
  if (first_row >= s.q_count) return;
  if (threadIdx.x == 0) {
    shared.dead.is_second_pass = false;
    shared.task = {s,
                   sequence_index,
                   head,
                   head / group_size(p),
                   first_row,
                   tile_columns(p, params.plan, s, sequence_index, head, first_row / kTileRows),
                   bias_view(p, s, sequence_index, head, first_row / kTileRows)};
  }
  __syncthreads();
  DqBlock<Config> block(params, shared);
  const auto exists = [&](int m, int half) { return block.exists(block.row(m, half)); };
  do block.run();
  while (Config::kGeneral && shared.dead.needs_recompute(block.dq, exists));
  block.write();
}

} // namespace fdm::cuda
