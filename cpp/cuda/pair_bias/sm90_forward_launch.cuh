// SPDX-License-Identifier: BSD-3-Clause
// Launches the forward kernels for sm_90 with a pair bias.
#pragma once

#include "pair_bias.h"
#include "tile_sizes.cuh"
#if FDM_TILE_ARCH == 90
#include "../host/launch_sm90.cuh"
#include "sm90/forward.cuh"
#endif

namespace fdm::cuda {

template <class Element, int kHeadDim>
cudaError_t launch_pair_bias_forward_sm90(const PairBiasForwardLaunch &launch, cudaStream_t stream) {
#if FDM_TILE_ARCH == 90
  const PairBiasForward &work = launch.work;
  const fdm_problem &p = work.call.p;
  if constexpr (kHeadDim == kSmallTileHeadDim)
    if (launch.route.kernel == ForwardKernel::pair_bias_small_tiles) {
      const auto launch_small_tiles = [&](auto bias_type) {
        using Config = PairBiasForwardConfigSm90<Element, kHeadDim, 1, bias_type, MaskRows::none, TaskParts::sources>;
        return launch_with_shared<PairBiasForwardSharedSm90<Config>, pair_bias_forward_kernel_sm90<Config>>(
            work, launch.route.blocks, Roles::kThreads, stream);
      };
      return p.bias.dtype == FDM_FLOAT32 ? launch_small_tiles(kFloat32Type) : launch_small_tiles(kElementType);
    }
  const auto launch_for = [&](auto sources, auto bias_type, auto mask_rows, auto parts) {
    using Config = PairBiasForwardConfigSm90<Element, kHeadDim, sources, bias_type, mask_rows, parts>;
    return launch_with_shared<PairBiasForwardSharedSm90<Config>, pair_bias_forward_kernel_sm90<Config>,
                              Overlap::kernel_ahead>(work, launch.route.blocks, Roles::kThreads, stream);
  };
  const auto launch_for_bias = [&](auto bias_type) {
    if constexpr (has_room_for_mask(kHeadDim, decltype(bias_type)::value == BiasType::float32)) {
      if (work.splits_heads)
        return launch_for(constant<1>, bias_type, constant<MaskRows::either>, constant<TaskParts::heads>);
      if (work.splits_keys)
        return launch_for(constant<1>, bias_type, constant<MaskRows::either>, constant<TaskParts::keys>);
      if (has_query_rows(p.mask))
        return launch_for(constant<1>, bias_type, constant<MaskRows::each_query>, constant<TaskParts::rows>);
    } else if (work.splits_keys) {
      return launch_for(constant<1>, bias_type, constant<MaskRows::none>, constant<TaskParts::keys>);
    }
    constexpr int kSourceRoom = sm90_sources(kHeadDim);
    if constexpr (kSourceRoom > 1)
      if (work.slots == kSourceRoom)
        return launch_for(constant<kSourceRoom>, bias_type, constant<MaskRows::none>, constant<TaskParts::rows>);
    return launch_for(constant<1>, bias_type, constant<MaskRows::none>, constant<TaskParts::rows>);
  };
  return p.bias.dtype == FDM_FLOAT32 ? launch_for_bias(kFloat32Type) : launch_for_bias(kElementType);
#else
  return cudaErrorInvalidConfiguration;
#endif
}

} // namespace fdm::cuda
