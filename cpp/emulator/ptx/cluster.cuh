// SPDX-License-Identifier: BSD-3-Clause
// cuda/ptx/cluster.cuh. The blocks of a cluster run on as many threads of the system.
#pragma once

#include <cstdint>

namespace fdm::cuda::ptx {

inline void sync_cluster() { emulator::sync_cluster(); }
inline float load_of_block(const float *own, uint32_t rank) {
  return *static_cast<const float *>(emulator::shared_of_block(own, rank));
}

} // namespace fdm::cuda::ptx
