// SPDX-License-Identifier: BSD-3-Clause
// The launch of a dq instantiation of a pair bias.
#pragma once

#include "dq.cuh"
#include "launch.cuh"

namespace fdm::cuda {

template <class Element, int kHeadDim>
cudaError_t launch_pair_bias_dq(const PairBiasBackward &work, cudaStream_t stream) {
  using Config = PairBiasDqConfig<Element, kHeadDim>;
  const fdm_problem &p = work.call.p;
  const int64_t planes = p.bias.shape[0] * p.bias.shape[1];
  const int bytes = Config::shared_bytes(work.slots, p.bias.dtype == FDM_FLOAT32, has_rows(p.mask));
  return launch_pair_bias<pair_bias_dq_kernel<Config>>(work, planes * work.groups * work.tiles, Config::kThreads, bytes,
                                                       stream);
}

} // namespace fdm::cuda
