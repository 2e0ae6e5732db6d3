// SPDX-License-Identifier: BSD-3-Clause
// The number of calls of this process that took each route kind (route/describe.h). Tests read it to see which
// kernels their calls take.
#pragma once

#include <atomic>
#include <cstdint>
#include <map>
#include <mutex>
#include <string>

#include "../route/describe.h"

namespace fdm::cuda {

class RouteCounts {
public:
  void add_forward(int kind) { forward_[kind].fetch_add(1, std::memory_order_relaxed); }
  void add_backward(int kind) { backward_[kind].fetch_add(1, std::memory_order_relaxed); }

  // Writes at most `room` route kinds that calls took, and returns how many there are.
  int32_t read(fdm_launch_count *counts, int32_t room) {
    int32_t number = 0;
    const auto add = [&](uint64_t calls, const std::string &name) {
      if (number < room) counts[number] = {kept(name), calls};
      ++number;
    };
    for (int kind = 0; kind < kForwardRouteKinds; ++kind)
      if (const uint64_t calls = forward_[kind].load(std::memory_order_relaxed)) add(calls, name_of_forward(kind));
    for (int kind = 0; kind < kBackwardRouteKinds; ++kind)
      if (const uint64_t calls = backward_[kind].load(std::memory_order_relaxed)) add(calls, name_of_backward(kind));
    return number;
  }

private:
  std::atomic<uint64_t> forward_[kForwardRouteKinds], backward_[kBackwardRouteKinds];
  std::mutex mutex_;
  std::map<std::string, int> names_; // a map does not move its names, to which callers hold pointers

  const char *kept(const std::string &name) {
    const std::lock_guard lock(mutex_);
    return names_.try_emplace(name, 0).first->first.c_str();
  }
};

inline RouteCounts route_counts;

} // namespace fdm::cuda
