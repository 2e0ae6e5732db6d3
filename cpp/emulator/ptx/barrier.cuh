// SPDX-License-Identifier: BSD-3-Clause
// cuda/ptx/barrier.cuh. Proxy fences and register counts have no effect.
#pragma once

#include <cstdint>

#include "copy.cuh"

namespace fdm::cuda::ptx {

inline void init_barrier(uint64_t &barrier, int arrivals) { emulator::init_barrier(barrier, arrivals); }
inline void arrive(uint64_t &barrier) {
  emulator::arrive(barrier);
  emulator::linger();
}
inline void arrive_after_copies(uint64_t &barrier) {
  emulator::defer([copies = emulator::share(emulator::Queue::copies), &barrier] {
    for (const emulator::Work &copy : copies) copy();
    emulator::arrive(barrier);
  });
}
inline void wait(uint64_t &barrier, uint32_t parity) { emulator::wait(barrier, parity); }
inline bool test_wait(uint64_t &barrier, uint32_t parity) {
  if (!emulator::has_ended(barrier, parity)) emulator::yield();
  return emulator::has_ended(barrier, parity);
}
inline void fence_async_proxy() {}

template <int kNumber, int kThreads> void sync_threads() { emulator::sync_threads(kNumber, kThreads); }
template <int kThreads> void sync_threads(int number) { emulator::sync_threads(number, kThreads); }
template <int kThreads> void arrive_threads(int number) {
  emulator::arrive_threads(number, kThreads);
  emulator::linger();
}

template <int kRegisters> void warpgroup_reg_dealloc() {}
template <int kRegisters> void warpgroup_reg_alloc() {}

} // namespace fdm::cuda::ptx
