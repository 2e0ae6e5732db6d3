// SPDX-License-Identifier: BSD-3-Clause
// The launch of the dense forward instantiations for sm_90.
#pragma once

#include <algorithm>

#include "dense.h"
#include "tile_sizes.cuh"
#if FDM_TILE_ARCH == 90
#include "../host/launch_sm90.cuh"
#include "sm90/forward.cuh"
#include "sm90/forward_windows.cuh"
#endif

namespace fdm::cuda {

template <class Element, int kHeadDim>
cudaError_t launch_dense_wide_forward(const DenseForward &work, cudaStream_t stream) {
#if FDM_TILE_ARCH == 90
  const fdm_problem &p = work.call.p;
  if constexpr (kHeadDim == kWindowHeadDim)
    if (work.windows) {
      const auto launch_windows = [&](auto wide_bias) {
        using Config = WindowForwardConfig<Element, decltype(wide_bias)::value>;
        return launch_with_shared<WindowForwardShared<Config>, dense_window_forward_kernel<Config>>(
            work, work.groups * p.bias.shape[1], Roles::kThreads, stream);
      };
      return p.bias.dtype == FDM_FLOAT32 ? launch_windows(std::true_type{}) : launch_windows(std::false_type{});
    }
  const int64_t tasks = p.bias.shape[0] * p.bias.shape[1] * work.groups * work.row_splits;
  int most;
  if (cudaError_t error = sm_count(&most)) return error;
  const auto launch_for = [&](auto sources, auto wide_bias, auto mask_rows) {
    using Config = WideForwardConfig<Element, kHeadDim, decltype(sources)::value, decltype(wide_bias)::value,
                                     decltype(mask_rows)::value>;
    return launch_with_shared<WideForwardShared<Config>, dense_wide_forward_kernel<Config>>(
        work, std::min<int64_t>(tasks, most), Roles::kThreads, stream);
  };
  const auto launch_for_bias = [&](auto sources) {
    return p.bias.dtype == FDM_FLOAT32 ? launch_for(sources, std::true_type{}, std::false_type{})
                                       : launch_for(sources, std::false_type{}, std::false_type{});
  };
  constexpr std::integral_constant<int, 1> kOne{};
  if (has_rows(p.mask) && p.bias.dtype != FDM_FLOAT32) return launch_for(kOne, std::false_type{}, std::true_type{});
  if constexpr (has_room_for_mask(kHeadDim, true))
    if (has_rows(p.mask)) return launch_for(kOne, std::true_type{}, std::true_type{});
  constexpr int kMostSources = wide_sources(kHeadDim);
  if constexpr (kMostSources > 1)
    if (work.slots == kMostSources) return launch_for_bias(std::integral_constant<int, kMostSources>{});
  return launch_for_bias(kOne);
#else
  return cudaErrorInvalidConfiguration;
#endif
}

} // namespace fdm::cuda
