// SPDX-License-Identifier: BSD-3-Clause
// Clusters: thread blocks that run at the same time and read each other's shared memory (PTX ISA: barrier.cluster,
// mapa, ld.shared::cluster, st.async, mbarrier; sm_90).
#pragma once

#include <cstdint>

#include "barrier.cuh"

namespace fdm::cuda::ptx {

// All threads of all blocks of the cluster call this.
__device__ __forceinline__ void sync_cluster() {
  asm volatile("barrier.cluster.arrive.release.aligned;\n"
               "barrier.cluster.wait.acquire.aligned;\n" ::
                   : "memory");
}

// The two halves of it: what a thread does between them is not waited for.
__device__ __forceinline__ void arrive_at_cluster() {
  asm volatile("barrier.cluster.arrive.release.aligned;\n" ::: "memory");
}
__device__ __forceinline__ void wait_at_cluster() {
  asm volatile("barrier.cluster.wait.acquire.aligned;\n" ::: "memory");
}

// The same, where the blocks have nothing more to tell each other: none ends while others use its shared memory. What
// they write to global memory is not waited for.
__device__ __forceinline__ void leave_cluster() {
  asm volatile("barrier.cluster.arrive.relaxed.aligned;\n"
               "barrier.cluster.wait.aligned;\n" ::
                   : "memory");
}

// The address in another block of the cluster of what lies at `own` in this one.
__device__ __forceinline__ uint32_t address_of_block(const void *local, uint32_t rank) {
  uint32_t address;
  asm("mapa.shared::cluster.u32 %0, %1, %2;\n" : "=r"(address) : "r"(shared_address(local)), "r"(rank));
  return address;
}

// What lies in the shared memory of another block of the cluster, where `own` lies in that of this one.
__device__ __forceinline__ float load_of_block(const float *local, uint32_t rank) {
  float value;
  asm volatile("ld.shared::cluster.f32 %0, [%1];\n" : "=f"(value) : "r"(address_of_block(local, rank)) : "memory");
  return value;
}

// The place in another block of what lies at `own` in this one, 16-byte aligned, and a barrier there, which is told how
// many bytes have come. (With ordinary stores, a thread would have to release them to the cluster, which waits for all
// that it has written to global memory.)
class RoomOfBlock {
public:
  __device__ __forceinline__ RoomOfBlock(const float *local, const uint64_t &own_barrier, uint32_t rank)
      : address_(address_of_block(local, rank)), barrier_(address_of_block(&own_barrier, rank)) {}

  // Stores four numbers, from number `first` on, which is a multiple of four.
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
// Arrives at a barrier of this block, and lets its phase last until so many bytes have come from others.
__device__ __forceinline__ void expect_of_cluster(uint64_t &barrier, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;\n" ::"r"(shared_address(&barrier)), "r"(bytes)
               : "memory");
}

// Arrives at a barrier there: this thread no longer reads what may be written now. Nothing is released but to this
// block.
__device__ __forceinline__ void arrive_of_block(uint64_t &local, uint32_t rank) {
  asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];\n" ::"r"(address_of_block(&local, rank)) : "memory");
}

// Waits for the end of a phase of this parity, of a barrier of this block of which others know.
__device__ __forceinline__ void wait_for_cluster(uint64_t &barrier, uint32_t parity) { wait(barrier, parity); }

} // namespace fdm::cuda::ptx
