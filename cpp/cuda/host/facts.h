// SPDX-License-Identifier: BSD-3-Clause
// The facts about this pack and a device that determine routes.
#pragma once

#include <cuda_runtime_api.h>

#include <atomic>

#include "../route/facts.h"
#include "device.h"
#include "dispatch.h"

namespace fdm::cuda {

// The head dimensions of a kernel family; none if the largest is 0.
template <int... kDims> constexpr HeadDimList list_head_dims(HeadDims<kDims...>, int largest) {
  return {largest == 0 ? 0 : int(sizeof...(kDims)), {kDims...}};
}

inline const BuiltFor &built_for() {
  static constexpr BuiltFor kBuilt{FDM_TILE_ARCH,
                                   list_head_dims(InstantiatedHeadDims{}, kMaxHeadDim),
                                   list_head_dims(RareHeadDims{}, kMaxRareHeadDim),
                                   list_head_dims(PairBiasHeadDims{}, kMaxPairBiasHeadDim),
                                   list_head_dims(PairBiasSm90HeadDims{}, kMaxPairBiasSm90HeadDim),
                                   list_head_dims(DirectHeadDims{}, kMaxDirectHeadDim)};
  return kBuilt;
}

// Facts about the device of a call's tensors, which need not be the current device. Calls the driver once for each
// device.
inline cudaError_t device_facts(int device, DeviceFacts *facts) {
  static std::atomic<int> known[kMaxDevices];
  *facts = any_device(built_for());
  const bool may_be_known = device >= 0 && device < kMaxDevices;
  facts->sms = may_be_known ? known[device].load(std::memory_order_relaxed) : 0;
  if (facts->sms) return cudaSuccess;
  const cudaError_t error = cudaDeviceGetAttribute(&facts->sms, cudaDevAttrMultiProcessorCount, device);
  if (!error && may_be_known) known[device].store(facts->sms, std::memory_order_relaxed);
  return error;
}

} // namespace fdm::cuda
