// SPDX-License-Identifier: BSD-3-Clause
// The launch of a instantiation of the dbias kernel.
#pragma once

#include "dbias.cuh"
#include "launch.cuh"

namespace fdm::cuda {

template <class Element, int kHeadDim>
cudaError_t launch_pair_bias_dbias(const PairBiasBackward &work, cudaStream_t stream) {
  using Config = DbiasConfig<Element, kHeadDim>;
  const fdm_problem &p = work.call.p;
  const int bytes = Config::shared_bytes(work.dbias, p.bias.dtype == FDM_FLOAT32, has_rows(p.mask));
  return launch_pair_bias<dbias_kernel<Config>>(work, work.dbias.blocks, Config::kThreads, bytes, stream);
}

} // namespace fdm::cuda
