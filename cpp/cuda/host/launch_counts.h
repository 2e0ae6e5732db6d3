// SPDX-License-Identifier: BSD-3-Clause
// The number of launches of each kernel of the pack in this process. Tests read it to see which kernels their calls
// reach.
#pragma once

#include <cuda_runtime_api.h>

#include <atomic>
#include <cstdint>

#include "../../pack.h"

namespace fdm::cuda {

class LaunchCounts {
public:
  void add(const void *kernel) {
    for (uintptr_t place = reinterpret_cast<uintptr_t>(kernel) / 16, n = 0; n < kRoom; ++n, ++place) {
      Entry &entry = entries_[place % kRoom];
      const void *found = entry.kernel.load(std::memory_order_relaxed);
      if (found == nullptr && entry.kernel.compare_exchange_strong(found, kernel)) found = kernel;
      if (found != kernel) continue;
      entry.launches.fetch_add(1, std::memory_order_relaxed);
      return;
    }
  }

  // Writes at most `room` launched kernels, and returns how many there are.
  int32_t read(fdm_launch_count *counts, int32_t room) const {
    int32_t number = 0;
    for (const Entry &entry : entries_) {
      const void *kernel = entry.kernel.load(std::memory_order_acquire);
      if (kernel == nullptr) continue;
      if (number < room) {
        counts[number].launches = entry.launches.load(std::memory_order_relaxed);
        if (cudaFuncGetName(&counts[number].kernel, kernel)) counts[number].kernel = "";
      }
      ++number;
    }
    return number;
  }

private:
  static constexpr uintptr_t kRoom = 4096; // more than a pack has kernels
  struct Entry {
    std::atomic<const void *> kernel;
    std::atomic<uint64_t> launches;
  };
  Entry entries_[kRoom];
};

inline LaunchCounts launch_counts;

} // namespace fdm::cuda
