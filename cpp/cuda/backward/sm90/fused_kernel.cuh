// SPDX-License-Identifier: BSD-3-Clause
// The kernel that computes all gradients: fused.cuh or fused_large_heads.cuh, depending on the head dimension.
#pragma once

#include "fused.cuh"
#include "fused_large_heads.cuh"

namespace fdm::cuda {

// The parts that depend on the head dimension: the shared memory, the consumers, and the registers of each role.
template <class Config> struct FusedParts {
  using Memory = std::conditional_t<Config::kSharesKeys, LargeHeadShared<Config>, FusedShared<Config>>;
  using Consumer = std::conditional_t<Config::kSharesKeys, LargeHeadConsumer<Config>, FusedConsumer<Config>>;
  using Registers = RoleRegisters<224, 56>;
};

struct FusedParams : BackwardParams {
  RowMaps maps;
};

template <class Config>
__global__ void __launch_bounds__(Config::Roles::kThreads, 1) fused_kernel(const __grid_constant__ FusedParams params) {
  using Roles = typename Config::Roles;
  using Parts = FusedParts<Config>;
  auto &shared = dynamic_memory<typename Parts::Memory>();
  if (threadIdx.x == 0) shared.init();
  __syncthreads();
  ptx::wait_for_kernel_ahead();
  ptx::start_dependents();
  if (Roles::is_producer()) {
    Parts::Registers::produce();
    KeyItem item;
    KeyBlockPlace place;
    const bool exists = find_key_item(params, int32_t(blockIdx.x), item, place);
    if (Roles::producer_thread() == 0) shared.has_key_block = exists;
    if (exists)
      RowProducer<Config>(params, shared, &params.maps).run(item, place);
    else
      Roles::producer_commit(shared.keys_full);
  } else {
    Parts::Registers::consume();
    typename Parts::Consumer(params, shared).run();
  }
}

} // namespace fdm::cuda
