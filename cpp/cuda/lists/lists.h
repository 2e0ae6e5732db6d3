// SPDX-License-Identifier: BSD-3-Clause
// Calls whose queries list their keys: the parameters of the kernels.
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
  bool aligned;      // what rows_are_aligned says of q, k and v
  bool copies_rows;  // of k and v, 16 bytes at a time, which lie as tile/row_places.cuh needs it
  int32_t page_rows; // from one page to the next, in the numbers of rows
};

// Float32 sums that thread blocks add to; null where a gradient is not wanted.
struct ListSums {
  float *key, *value, *bias, *index, *sink;
};

struct ListBackwardParams : ListParams {
  fdm_backward_args backward;
  ListSums sums;
  ListPass pass;     // of kernels with mma.sync
  float *query_sums; // of several passes; null: there is one, or dq is not wanted
  int32_t sum_dim;   // columns of a row of the sums of keys: D of the instantiation
  bool dout_aligned; // what rows_are_aligned says of dout
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
