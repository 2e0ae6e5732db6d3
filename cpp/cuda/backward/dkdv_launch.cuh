// SPDX-License-Identifier: BSD-3-Clause
// The launches of the key-stationary kernels for a head dimension. A generated file only includes this one and has
// one line for each instantiation.
#pragma once

#include <type_traits>

#include "../host/dispatch.h"
#include "../host/launch.cuh"
#include "dkdv.cuh"

#if FDM_TILE_ARCH == 90
#include "../host/launch_sm90.cuh"
#include "../host/row_map.h"
#include "../tile/sm90/tile_sizes.cuh"
#include "sm90/dkdv.cuh"
#include "sm90/fused_kernel.cuh"
#include "sm90/key_mass.cuh"
#include "sm90/small_blocks.cuh"
#else
#include "all_gradients.cuh"
#endif

namespace fdm::cuda {

template <class Element, int kHeadDim, TileKind kKind>
cudaError_t launch_dkdv_kernels(const BackwardLaunch &work, cudaStream_t stream) {
  constexpr DkdvTileChoice tile = dkdv_tile(FDM_TILE_ARCH, kHeadDim);
  const auto launch = [&](auto gradients) {
    using Config = DkdvConfig<Element, kHeadDim, tile.keys, tile.rows, tile.warps, tile.blocks, gradients, kKind>;
    return launch_with_shared<DkdvShared<Config>, dkdv_kernel<Config>>(work.params, work.params.keys.max_items,
                                                                       Config::kThreads, stream);
  };
  if constexpr (tile.both_gradients) {
    return launch(constant<GradientSet::both>);
  } else {
    const KeyLaunches launches = work.route.key_launches;
    cudaError_t error = cudaSuccess;
    if (launches != KeyLaunches::dv) error = launch(constant<GradientSet::dk>);
    if (error || launches == KeyLaunches::dk) return error;
    return launch(constant<GradientSet::dv>);
  }
}

#if FDM_TILE_ARCH == 90
// Calls `launch` with the Softcap of the problem. Routes serve a softcap only with the head dimensions of rare calls.
template <int kHeadDim, class Launch>
cudaError_t launch_with_softcap(const BackwardParams &params, const Launch &launch) {
  if (params.p.softcap <= 0) return launch(constant<Softcap::none>);
  if constexpr (kServesRareCalls<kHeadDim>) return launch(constant<Softcap::applied>);
  return cudaErrorInvalidConfiguration;
}

inline FusedParams fused_params(const BackwardParams &params, int rows) {
  FusedParams fused{params, {}};
  const fdm_problem &p = params.p;
  fused.maps.valid = make_row_map(p.q, p.head_dim, rows, &fused.maps.q) &&
                     make_row_map(params.a.dout, p.v.shape[3], rows, &fused.maps.dout);
  return fused;
}

template <class Element, int kHeadDim> cudaError_t launch_small(const BackwardLaunch &work, cudaStream_t stream) {
  const auto launch_for = [&](auto cluster, Grid grid) {
    using Config = SmallBlocksConfig<Element, kHeadDim, cluster>;
    const FusedParams fused = fused_params(work.params, Config::kRows);
    return launch_with_shared<SmallBlocksShared<Config>, small_blocks_kernel<Config>, Overlap::kernel_ahead>(
        fused, grid, Config::kThreads, stream);
  };
  const KeyDivision &keys = work.route.division;
  if (work.route.key_kernel == KeyKernel::chained)
    return launch_for(constant<ClusterUse::chain>, Grid(keys.heads, keys.blocks, keys.blocks));
  return launch_for(constant<ClusterUse::shared_steps>, Grid(keys.max_items, keys.shares, keys.shares));
}

template <class Element, int kHeadDim> cudaError_t launch_fused(const BackwardLaunch &work, cudaStream_t stream) {
  const BackwardParams &params = work.params;
  const auto launch_for = [&](auto softcap, auto per_query_input, auto value_dim) {
    constexpr FusedTileChoice tile = fused_tile(90, kHeadDim, value_dim);
    using Config = KeyStationaryConfig<Element, kHeadDim, tile.keys, tile.rows, kFusedStages, softcap, per_query_input,
                                       KeyProducts::all, value_dim>;
    const FusedParams fused = fused_params(params, RowProducer<Config>::kOwnRows);
    return launch_sm90<typename FusedParts<Config>::Memory, fused_kernel<Config>, Config::Roles::kThreads>(
        fused, params.keys.max_items, stream);
  };
  if constexpr (fuses_row_bias(90, kHeadDim))
    if (work.route.key_kernel == KeyKernel::per_query_bias)
      return launch_for(constant<Softcap::none>, constant<PerQueryInput::bias>, constant<kHeadDim>);
  if constexpr (fuses_row_mask(90, kHeadDim))
    if (work.route.key_kernel == KeyKernel::per_query_mask)
      return launch_for(constant<Softcap::none>, constant<PerQueryInput::mask>, constant<kHeadDim>);
  if constexpr (narrow_value_dim(kHeadDim) > 0)
    if (work.route.value_dim < kHeadDim)
      return launch_for(constant<Softcap::none>, constant<PerQueryInput::none>, constant<narrow_value_dim(kHeadDim)>);
  return launch_with_softcap<kHeadDim>(
      params, [&](auto softcap) { return launch_for(softcap, constant<PerQueryInput::none>, constant<kHeadDim>); });
}

// This kernel also serves calls that want only one gradient. A separate kernel for these would take more than half
// the time, and its binary would not be small.
template <class Element, int kHeadDim> cudaError_t launch_dkdv_sm90(const BackwardParams &params, cudaStream_t stream) {
  return launch_with_softcap<kHeadDim>(params, [&](auto softcap) {
    constexpr DkdvTileSm90 tile = dkdv_tile_sm90(kHeadDim);
    using Config = KeyStationaryConfig<Element, kHeadDim, 128, tile.rows, tile.stages, softcap, PerQueryInput::mask>;
    static_assert(dkdv_tile(90, kHeadDim).keys == Config::kKeys && dkdv_tile(90, kHeadDim).rows == Config::kRows);
    return launch_sm90<KeyStationaryShared<Config>, dkdv_kernel_sm90<Config>>(params, params.keys.max_items, stream);
  });
}

template <class Element, int kHeadDim> cudaError_t launch_key_mass(const BackwardParams &params, cudaStream_t stream) {
  using Config = KeyStationaryConfig<Element, kHeadDim, 128, kMassTile.rows, kMassTile.stages, Softcap::none,
                                     PerQueryInput::mask, KeyProducts::scores>;
  const FusedParams with_maps = fused_params(params, RowProducer<Config>::kOwnRows);
  return launch_sm90<KeyStationaryShared<Config>, key_mass_kernel_sm90<Config>>(with_maps, params.keys.max_items,
                                                                                stream);
}
#else
template <class Element, int kHeadDim>
cudaError_t launch_all_gradients(const BackwardParams &params, cudaStream_t stream) {
  constexpr FusedTileChoice tile = fused_tile(FDM_TILE_ARCH, kHeadDim, kHeadDim);
  using Config = AllGradientsConfig<Element, kHeadDim, tile.keys, tile.rows, tile.warps, tile.blocks,
                                    tile.warps_per_keys, tile.smem_contents>;
  return launch_with_shared<AllGradientsShared<Config>, all_gradients_kernel<Config>>(params, params.keys.max_items,
                                                                                      Config::kThreads, stream);
}
#endif

template <class Element, int kHeadDim> cudaError_t launch_dkdv(const BackwardLaunch &work, cudaStream_t stream) {
  switch (work.route.key_kernel) {
  case KeyKernel::general:
    if constexpr (kServesRareCalls<kHeadDim>)
      return launch_dkdv_kernels<Element, kHeadDim, TileKind::general>(work, stream);
    break;
#if FDM_TILE_ARCH == 90
  case KeyKernel::wgmma:
    if constexpr (kHeadDim <= kMaxDkdvHeadDimSm90) return launch_dkdv_sm90<Element, kHeadDim>(work.params, stream);
    break;
  case KeyKernel::mass:
    if constexpr (kHeadDim <= kMaxDkdvHeadDimSm90) return launch_key_mass<Element, kHeadDim>(work.params, stream);
    break;
  case KeyKernel::usual:
    if constexpr (kHeadDim > kMaxDkdvHeadDimSm90)
      return launch_dkdv_kernels<Element, kHeadDim, TileKind::usual>(work, stream);
    break;
  case KeyKernel::fused:
  case KeyKernel::per_query_bias:
  case KeyKernel::per_query_mask:
    return launch_fused<Element, kHeadDim>(work, stream);
  case KeyKernel::shared:
  case KeyKernel::chained:
    if constexpr (kHeadDim <= kSmallBlock.max_head_dim) return launch_small<Element, kHeadDim>(work, stream);
    break;
#else
  case KeyKernel::usual:
    return launch_dkdv_kernels<Element, kHeadDim, TileKind::usual>(work, stream);
  case KeyKernel::all:
    return launch_all_gradients<Element, kHeadDim>(work.params, stream);
#endif
  default:
    break;
  }
  return cudaErrorInvalidConfiguration;
}

} // namespace fdm::cuda
