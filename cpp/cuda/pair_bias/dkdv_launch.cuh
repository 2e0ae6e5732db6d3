// SPDX-License-Identifier: BSD-3-Clause
// The launch of a dkdv instantiation of a pair bias.
#pragma once

#include "dkdv.cuh"
#include "launch.cuh"

namespace fdm::cuda {

template <class Element, int kHeadDim>
cudaError_t launch_pair_bias_dkdv(const PairBiasBackward &work, cudaStream_t stream) {
  using Config = PairBiasDkdvConfig<Element, kHeadDim>;
  const fdm_problem &p = work.call.p;
  const int bytes = Config::shared_bytes(work.slots, p.bias.dtype == FDM_FLOAT32, has_rows(p.mask));
  return launch_pair_bias<pair_bias_dkdv_kernel<Config>>(work, p.kv_heads * work.groups * work.tiles, Config::kThreads,
                                                         bytes, stream);
}

} // namespace fdm::cuda
