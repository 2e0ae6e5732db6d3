// SPDX-License-Identifier: BSD-3-Clause
// The launch of a dense dq instantiation.
#pragma once

#include "dense_launch.cuh"
#include "dq.cuh"

namespace fdm::cuda {

template <class Element, int kHeadDim> cudaError_t launch_dense_dq(const DenseBackward &work, cudaStream_t stream) {
  using Config = DenseDqConfig<Element, kHeadDim>;
  const fdm_problem &p = work.call.p;
  const int64_t units = p.bias.shape[0] * p.bias.shape[1];
  const int bytes = Config::shared_bytes(work.slots, p.bias.dtype == FDM_FLOAT32, has_rows(p.mask));
  return launch_dense<dense_dq_kernel<Config>>(work, units * work.groups * work.tiles, Config::kThreads, bytes, stream);
}

} // namespace fdm::cuda
