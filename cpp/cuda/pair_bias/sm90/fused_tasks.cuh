// SPDX-License-Identifier: BSD-3-Clause
// The tasks of the fused kernel, and the shared memory of a thread block.
#pragma once

#include "../fused_tiles.cuh"
#include "../gradient_sums.cuh"
#include "ptx/cluster.cuh"
#include "row_columns.cuh"
#include "row_copy.cuh"

namespace fdm::cuda {

// The operands. If kInTurn, each has barriers of its own.
enum FusedOperand { kQuery, kKey, kDout, kValue, kFusedOperands };

// What a step does with its part of dQ, dK and dV. sums: it adds the part to float32 sums in global memory. exchange:
// a cluster has all tiles of a source, and its blocks complete the gradients among themselves (fused_epilogues.cuh).
// small_tiles: the problem has at most kSmallTile rows and keys, a tile has those of two sources, one below the other,
// and the gradients are complete.
enum class FusedEpilogue { sums, exchange, small_tiles };
template <class Config> struct SumsEpilogue;
template <class Config> struct ExchangeEpilogue;
template <class Config> struct SmallTileEpilogue;

template <class ElementType, int kHeadDimension, BiasType kBias, FusedEpilogue kGradients> struct PairBiasFusedConfig {
  using Element = ElementType;
  static constexpr int kHeadDim = kHeadDimension, kTile = kPairBiasTileSm90;
  static constexpr bool kFloat32Bias = kBias == BiasType::float32;
  using Pair = TilePair<kHeadDim>; // Q and dO, or K and V
  static constexpr bool kSmallTiles = kGradients == FusedEpilogue::small_tiles,
                        kCluster = kGradients == FusedEpilogue::exchange;
  static constexpr int kSources = kSmallTiles ? 2 : 1, kSourceTile = kTile / kSources; // rows and keys of a source
  using Scores = SmemTile<kSourceTile, kTile>;
  // With 128 columns, shared memory has room for one tile of each operand, and one for P and then dS.
  static constexpr bool kInTurn = kHeadDim == 128;
  static constexpr int kStages = kInTurn || (kHeadDim == 64 && kFloat32Bias) ? 1 : 2, kScoreTiles = kInTurn ? 1 : 2;
  static constexpr int kBarriers = kInTurn ? kFusedOperands : kStages;
  // If shared memory has room, the products add the statistics of rows and keys (row_columns.cuh), and the bias is
  // stored as float32 times log2 e.
  static constexpr bool kFolds = kHeadDim == 32, kFloats = kFloat32Bias || kFolds;
  static constexpr int kBiasChunks = (kFloats ? 16 : 8) / kSources; // 16 bytes each, per thread
  // The band of 16 rows of a source that this consumer warp has.
  __device__ static int band() { return threadIdx.x / 32 % (kSourceTile / 16); }
  using Registers = std::conditional_t<kSmallTiles, RoleRegisters<208, 80>,
                                       std::conditional_t<kFolds, RoleRegisters<216, 72>, RoleRegisters<224, 56>>>;
  using Epilogue = std::conditional_t<
      kSmallTiles, SmallTileEpilogue<PairBiasFusedConfig>,
      std::conditional_t<kCluster, ExchangeEpilogue<PairBiasFusedConfig>, SumsEpilogue<PairBiasFusedConfig>>>;
};

// The exchange between blocks of a cluster (fused_epilogues.cuh): blocks with the same rows, and blocks with the same
// keys.
enum ClusterAxis { kSameRows, kSameKeys, kClusterAxes };
struct ClusterExchange {
  uint64_t readable[kClusterAxes][Roles::kConsumerWarps]; // a warp has received the part of the other block
  uint64_t writable[kClusterAxes];                        // all warps of the other block can receive parts
  float agreed;                                           // all blocks use that of the first block of the cluster

