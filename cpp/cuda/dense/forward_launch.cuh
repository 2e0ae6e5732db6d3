// SPDX-License-Identifier: BSD-3-Clause
// The launch of a dense forward instantiation.
#pragma once

#include "dense_launch.cuh"
#include "forward.cuh"

namespace fdm::cuda {

template <class Element, int kHeadDim>
cudaError_t launch_dense_forward(const DenseForwardLaunch &launch, cudaStream_t stream) {
  using Config = DenseForwardConfig<Element, kHeadDim>;
  const fdm_problem &p = launch.work.call.p;
  const int bytes = Config::shared_bytes(launch.work.slots, p.bias.dtype == FDM_FLOAT32, has_rows(p.mask));
  return launch_dense<dense_forward_kernel<Config>>(launch.work, launch.route.blocks, Config::kThreads, bytes, stream);
}

} // namespace fdm::cuda
