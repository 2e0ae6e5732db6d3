// SPDX-License-Identifier: BSD-3-Clause
// The division of work of the pair bias kernels. pair_bias/pair_bias.h describes the kernels.
#pragma once

#include <cstdint>

#include "../../indexing.h"
#include "facts.h"
#include "helper_work.h"
#include "part.h"

namespace fdm::cuda {

// Rows and keys of a tile of the sm_90 kernels.
constexpr int kPairBiasTileSm90 = 128;
// Limits of the small-tile kernels: rows and keys, and head dimension.
constexpr int kSmallTile = 64, kSmallTileHeadDim = 32;

constexpr int64_t kNonFiniteBytes = 256; // size of PairBiasBackward::non_finite

// Tiles of kPairBiasTileSm90 keys that a row of a tile of `tile_rows` rows sees.
FDM_INLINE int32_t visible_key_tiles(const fdm_problem &p, int64_t row_tile, int tile_rows = kPairBiasTileSm90) {
  if (!is_causal(p)) return int32_t(ceil_div(p.keys, kPairBiasTileSm90));
  const int64_t last_row = min64((row_tile + 1) * tile_rows, p.queries) - 1;
  return int32_t(ceil_div(clamp64(last_row + p.keys - p.queries + 1, 0, p.keys), kPairBiasTileSm90));
}

// The parameters of all pair bias kernels besides the problem.
struct PairBiasFacts {
  int32_t batches, heads;        // sequences and query heads that share an element of the bias
  bool shares_mask;              // the sources of a bias share the per-query mask or the intervals
  bool bias_chunks, mask_chunks; // rows can be copied 16 bytes at a time

  int64_t sources() const { return int64_t(batches) * heads; }
};

// A plane is one head of the bias in one element of its batch dimension.
inline int64_t planes_of(const fdm_problem &p) { return p.bias.shape[0] * p.bias.shape[1]; }

// Tiles of rows or keys, and groups of `slots` sources that a thread block processes side by side.
struct PairBiasTiles {
  int32_t slots, tiles, groups;
};

struct PairBiasForwardWork : PairBiasTiles {
  int32_t splits;
  // The fields below are for the sm_90 kernel. With splits, `blocks` thread blocks have equal shares of the `steps`
  // of all groups; without splits they have whole row tiles. `splits_heads`: a task has half a row tile of two query
  // heads that share K and V.
  bool splits_heads;
  bool splits_keys;      // a task has half a row tile, and each consumer warpgroup half of the keys of a key block
  int32_t blocks, steps; // steps: of a group
};

// The division of the tiles of the bias gradient and their steps over thread blocks. A step is the work of a tile on
// one group of sources.
struct DbiasDivision {
  int32_t slots, tile_rows, tile_keys, row_tiles, key_tiles;
  int32_t stages; // pipeline stages of copies: 1 or 2
  int32_t groups; // steps of a tile
  int64_t tiles;  // of a plane, without the tiles that see no key, but at least one for each row of tiles
  int64_t steps;  // of all tiles
  int32_t blocks; // thread blocks
  bool undivided; // no tile is divided

  int64_t parts_bytes() const; // for the partial first and last tile of a thread block
};

// The part of a tile of the bias gradient that a warp has.
constexpr int kDbiasWarpRows = 32, kDbiasWarpKeys = 64;

// Tiles of a row of tiles that see a key; at least one.
FDM_INLINE int64_t live_key_tiles(const fdm_problem &p, const DbiasDivision &work, int64_t row_tile) {
  if (!is_causal(p)) return work.key_tiles;
  const int64_t last_row = min64(p.queries, (row_tile + 1) * work.tile_rows) - 1;
  const int64_t visible = clamp64(last_row + p.keys - p.queries + 1, 1, p.keys);
  return ceil_div(visible, work.tile_keys);
}

// Maximum sources of a thread block of the sm_90 forward kernel: the registers of their sums limit it.
constexpr int sm90_sources(int head_dim) { return head_dim <= 64 ? 2 : 1; }
// Whether smem has room for the mask rows of one source. There is none with 128 columns and a float32 bias.
constexpr bool has_room_for_mask(int head_dim, bool float32_bias) { return head_dim <= 64 || !float32_bias; }

// The division of work of sm90/fused.cuh. A launch has the sources of some batch elements, and `splits` tasks for
// each tile of kPairBiasTileSm90 rows and keys. A step is the work of a tile on one source. If `splits` is 0, all
// thread blocks have the same number of consecutive steps.
constexpr int kTileQuadsSm90 = kPairBiasTileSm90 * kPairBiasTileSm90 / 4;

struct FusedDivision {
  bool small_tiles; // a consumer warpgroup has all rows and keys of a source
  bool clusters;    // a cluster has the tiles of a plane, with `splits` tasks for each plane
  int32_t row_tiles, key_tiles, splits;
  int32_t first_batch, batches;
  int32_t first_plane, planes;
  int64_t first_source, sources; // of each plane
  // Another launch follows, so the memory of its sums is cleared once the sums of this one are rounded. With sums in
  // the gradients, that memory ends before sequence `past_cleared`, counted from the first of this launch; otherwise
  // `past_cleared` is 0.
  bool clears_sums;
  int32_t past_cleared;
  int32_t blocks; // thread blocks; 0: as many clusters as the driver says can be resident

