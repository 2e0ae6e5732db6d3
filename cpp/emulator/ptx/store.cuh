// SPDX-License-Identifier: BSD-3-Clause
// cuda/ptx/store.cuh. Bulk additions read shared memory when a thread waits for that, or at the end.
#pragma once

#include <cstdint>

#include "matrix.cuh"

namespace fdm::cuda::ptx {

inline void stmatrix(uint32_t address, const uint32_t (&m)[4]) {
  struct Own {
    uint32_t address;
    const uint32_t *words;
  } own{address, m};
  emulator::run_collective(emulated::kAllLanes, &own, [](void *const *lanes) {
    for (int lane = 0; lane < 32; ++lane)
      for (int matrix = 0; matrix < 4; ++matrix) {
        const uint32_t to = static_cast<Own *>(lanes[8 * matrix + lane / 4])->address;
        if (to % 16 != 0) emulator::fail("a row of stmatrix is not aligned");
        emulated::at<uint32_t>(to + 4 * (lane % 4)) = static_cast<Own *>(lanes[lane])->words[matrix];
      }
  });
}

inline void add_global(float *sum, float x) { atomicAdd(sum, x); }
inline void add_global(float *sums, const float (&x)[4]) {
  if (reinterpret_cast<uintptr_t>(sums) % 16 != 0) emulator::fail("an addition of 16 bytes is not aligned");
  for (int i = 0; i < 4; ++i) atomicAdd(sums + i, x[i]);
}

inline void add_global_bulk(float *sums, uint32_t shared_sums, uint32_t bytes) {
  if (reinterpret_cast<uintptr_t>(sums) % 16 != 0 || shared_sums % 16 != 0 || bytes % 16 != 0)
    emulator::fail("a bulk addition is not aligned");
  emulator::defer(emulator::Queue::bulk, [=] {
    const char *from = emulator::shared_pointer(shared_sums);
    for (uint32_t i = 0; i < bytes / sizeof(float); ++i) {
      float x;
      std::memcpy(&x, from + i * sizeof x, sizeof x);
      atomicAdd(sums + i, x);
    }
  });
}
inline void wait_for_bulk_reads() {
  emulator::commit(emulator::Queue::bulk);
  emulator::complete(emulator::Queue::bulk, 0);
}

} // namespace fdm::cuda::ptx
