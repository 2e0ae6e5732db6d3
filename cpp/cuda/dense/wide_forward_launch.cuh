// SPDX-License-Identifier: BSD-3-Clause
// The launch of the dense forward instantiations for sm_90.
#pragma once

#include <algorithm>

#include "dense.h"
#include "tile_sizes.cuh"
#if FDM_TILE_ARCH == 90
#include "../host/launch_sm90.cuh"
#include "sm90/forward.cuh"
#endif

namespace fdm::cuda {

template <class Element, int kHeadDim>
cudaError_t launch_dense_wide_forward(const DenseForward &work, cudaStream_t stream) {
#if FDM_TILE_ARCH == 90
  const fdm_problem &p = work.call.p;
  const int64_t tasks = p.bias.shape[0] * p.bias.shape[1] * work.groups * work.tiles;
  int most;
  if (cudaError_t error = sm_count(&most)) return error;
  const auto launch_for = [&](auto sources, auto wide_bias) {
    using Config = WideForwardConfig<Element, kHeadDim, decltype(sources)::value, decltype(wide_bias)::value>;
    return launch_with_shared<WideForwardShared<Config>, dense_wide_forward_kernel<Config>>(
        work, std::min<int64_t>(tasks, most), Roles::kThreads, stream);
  };
  const auto launch_for_bias = [&](auto sources) {
    return p.bias.dtype == FDM_FLOAT32 ? launch_for(sources, std::true_type{}) : launch_for(sources, std::false_type{});
  };
  constexpr int kMostSources = wide_sources(kHeadDim);
  if constexpr (kMostSources > 1)
    if (work.slots == kMostSources) return launch_for_bias(std::integral_constant<int, kMostSources>{});
  return launch_for_bias(std::integral_constant<int, 1>{});
#else
  return cudaErrorInvalidConfiguration;
#endif
}

} // namespace fdm::cuda
