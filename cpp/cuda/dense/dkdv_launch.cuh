// SPDX-License-Identifier: BSD-3-Clause
// The launch of a dense dkdv instantiation.
#pragma once

#include "dense_launch.cuh"
#include "dkdv.cuh"

namespace fdm::cuda {

template <class Element, int kHeadDim> cudaError_t launch_dense_dkdv(const DenseBackward &work, cudaStream_t stream) {
  using Config = DenseDkdvConfig<Element, kHeadDim>;
  const fdm_problem &p = work.call.p;
  const int bytes = Config::shared_bytes(work.slots, p.bias.dtype == FDM_FLOAT32, has_rows(p.mask));
  return launch_dense<dense_dkdv_kernel<Config>>(work, p.kv_heads * work.groups * work.tiles, Config::kThreads, bytes,
                                                 stream);
}

} // namespace fdm::cuda
