// SPDX-License-Identifier: BSD-3-Clause
// The parameters of the forward kernels.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "../plan/plan.cuh"
#include "../route/route.h"
#include "../tile/row_places.cuh"
#include "../tile/score.cuh"
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
  bool finds_keys;        // decode.cuh: blocks list the keys of the mask that they keep, there is no plan
  bool merges_in_cluster; // decode.cuh: the splits are a cluster
  Partials partials;      // splits > 1
  uint32_t *tickets;      // of a persistent kernel: a counter of tiles, 0 at first; null: their order is fixed
  RowPlaces rows;
  bool aligned; // what rows_are_aligned says of q, k, v and out
};

struct BoxMaps;

// The parameters of a launch.
struct ForwardLaunch {
  const ForwardRoute &route;
  const ForwardParams &params;
  const BoxMaps *maps; // of a route that copies boxes
};

// Launches one instantiation, which serves head dimensions up to kHeadDim.
template <class Element, int kHeadDim> cudaError_t launch_forward(const ForwardLaunch &work, cudaStream_t stream);

// direct_decode.cu: one query that reads keys directly.
cudaError_t run_direct_decode(const fdm_problem &p, const fdm_forward_args &args, const ForwardRoute &route,
                              const DeviceFacts &device, void *workspace);

cudaError_t run_forward(const fdm_problem &p, const fdm_forward_args &args, const DeviceFacts &device, const void *plan,
                        void *workspace);

} // namespace fdm::cuda
