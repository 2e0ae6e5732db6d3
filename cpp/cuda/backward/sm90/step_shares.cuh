// SPDX-License-Identifier: BSD-3-Clause
// If there are too few key blocks for all SMs, the thread blocks of a cluster take the steps of a key block in turn.
// At the end, the block of rank 0 adds up dK and the bias gradient of all blocks, in the order of their ranks. The
// block of rank 1 adds up dV.
#pragma once

#include "../../tile/products.cuh"
#include "../key_gradients.cuh"
#include "ptx/cluster.cuh"

namespace fdm::cuda {

struct ClusterReductionBarriers {
  // Sum 0 is dK with the bias gradient, sum 1 is dV. The block whose rank is this number adds the sum up.
  static constexpr int kSums = 2;
  uint64_t empty[kSums], full; // block n has room for this block's sums; all sums have arrived in this block

  // One thread of the block calls this, before the cluster barrier.
  __device__ void init() {
    for (uint64_t &barrier : empty) ptx::init_barrier(barrier, 1);
    ptx::init_barrier(full, 1);
  }
};

// A thread has kTiles accumulator tiles of dK, as many of dV, and two sums of the bias gradient.
template <int kTiles, int kThreads> struct ClusterReduction {
  using Sums = float[kTiles][4];
  static constexpr int kTileFloats = 4 * kThreads, kSlotFloats = (kTiles + 1) * kTileFloats; // one tile for the bias
  static constexpr int kBufferBytes = (kShareRoom - 1) * kSlotFloats * int(sizeof(float));

  ClusterReductionBarriers &barriers;
  float *buffer; // this thread's place in kBufferBytes of shared memory, which is free after the last step

  __device__ ClusterReduction(ClusterReductionBarriers &own_barriers, void *memory)
      : barriers(own_barriers), buffer(static_cast<float *>(memory) + 4 * threadIdx.x) {}

  // Adds up the sums of all blocks. Returns which sums are complete in this block. All threads of the block call
  // this.
  __device__ WantedSums add_up(Sums &dk, Sums &dv, float (&dbias)[2]) const {
    const uint32_t rank = blockIdx.y, blocks = gridDim.y;
    if (blocks == 1) return {};
    const bool adds = rank < ClusterReductionBarriers::kSums;
    __syncthreads();
    if (adds && threadIdx.x < blocks && threadIdx.x != rank) ptx::arrive_remote(barriers.empty[rank], threadIdx.x);
    if (adds && threadIdx.x == 0) {
      const uint32_t tiles = rank == 0 ? kTiles + 1 : kTiles;
      ptx::expect_from_cluster(barriers.full, (blocks - 1) * tiles * kTileFloats * uint32_t(sizeof(float)));
    }
    if (rank != 0) {
      const ptx::RemoteBuffer remote = send(0, dk);
      remote.store(kTiles * kTileFloats, make_float4(dbias[0], dbias[1], 0.0f, 0.0f));
    }
    if (rank != 1) send(1, dv);
    if (!adds) return {false, false};
    ptx::wait_for_cluster(barriers.full, 0);
    for (uint32_t slot = 0; slot + 1 < blocks; ++slot) {
      const float *const parts = buffer + slot * kSlotFloats;
      if (rank == 0) {
        add(dk, parts);
        dbias[0] += parts[kTiles * kTileFloats];
        dbias[1] += parts[kTiles * kTileFloats + 1];
      } else {
        add(dv, parts);
      }
    }
    return {rank == 0, rank == 1};
  }

private:
  __device__ ptx::RemoteBuffer send(uint32_t to, const Sums &sums) const {
    ptx::wait_for_cluster(barriers.empty[to], 0);
    const uint32_t slot = blockIdx.y - (blockIdx.y > to);
    const ptx::RemoteBuffer remote(buffer + slot * kSlotFloats, barriers.full, to);
#pragma unroll
    for (int n = 0; n < kTiles; ++n)
      remote.store(n * kTileFloats, make_float4(sums[n][0], sums[n][1], sums[n][2], sums[n][3]));
    return remote;
  }
  __device__ static void add(Sums &sums, const float *parts) {
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
      const float4 part = *reinterpret_cast<const float4 *>(parts + n * kTileFloats);
      sums[n][0] += part.x;
      sums[n][1] += part.y;
      sums[n][2] += part.z;
      sums[n][3] += part.w;
    }
  }
};

} // namespace fdm::cuda
