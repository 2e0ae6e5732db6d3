// SPDX-License-Identifier: BSD-3-Clause
// The kernel that computes all gradients at once: fused.cuh or fused_wide.cuh, by the head dimension.
#pragma once

#include "fused.cuh"
#include "fused_wide.cuh"

namespace fdm::cuda {

template <class Config>
using FusedMemory = std::conditional_t<Config::kShared, WideShared<Config>, FusedShared<Config>>;

struct FusedParams : BackwardParams {
  RowMaps maps;
};

template <class Config>
__global__ void __launch_bounds__(Roles::kThreads, 1) fused_kernel(const __grid_constant__ FusedParams params) {
  using Consumer = std::conditional_t<Config::kShared, WideConsumer<Config>, FusedConsumer<Config>>;
  extern __shared__ __align__(1024) char dynamic_shared[];
  auto &shared = *reinterpret_cast<FusedMemory<Config> *>(dynamic_shared);
  if (threadIdx.x == 0) shared.init();
  __syncthreads();
  ptx::wait_for_kernel_ahead();
  using Registers = RoleRegisters<224, 56>;
  if (Roles::is_producer()) {
    Registers::produce();
    KeyItem item;
    KeyBlockPlace place;
    const bool exists = find_key_item(params, int32_t(blockIdx.x), item, place);
    if (Roles::producer_thread() == 0) shared.exists = exists;
    if (exists)
      RowProducer<Config>(params, shared, &params.maps).run(item, place);
    else
      Roles::producer_commit(shared.keys_full);
  } else {
    Registers::consume();
    Consumer(params, shared).run();
  }
}

} // namespace fdm::cuda
