// SPDX-License-Identifier: BSD-3-Clause
// The launch of a dense dbias instantiation.
#pragma once

#include "dbias.cuh"
#include "dense_launch.cuh"

namespace fdm::cuda {

template <class Element, int kHeadDim> cudaError_t launch_dense_dbias(const DenseBackward &work, cudaStream_t stream) {
  using Config = DbiasConfig<Element, kHeadDim>;
  const fdm_problem &p = work.call.p;
  const int bytes = Config::shared_bytes(work.dbias, p.bias.dtype == FDM_FLOAT32, has_rows(p.mask));
  return launch_dense<dbias_kernel<Config>>(work, work.dbias.blocks, Config::kThreads, bytes, stream);
}

} // namespace fdm::cuda
