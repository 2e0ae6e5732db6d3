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
  ScoreFactors factors;   // made on the host, since a device division takes registers throughout the mainloop
  float bias_factor;      // converts a base-2 bias to units of q.k; 0: scores are not linear in q.k
  int32_t tiles;          // tiles of the longest sequence
  int32_t heads_per_tile; // 1, or the heads of a group
  TileOrder order;
  // row / heads_per_tile is the high 16 bits of row * heads_reciprocal, since both are at most 128.
  uint32_t heads_reciprocal;
  int32_t splits;
  bool finds_keys;        // decode.cuh: there is no plan; thread blocks list the kept keys of the mask
  bool merges_in_cluster; // decode.cuh: the splits are a cluster
  Partials partials;      // splits > 1
  uint32_t *tickets;      // of a persistent kernel: a counter of tiles, 0 at first; null: their order is fixed
  RowPlaces rows;
  bool aligned; // rows_are_aligned() of q, k, v and out
};

struct BoxMaps;

// The parameters of a launch.
struct ForwardLaunch {
  const ForwardRoute &route;
  const ForwardParams &params;
  const BoxMaps *maps; // of a route that copies boxes
};

// Launches one instantiation, for head dimensions up to kHeadDim.
template <class Element, int kHeadDim> cudaError_t launch_forward(const ForwardLaunch &work, cudaStream_t stream);

// direct_decode.cu: one query that reads keys directly.
cudaError_t run_direct_decode(const fdm_problem &p, const fdm_forward_args &args, const ForwardRoute &route,
                              const DeviceFacts &device, void *workspace);

cudaError_t run_forward(const fdm_problem &p, const fdm_forward_args &args, const DeviceFacts &device, const void *plan,
                        void *workspace);

} // namespace fdm::cuda
