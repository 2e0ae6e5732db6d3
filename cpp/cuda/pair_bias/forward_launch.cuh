// SPDX-License-Identifier: BSD-3-Clause
// The launch of a forward instantiation of a pair bias.
#pragma once

#include "forward.cuh"
#include "launch.cuh"

namespace fdm::cuda {

template <class Element, int kHeadDim>
cudaError_t launch_pair_bias_forward(const PairBiasForwardLaunch &launch, cudaStream_t stream) {
  using Config = PairBiasForwardConfig<Element, kHeadDim>;
  const fdm_problem &p = launch.work.call.p;
  const int bytes = Config::shared_bytes(launch.work.slots, p.bias.dtype == FDM_FLOAT32, has_rows(p.mask));
  return launch_pair_bias<pair_bias_forward_kernel<Config>>(launch.work, launch.route.blocks, Config::kThreads, bytes,
                                                            stream);
}

} // namespace fdm::cuda
