// SPDX-License-Identifier: BSD-3-Clause
// How the pair bias kernels divide their work: see pair_bias/pair_bias.h for what they do.
#pragma once

#include <cstdint>

#include "../../indexing.h"
#include "facts.h"
#include "helper_work.h"
#include "part.h"

namespace fdm::cuda {

// Rows and keys of a tile of the kernels for sm_90.
constexpr int kPairBiasTileSm90 = 128;
// Windows are problems with at most so many rows and keys, and columns.
constexpr int kWindow = 64, kWindowHeadDim = 32;

constexpr int64_t kNonFiniteBytes = 256; // of PairBiasBackward::non_finite

// Tiles of kPairBiasTileSm90 keys that a row of a tile of so many rows sees.
FDM_INLINE int32_t visible_key_tiles(const fdm_problem &p, int64_t row_tile, int tile_rows = kPairBiasTileSm90) {
  if (!is_causal(p)) return int32_t(ceil_div(p.keys, kPairBiasTileSm90));
  const int64_t last_row = min64((row_tile + 1) * tile_rows, p.queries) - 1;
  return int32_t(ceil_div(clamp64(last_row + p.keys - p.queries + 1, 0, p.keys), kPairBiasTileSm90));
}

// The parameters of all pair bias kernels beside the problem.
struct PairBiasFacts {
  int32_t batches, heads;        // sequences and query heads that share an element of the bias
  bool shares_mask;              // the sources of a bias have the mask in common, as far as it has rows
  bool bias_chunks, mask_chunks; // rows can be copied 16 bytes at a time
  bool aligned;                  // what rows_are_aligned says of q, k and v

  int64_t sources() const { return int64_t(batches) * heads; }
};

// A plane is a head of the bias, and an element of its batch.
inline int64_t planes_of(const fdm_problem &p) { return p.bias.shape[0] * p.bias.shape[1]; }

// Row tiles or keys, and groups of `slots` sources that a thread block works on side by side.
struct PairBiasTiles {
  int32_t slots, tiles, groups;
};

struct PairBiasForwardWork : PairBiasTiles {
  int32_t splits;
  // The rest is for the kernel of sm_90. With splits, `blocks` of threads have equal shares of the `steps` of all
  // groups, without splits whole row tiles. `pairs`: a task has half a row tile of two query heads that share K and V.
  bool pairs;
  bool halves;           // a task has half a row tile, and each consumer warpgroup half of the keys of a block
  int32_t blocks, steps; // steps: of a group
};

// How the tiles of the bias gradient and their steps are divided over thread blocks. A step is the work of a tile on
// one group of sources.
struct DbiasDivision {
  int32_t slots, tile_rows, tile_keys, row_tiles, key_tiles;
  int32_t stages; // of copies: 1 or 2
  int32_t groups; // steps of a tile
  int64_t tiles;  // of a plane, those without a visible key left out, but one of each row of tiles
  int64_t steps;  // of all tiles
  int32_t blocks; // of threads
  bool whole;     // no tile is divided