  FDM_MEMBER int64_t tiles() const { return int64_t(planes) * row_tiles * key_tiles; }
  int64_t dbias_bytes() const { return int64_t(planes) * row_tiles * key_tiles * kTileQuadsSm90 * 16; }
  // The value of `splits` that takes the least time with `clusters` resident clusters.
  int32_t cluster_splits(int64_t task_steps, int64_t clusters) const;
};

// The launches of the fused kernel, each with some batch elements.
struct FusedLaunches {
  FusedDivision work; // of the first launch
  bool shares_bias;   // the batch shares the bias, so all launches add to the same sums of dbias
  bool sums_dbias;    // there may be sums of dbias: thread blocks may share a tile
  // The second halves of sums are in the gradients of later sequences, or in spare memory for `spare_sequences`
  // sequences. Otherwise the workspace has both halves of the sums of a launch.
  bool sums_in_gradients;
  int64_t spare_sequences;
  int64_t query_bytes, key_bytes; // of one half, for one sequence
  int64_t delta_bytes;            // for one sequence, if the deltas are not kept for the next launch; else 0
  int64_t dbias_bytes;
  bool deltas_in_dq; // the deltas are in the memory of dq
  int64_t dim;       // columns of the sums
  // Inputs of the division into launches.
  int64_t batch, bias_heads, source_heads, task_steps;
  int32_t sms;
  bool may_split, causal;

  int64_t sequence_bytes() const { return query_bytes + 2 * key_bytes; }
  // Whether the deltas stay available for the fixed-order kernels.
  bool keeps_deltas() const { return delta_bytes == 0 && !deltas_in_dq; }
  // The deltas of one launch.
  int64_t deltas_bytes() const;
  int64_t bytes() const;
  // The number of sequences of the next launch when `left` are left.
  int64_t next_batches(int64_t left) const;
  // Sets the number of sequences of a launch to `batches`.
  void set_batches(FusedDivision *division, int64_t batches, bool splits) const;
  // Returns the launch that begins with sequence `first`, and its number of sequences.
  FusedDivision launch(int64_t first, int64_t *batches) const;
};

// The location of partial tiles of the bias gradient until they are summed.
enum class DbiasParts : uint8_t { none, workspace, in_dk };

struct PairBiasBackwardRoute {
  PairBiasFacts facts;
  bool fused; // one kernel computes all gradients; the fixed-order kernels take over if it sets non_finite
  FusedLaunches fused_launches; // of the fused kernel
  bool writes_dbias;            // the dQ kernel writes the bias gradient
  // The fixed-order kernels.
  bool wants_dbias, wants_dq, wants_dkdv;
  PairBiasTiles dq, dkdv;
  DbiasDivision dbias;
  DbiasParts dbias_parts;
  PartSumGrid dbias_sum;
  StatisticsDivision statistics_division;
  Part deltas;           // deltas; for the fixed-order kernels only, if the fused kernel keeps none
  Part non_finite, live; // PairBiasBackward::non_finite; bitmap of tiles with kept pairs
  Part rest;             // sums and deltas of the fused kernel, or partial tiles of the bias gradient
};

} // namespace fdm::cuda
