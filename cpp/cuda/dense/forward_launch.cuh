// SPDX-License-Identifier: BSD-3-Clause
// The launch of a dense forward instantiation.
#pragma once

#include "dense_launch.cuh"
#include "forward.cuh"

namespace fdm::cuda {

template <class Element, int kHeadDim> cudaError_t launch_dense_forward(const DenseForward &work, cudaStream_t stream) {
  using Config = DenseForwardConfig<Element, kHeadDim>;
  const fdm_problem &p = work.call.p;
  const int64_t units = p.bias.shape[0] * p.bias.shape[1];
  const int bytes = Config::shared_bytes(work.slots, p.bias.dtype == FDM_FLOAT32, has_rows(p.mask));
  return launch_dense<dense_forward_kernel<Config>>(work, units * work.groups * work.splits * work.tiles,
                                                    Config::kThreads, bytes, stream);
}

} // namespace fdm::cuda
