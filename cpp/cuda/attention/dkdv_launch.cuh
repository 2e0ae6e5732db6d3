// SPDX-License-Identifier: BSD-3-Clause
// The launches of the instantiations of the dkdv kernel for a head dimension. Generated files hold nothing but an
// include of this and a line for each.
#pragma once

#include <type_traits>

#include "device.h"
#include "dkdv.cuh"
#include "tiles.cuh"

namespace fdm::cuda {

template <class Config> cudaError_t launch_dkdv_kernel(const BackwardParams &params, cudaStream_t stream) {
  constexpr int bytes = int(sizeof(DkdvShared<Config>));
  static_assert(bytes <= shared_limit(FDM_ARCH), "the tile does not fit the arch's shared memory");
  static std::atomic<uint64_t> allowed{0};
  if (cudaError_t error = allow_shared(dkdv_kernel<Config>, bytes, allowed)) return error;
  dkdv_kernel<Config><<<unsigned(params.keys.max_items), Config::kThreads, bytes, stream>>>(params);
  return cudaGetLastError();
}

template <class Element, int kHeadDim, bool kGeneral>
cudaError_t launch_dkdv_kernels(const BackwardParams &params, cudaStream_t stream) {
  constexpr DkdvTileChoice tile = dkdv_tile(FDM_ARCH, kHeadDim);
  const bool keys = present(params.a.dk) || params.wants_bias_sums, values = present(params.a.dv);
  const auto launch = [&](auto of_keys, auto of_values) {
    return launch_dkdv_kernel<
        DkdvConfig<Element, kHeadDim, tile.keys, tile.rows, tile.warps, tile.blocks, of_keys, of_values, kGeneral>>(
        params, stream);
  };
  constexpr std::true_type yes{};
  constexpr std::false_type no{};
  if constexpr (tile.together) {
    return keys || values ? launch(yes, yes) : cudaSuccess;
  } else {
    const cudaError_t error = keys ? launch(yes, no) : cudaSuccess;
    return error || !values ? error : launch(no, yes);
  }
}

template <class Element, int kHeadDim> cudaError_t launch_dkdv(const BackwardParams &params, cudaStream_t stream) {
  if (needs_general_kernel(params)) return launch_dkdv_kernels<Element, kHeadDim, true>(params, stream);
  return launch_dkdv_kernels<Element, kHeadDim, false>(params, stream);
}

} // namespace fdm::cuda