  int64_t parts_bytes() const; // of the partial first and last tile of a block
};

// A warp has 32 rows by 64 keys of a tile of the gradient of a bias.
constexpr int kDbiasWarpRows = 32, kDbiasWarpKeys = 64;

// Tiles of a row of tiles that have a visible key; at least one.
FDM_INLINE int64_t live_key_tiles(const fdm_problem &p, const DbiasDivision &work, int64_t row_tile) {
  if (!is_causal(p)) return work.key_tiles;
  const int64_t last_row = min64(p.queries, (row_tile + 1) * work.tile_rows) - 1;
  const int64_t visible = clamp64(last_row + p.keys - p.queries + 1, 1, p.keys);
  return ceil_div(visible, work.tile_keys);
}

// Sources of a thread block in their forward pass, where a bias has so many: as the registers of their sums allow.
constexpr int sm90_sources(int head_dim) { return head_dim <= 64 ? 2 : 1; }
// Whether shared memory has room for the mask's rows of one source. It has none beside 128 columns and a float32 bias.
constexpr bool has_room_for_mask(int head_dim, bool float32_bias) { return head_dim <= 64 || !float32_bias; }

// How sm90/fused.cuh divides its work: a launch has the sources of some of the batch, and `splits` tasks for each tile
// of kPairBiasTileSm90 rows and keys. Where `splits` is 0, each thread block has as many steps as any other, which
// follow each other; a step is the work of a tile on a source.
constexpr int kTileQuadsSm90 = kPairBiasTileSm90 * kPairBiasTileSm90 / 4;

struct FusedDivision {
  bool windows;  // a consumer warpgroup has all rows and keys of a source
  bool clusters; // a cluster has the tiles of a plane, and `splits` tasks for each plane
  int32_t row_tiles, key_tiles, splits;
  int32_t first_batch, batches;
  int32_t first_plane, planes;
  int64_t first_source, sources; // of each plane
  // Another launch follows: what it adds to is cleared once sums are rounded. In the gradients, its sums lie before
  // those of sequence `past_cleared`, counted from the first of this launch; else `past_cleared` is 0.
  bool clears;
  int32_t past_cleared;
  int32_t blocks; // of threads; 0: as many clusters as the driver says run at the same time

  FDM_MEMBER int64_t tiles() const { return int64_t(planes) * row_tiles * key_tiles; }
  int64_t dbias_bytes() const { return int64_t(planes) * row_tiles * key_tiles * kTileQuadsSm90 * 16; }
  // `splits` of clusters that take the least time with so many clusters.
  int32_t cluster_splits(int64_t task_steps, int64_t clusters) const;
};

// The launches of the fused kernel, each with some of the batch.
struct FusedPlan {
  FusedDivision work; // of the first launch
  bool shares;        // the batch shares the bias, so all launches add to the same sums of dbias
  bool sums_dbias;    // there may be such sums: thread blocks may share a tile
  // The second halves of sums lie in the gradients of sequences to come, or in the memory of so many that are spare.
  // Else the workspace has both halves of the sums of a launch.
  bool in_gradients;
  int64_t spare;
  int64_t query_bytes, key_bytes; // of a half, for a sequence
  int64_t delta_bytes;            // for a sequence, of the deltas that are not kept for the next launch; else 0
  int64_t dbias_bytes;
  bool deltas_in_dq; // they lie where dq will be
  int64_t dim;       // columns of the sums
  // What the launches are divided by.
  int64_t batch, bias_heads, source_heads, task_steps;
  int32_t sms;
  bool may_split, causal;

  int64_t sequence_bytes() const { return query_bytes + 2 * key_bytes; }
  // Whether the deltas are kept for the kernels of fixed order.
  bool keeps_deltas() const { return delta_bytes == 0 && !deltas_in_dq; }
  // What one launch needs beside the sums.
  int64_t deltas_bytes() const;
  int64_t bytes() const;
  // The sequences of a launch, where so many are left.
  int64_t next_batches(int64_t left) const;
  // Gives a launch so many sequences.
  void set_batches(FusedDivision *division, int64_t batches, bool splits) const;
  // The launch whose sequences begin with `first`, and how many it has.
  FusedDivision launch(int64_t first, int64_t *batches) const;
};

// The place of partial tiles of the gradient of a bias until they are added up.
enum class DbiasParts : uint8_t { none, workspace, in_dk };

struct PairBiasBackwardRoute {
  PairBiasFacts facts;
  bool fused;        // one kernel computes all gradients, unless it finds something that is not finite
  FusedPlan plan;    // of that
  bool writes_dbias; // the kernel of dq writes the gradient of the bias
  // The kernels of fixed order.
  bool wants_dbias, wants_dq, wants_dkdv;
  PairBiasTiles dq, dkdv;
  DbiasDivision dbias;
  DbiasParts dbias_parts;
  PartSumGrid dbias_sum;
  StatisticsDivision statistics_division;
  Part deltas;           // also, where the fused kernel does not keep its own, of the kernels of fixed order
  Part non_finite, live; // whether the fused kernel found something, and tiles that a mask leaves
  Part rest;             // sums and deltas of the fused kernel, or parts of the gradient of a bias
};

} // namespace fdm::cuda
