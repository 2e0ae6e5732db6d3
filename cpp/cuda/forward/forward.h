// SPDX-License-Identifier: BSD-3-Clause
// What the host hands to the forward kernels.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "../plan/plan.cuh"
#include "../tile/row_places.cuh"
#include "../tile/score.cuh"
#include "../tile/tile_order.cuh"
#include "combine.h"

namespace fdm::cuda {

struct ForwardParams {
  fdm_problem p;
  fdm_forward_args a;
  Plan plan;
  ScoreFactors factors;   // made once, since a division on the device takes registers throughout the mainloop
  float bias_factor;      // makes a bias to base 2 one in units of q.k; 0: scores are not linear in q.k
  int32_t tiles;          // tiles of the longest sequence
  int32_t heads_per_tile; // 1, or the heads of a group
  TileOrder order;
  // Rows of a tile divided by heads_per_tile are the high 16 bits of a product with this, since both are at most 128.
  uint32_t heads_reciprocal;
  int32_t splits;
  bool consecutive;       // sm90/forward_boxes.cuh serves the problem
  bool short_columns;     // and so does sm90/small_boxes.cuh, sooner
  bool few_columns;       // sm90/small_tiles.cuh is for them
  bool finds_keys;        // decode.cuh: blocks list the keys of the mask that they keep, there is no plan
  bool merges_in_cluster; // decode.cuh: the splits are a cluster
  Partials partials;      // splits > 1
  uint32_t *tickets;      // of a persistent kernel: a counter of tiles, 0 at first; null: their order is fixed
  RowPlaces rows;
  bool aligned; // what rows_are_aligned says of q, k, v and out
};

// Launches one instantiation, which serves head dimensions up to kHeadDim.
template <class Element, int kHeadDim> cudaError_t launch_forward(const ForwardParams &params, cudaStream_t stream);

// Queries of a tile, and columns that are fetched at a time, of the instantiation for a head dimension.
struct ForwardTileSize {
  int rows, columns;
};
ForwardTileSize forward_tile_size(int64_t head_dim);

// Whether a forward pass whose plan nothing else would use needs none. Its blocks of threads then read the mask.
bool needs_no_plan(const fdm_problem &p);

// Whether the heads of a group share their columns and bias. A key that one head drops must not reach that head
// through a tile that it shares with a head that keeps the key.
bool heads_share_columns(const fdm_problem &p);

// direct_decode.cu: whether its kernel serves the problem on a device of so many SMs, and its launch. The workspace has
// room for the results of most_parts parts.
bool decodes_directly(const fdm_problem &p, const fdm_forward_args &args, int64_t sms, int64_t most_parts);
cudaError_t run_direct_decode(const fdm_problem &p, const fdm_forward_args &args, int64_t sms, int64_t most_parts,
                              void *workspace);

int64_t forward_workspace_bytes(const fdm_problem &p);
cudaError_t run_forward(const fdm_problem &p, const fdm_forward_args &args, const void *plan, void *workspace);

} // namespace fdm::cuda
