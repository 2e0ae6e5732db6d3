// SPDX-License-Identifier: BSD-3-Clause
// The kernel parameters of calls with key lists.
#pragma once

#include <cuda_runtime_api.h>

#include "../route/list_route.h"
#include "../tile/score.cuh"

namespace fdm::cuda {

struct ListParams {
  fdm_problem p;
  fdm_forward_args forward;
  ScoreFactors factors;
  ListTiles tiles;
  bool aligned;      // rows_are_aligned() for q, k and v
  bool copies_rows;  // rows of k and v are copied 16 bytes at a time, as tile/row_places.cuh allows
  int32_t page_rows; // row numbers from one page to the next
};

// Float32 sums that thread blocks add to; null for gradients that are not wanted.
struct ListSums {
  float *dk, *dv, *bias, *index, *sink;
};

struct ListBackwardParams : ListParams {
  fdm_backward_args backward;
  ListSums sums;
  ListPass pass;     // of kernels with mma.sync
  float *query_sums; // the dQ sums between passes; null: one pass, or dQ is not wanted
  int32_t sum_dim;   // columns of the sums of keys: D of the instantiation
};

// The parameters of a launch.
struct ListLaunch {
  const ListRoute &route;
  const ListParams &params;
};
struct ListBackwardLaunch {
  const ListRoute &route;
  const ListBackwardParams &params;
};

// Launches one instantiation, which serves head dimensions up to kHeadDim.
template <class Element, int kHeadDim> cudaError_t launch_list_forward(const ListLaunch &work, cudaStream_t stream);
template <class Element, int kHeadDim>
cudaError_t launch_list_backward(const ListBackwardLaunch &work, cudaStream_t stream);

// Rounds the sums to the gradients.
cudaError_t launch_list_rounding(const ListBackwardLaunch &work, cudaStream_t stream);

cudaError_t run_list_forward(const fdm_problem &p, const fdm_forward_args &args, const DeviceFacts &device);
cudaError_t run_list_backward(const fdm_problem &p, const fdm_backward_args &args, const DeviceFacts &device,
                              void *workspace);

} // namespace fdm::cuda