  __device__ void init() {
    if (threadIdx.x > 0) return;
    for (int axis = 0; axis < kClusterAxes; ++axis) {
      ptx::init_barrier(writable[axis], Roles::kConsumerWarps);
      for (uint64_t &barrier : readable[axis]) ptx::init_barrier(barrier, 1);
    }
  }
  // Returns the first block's `found`, so that all blocks of the cluster agree. All threads call this.
  __device__ bool agree(bool found) {
    if (threadIdx.x == 0) agreed = found;
    __syncthreads();
    if (gridDim.y == 1) return agreed != 0.0f;
    ptx::sync_cluster();
    return ptx::load_remote(&agreed, 0) != 0.0f;
  }
  __device__ static void leave() {
    if (gridDim.y > 1) ptx::leave_cluster();
  }
};

struct NoExchange {
  __device__ void init() {}
  __device__ static bool agree(bool found) { return __syncthreads_or(found); }
  __device__ static void leave() {}
};

template <class Config> struct PairBiasFusedShared {
  struct Place {
    SumHalves dq, dk, dv; // of the first row or key of the tile
  };

  alignas(1024) char sRows[Config::kStages][Config::Pair::kBytes], sKeys[Config::kStages][Config::Pair::kBytes];
  char sScores[Config::kScoreTiles][Config::Scores::kBytes]; // P and dS
  uint4 bias[Config::kBiasChunks][Roles::kConsumerThreads];  // each thread's own elements; -inf for dropped pairs
  Place places[Config::kStages];
  std::conditional_t<Config::kFolds, RowColumns<typename Config::Element, Config::kStages>, RowNumbers<Config::kStages>>
      known;
  uint64_t full[Config::kBarriers], empty[Config::kBarriers];
  std::conditional_t<Config::kCluster, ClusterExchange, NoExchange> exchange;

  // All threads of the block call this, before they are synchronized.
  __device__ void init() {
    known.init();
    exchange.init();
    if (threadIdx.x > 0) return;
    for (int i = 0; i < Config::kBarriers; ++i) {
      ptx::init_barrier(full[i], 2 * Roles::kProducerThreads);
      ptx::init_barrier(empty[i], Roles::kConsumerThreads);
    }
  }
};

// A tile, and the range of its sources.
struct PairBiasFusedTask {
  int plane, row_tile, key_tile;
  int64_t first, past;

  PairBiasFusedTask() = default;
  // `tile` and the sources are numbered within the launch. `skips`: a tile without kept pairs has an empty range of
  // sources.
  __device__ PairBiasFusedTask(const PairBiasBackward &work, int tile, int first_source, int past_source, bool skips) {
    const FusedWork &division = work.fused;
    const int row = tile / division.key_tiles;
    key_tile = tile - row * division.key_tiles;
    row_tile = row % division.row_tiles;
    plane = division.first_plane + row / division.row_tiles;
    first = division.first_source + first_source;
    past = division.first_source + past_source;
    if (!skips) return;
    const fdm_problem &p = work.call.p;
    const int64_t last_row = min64(p.queries, (row_tile + 1) * int64_t(kPairBiasTileSm90)) - 1;
    const bool seen = !is_causal(p) || int64_t(key_tile) * kPairBiasTileSm90 <= last_row + p.keys - p.queries;
    if (!seen || !LiveTiles::is_live(work.live.row(plane, row_tile), key_tile)) past = first;
  }

  // Calls function(task) for each task of this thread block. A cluster has all tiles of a plane. None of its blocks
  // skips a tile, because each takes part in the exchange.
  template <bool kCluster, class Function>
  __device__ static void for_each(const PairBiasBackward &work, const Function &function) {
    const FusedWork &division = work.fused;
    if constexpr (kCluster) {
      const int sources = int(division.sources), splits = division.splits, past = division.planes * splits;
#pragma unroll 1
      for (int number = int(blockIdx.x); number < past; number += int(gridDim.x)) {
        const int split = number / division.planes, plane = number - split * division.planes;
        function(PairBiasFusedTask(work, plane * int(gridDim.y) + int(blockIdx.y),
                                   int(int64_t(sources) * split / splits), int(int64_t(sources) * (split + 1) / splits),
                                   false));
      }
      return;
    }
    const int tiles = int(division.tiles()), sources = int(division.sources), splits = division.splits;
    // Counts tasks, in which tiles vary fastest within a split; or steps, in which sources vary fastest within a
    // tile.
    int number = int(blockIdx.x), past = tiles * splits;
    if (splits == 0) {
      const int64_t steps = int64_t(tiles) * sources;
      number = int(steps * blockIdx.x / gridDim.x);
      past = int(steps * (blockIdx.x + 1) / gridDim.x);
    }
#pragma unroll 1
    while (number < past) {
      const int split = splits == 0 ? 0 : number / tiles;
      const int tile = splits == 0 ? number / sources : number - split * tiles;
      const int first = splits == 0 ? number - tile * sources : int(int64_t(sources) * split / splits);
      const int end = splits == 0 ? min(sources, past - tile * sources) : int(int64_t(sources) * (split + 1) / splits);
      function(PairBiasFusedTask(work, tile, first, end, true));
      number += splits == 0 ? end - first : int(gridDim.x);
    }
  }
};

} // namespace fdm::cuda
