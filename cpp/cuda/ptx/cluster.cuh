// SPDX-License-Identifier: BSD-3-Clause
// Clusters: blocks of threads that run at the same time and read each other's shared memory (PTX ISA: barrier.cluster,
// mapa, ld.shared::cluster; sm_90).
#pragma once

#include <cstdint>

#include "copy.cuh"

namespace fdm::cuda::ptx {

// All threads of all blocks of the cluster call this.
__device__ __forceinline__ void sync_cluster() {
  asm volatile("barrier.cluster.arrive.release.aligned;\n"
               "barrier.cluster.wait.acquire.aligned;\n" ::
                   : "memory");
}

// What lies in the shared memory of another block of the cluster, where `own` lies in that of this one.
__device__ __forceinline__ float load_of_block(const float *own, uint32_t rank) {
  uint32_t address;
  float value;
  asm("mapa.shared::cluster.u32 %0, %1, %2;\n" : "=r"(address) : "r"(shared_address(own)), "r"(rank));
  asm volatile("ld.shared::cluster.f32 %0, [%1];\n" : "=f"(value) : "r"(address) : "memory");
  return value;
}

} // namespace fdm::cuda::ptx
