// SPDX-License-Identifier: BSD-3-Clause
// Thread block clusters and distributed shared memory (PTX ISA: barrier.cluster, mapa, ld.shared::cluster, st.async,
// mbarrier; sm_90).
#pragma once

#include <cstdint>

#include "barrier.cuh"

namespace fdm::cuda::ptx {

// All threads of all thread blocks of the cluster call this.
__device__ __forceinline__ void sync_cluster() {
  asm volatile("barrier.cluster.arrive.release.aligned;\n"
               "barrier.cluster.wait.acquire.aligned;\n" ::
                   : "memory");
}

// The two halves of sync_cluster(). Other blocks do not wait for the code between them.
__device__ __forceinline__ void arrive_cluster_barrier() {
  asm volatile("barrier.cluster.arrive.release.aligned;\n" ::: "memory");
}
__device__ __forceinline__ void wait_cluster_barrier() {
  asm volatile("barrier.cluster.wait.acquire.aligned;\n" ::: "memory");
}

// The cluster barrier at the end of a kernel: no block exits while others use its shared memory. The arrival is
// relaxed, so it does not wait for writes to global memory.
__device__ __forceinline__ void leave_cluster() {
  asm volatile("barrier.cluster.arrive.relaxed.aligned;\n"
               "barrier.cluster.wait.aligned;\n" ::
                   : "memory");
}

// The address in block `rank` of the cluster that corresponds to `local` in this block.
__device__ __forceinline__ uint32_t remote_address(const void *local, uint32_t rank) {
  uint32_t address;
  asm("mapa.shared::cluster.u32 %0, %1, %2;\n" : "=r"(address) : "r"(shared_address(local)), "r"(rank));
  return address;
}

// Loads the float of block `rank` that corresponds to `local` in this block.
__device__ __forceinline__ float load_remote(const float *local, uint32_t rank) {
  float value;
  asm volatile("ld.shared::cluster.f32 %0, [%1];\n" : "=f"(value) : "r"(remote_address(local, rank)) : "memory");
  return value;
}

// A buffer in another block, at the place of `local` in this one (16-byte aligned), and a barrier there that counts
// the stored bytes. (Ordinary stores need a release at cluster scope, which waits for all global writes of the
// thread.)
class RemoteBuffer {
public:
  __device__ __forceinline__ RemoteBuffer(const float *local, const uint64_t &own_barrier, uint32_t rank)
      : address_(remote_address(local, rank)), barrier_(remote_address(&own_barrier, rank)) {}

  // Stores four floats from index `first` on, a multiple of four.
  __device__ __forceinline__ void store(int first, const float4 &x) const {
    asm volatile(
        "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1, %2, %3, %4}, [%5];\n" ::"r"(
            address_ + first * uint32_t(sizeof(float))),
        "f"(x.x), "f"(x.y), "f"(x.z), "f"(x.w), "r"(barrier_)
        : "memory");
  }

private:
  uint32_t address_, barrier_;
};
// Arrives at a barrier of this block. Its phase lasts until `bytes` bytes have come from other blocks.
__device__ __forceinline__ void expect_from_cluster(uint64_t &barrier, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;\n" ::"r"(shared_address(&barrier)), "r"(bytes)
               : "memory");
}

// Arrives at the barrier `local` of block `rank`: this thread has finished its reads, so the buffer may be
// overwritten. The release has the scope of this block only.
__device__ __forceinline__ void arrive_remote(uint64_t &local, uint32_t rank) {
  asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];\n" ::"r"(remote_address(&local, rank)) : "memory");
}

// Waits for a phase of a barrier of this block at which other blocks of the cluster arrive.
__device__ __forceinline__ void wait_for_cluster(uint64_t &barrier, uint32_t parity) { wait(barrier, parity); }

} // namespace fdm::cuda::ptx
