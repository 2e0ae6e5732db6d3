// SPDX-License-Identifier: BSD-3-Clause
// Selects the instantiation for the dtype and head dimension of a problem.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime_api.h>

#include <cstdint>
#include <type_traits>

#include "../../pack.h"
#include "head_dims.h" // generated: the instantiated head dimensions

namespace fdm::cuda {

template <class T> struct TypeOf {
  using Type = T;
};
// A template argument that a generic lambda deduces.
template <auto kValue> inline constexpr std::integral_constant<decltype(kValue), kValue> constant{};

template <int... kDims> constexpr bool has_head_dim(HeadDims<kDims...>, int head_dim) {
  return ((kDims == head_dim) || ...);
}
// Whether kernels for rare calls are instantiated for a head dimension. A route sends rare calls only to those.
template <int kHeadDim> constexpr bool kServesRareCalls = has_head_dim(RareHeadDims{}, kHeadDim);

// Calls function(std::integral_constant<int, d>) with the smallest instantiated d that is at least head_dim.
template <int kFirst, int... kRest, class Function>
auto with_head_dim(int64_t head_dim, HeadDims<kFirst, kRest...>, const Function &function) {
  if constexpr (sizeof...(kRest) > 0)
    if (head_dim > kFirst) return with_head_dim(head_dim, HeadDims<kRest...>{}, function);
  return function(constant<kFirst>);
}

// Calls function(TypeOf<Element>, std::integral_constant<int, d>). With `kDimRoom` 0 there are no instantiations.
template <int kDimRoom, class Dims, class Function>
cudaError_t with_types(const fdm_problem &p, int64_t head_dim, Dims dims, const Function &function) {
  if constexpr (kDimRoom == 0)
    return cudaErrorInvalidConfiguration;
  else
    return with_head_dim(head_dim, dims, [&](auto dim) {
      return p.q.dtype == FDM_FLOAT16 ? function(TypeOf<__half>{}, dim) : function(TypeOf<__nv_bfloat16>{}, dim);
    });
}
// The same with the head dimension of a route.
template <class Function> cudaError_t with_kernel_types(const fdm_problem &p, int head_dim, const Function &function) {
  return with_types<kMaxHeadDim>(p, head_dim, InstantiatedHeadDims{}, function);
}

} // namespace fdm::cuda
