// SPDX-License-Identifier: BSD-3-Clause
// cuda/ptx/cluster.cuh. Each block of a cluster runs on an OS thread.
#pragma once

#include <cstdint>

namespace fdm::cuda::ptx {

inline void sync_cluster() { emulator::sync_cluster(); }
inline void arrive_cluster_barrier() {}
inline void wait_cluster_barrier() { emulator::sync_cluster(); }
inline void leave_cluster() { emulator::sync_cluster(); }
inline float load_remote(const float *own, uint32_t rank) {
  return *static_cast<const float *>(emulator::remote_shared(own, rank));
}

inline uint64_t &remote_barrier(uint64_t &own, uint32_t rank) {
  return *static_cast<uint64_t *>(emulator::remote_shared(&own, rank));
}

class RemoteBuffer {
public:
  RemoteBuffer(float *own, uint64_t &own_barrier, uint32_t rank) : own_(own), barrier_(own_barrier), rank_(rank) {}

  void store(int first, const float4 &x) const {
    float *const own = own_ + first;
    if (reinterpret_cast<uintptr_t>(own) % 16 != 0) emulator::fail("a store of 16 bytes is not aligned");
    *static_cast<float4 *>(emulator::remote_shared(own, rank_)) = x;
    emulator::complete_bytes(remote_barrier(barrier_, rank_), sizeof x);
  }

private:
  float *own_;
  uint64_t &barrier_;
  uint32_t rank_;
};
inline void expect_from_cluster(uint64_t &barrier, uint32_t bytes) { emulator::expect_from_cluster(barrier, bytes); }
inline void arrive_remote(uint64_t &own, uint32_t rank) {
  emulator::arrive(remote_barrier(own, rank));
  emulator::linger();
}
inline void wait_for_cluster(uint64_t &barrier, uint32_t parity) { emulator::wait_for_cluster(barrier, parity); }

} // namespace fdm::cuda::ptx
