// SPDX-License-Identifier: BSD-3-Clause
// The pack's own threads: an OpenMP runtime could clash with that of another library.
#pragma once

#include <cstdint>

namespace fdm::cpu {

using TaskFunction = void (*)(void *context, int64_t task, int worker);

// Calls function(context, task, worker) for each task in [0, tasks), on the calling thread and at most threads - 1
// others. worker is in [0, threads), and no two concurrent tasks have the same worker number. Returns when all tasks
// are done. May be called from several threads, and after a fork. If the system refuses a new thread, fewer are used.
void run_tasks(int threads, int64_t tasks, TaskFunction function, void *context);

// The same for a callable.
template <class Body> void parallel_for(int threads, int64_t tasks, const Body &body) {
  const auto call = [](void *context, int64_t task, int worker) {
    (*static_cast<const Body *>(context))(task, worker);
  };
  run_tasks(threads, tasks, call, const_cast<Body *>(&body));
}

// The number of threads that `work` multiply-adds justify. One thread computes about 40 of them per nanosecond, and
// waking another thread takes as long as millions (50 us, on two cores of an EPYC).
inline int useful_threads(int threads, double work) {
  constexpr double kMinWorkPerThread = 4e6;
  const double max_threads = work / kMinWorkPerThread;
  return max_threads >= threads ? threads : max_threads < 1 ? 1 : int(max_threads);
}

} // namespace fdm::cpu
