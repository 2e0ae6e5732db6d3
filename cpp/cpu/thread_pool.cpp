// SPDX-License-Identifier: BSD-3-Clause
#include "thread_pool.h"

#if !defined(_WIN32)
#include <pthread.h>
#endif

#include <atomic>
#include <condition_variable>
#include <mutex>
#include <thread>

namespace fdm::cpu {
namespace {

struct Job {
  TaskFunction function;
  void *context;
  int64_t tasks;
  std::atomic<int64_t> next_task{0};
  int wanted;      // helpers that may still join; guarded by the pool's mutex
  int joined = 0;  // number of helpers that have joined, for their numbering; guarded
  int running = 0; // helpers at work; guarded
  Job *next_job = nullptr;

  Job(TaskFunction f, void *c, int64_t n, int helpers) : function(f), context(c), tasks(n), wanted(helpers) {}

  void work(int worker) {
    for (int64_t task = next_task.fetch_add(1, std::memory_order_relaxed); task < tasks;
         task = next_task.fetch_add(1, std::memory_order_relaxed))
      function(context, task, worker);
  }
};

class Pool {
public:
  void run(Job &job) {
    const int helpers = job.wanted;
    {
      std::unique_lock<std::mutex> lock(mutex_);
      while (threads_ < job.wanted && add_thread()) {
      }
      job.next_job = jobs_;
      jobs_ = &job;
    }
    for (int helper = 0; helper < helpers; ++helper) wake_.notify_one();
    job.work(0);
    std::unique_lock<std::mutex> lock(mutex_);
    unlink(job);
    done_.wait(lock, [&] { return job.running == 0; });
  }

private:
  bool add_thread() {
    try {
      std::thread([this] { serve(); }).detach();
    } catch (const std::exception &) {
      return false;
    }
    ++threads_;
    return true;
  }

  void unlink(Job &job) {
    for (Job **link = &jobs_; *link; link = &(*link)->next_job)
      if (*link == &job) {
        *link = job.next_job;
        return;
      }
  }

  Job *open_job() {
    for (Job *job = jobs_; job; job = job->next_job)
      if (job->wanted > 0 && job->next_task.load(std::memory_order_relaxed) < job->tasks) return job;
    return nullptr;
  }

  void serve() {
    std::unique_lock<std::mutex> lock(mutex_);
    for (;;) {
      Job *job = nullptr;
      wake_.wait(lock, [&] { return (job = open_job()) != nullptr; });
      --job->wanted;
      ++job->running;
      const int worker = ++job->joined;
      lock.unlock();
      job->work(worker);
      lock.lock();
      if (--job->running == 0) done_.notify_all();
    }
  }

  std::mutex mutex_;
  std::condition_variable wake_, done_;
  Job *jobs_ = nullptr; // most recent first
  int threads_ = 0;
};

// Never destroyed: detached threads may still wait on it when the process ends. After a fork the child has none of
// the threads, and one of them may hold the mutex, so the child starts with a new pool.
std::atomic<Pool *> current{nullptr};

Pool &pool() {
  Pool *found = current.load(std::memory_order_acquire);
  if (found) return *found;
#if !defined(_WIN32) // Windows has no fork
  static const int registered = pthread_atfork(nullptr, nullptr, [] { current.store(nullptr); });
  (void)registered;
#endif
  auto *made = new Pool;
  if (current.compare_exchange_strong(found, made)) return *made;
  delete made;
  return *found;
}

} // namespace

void run_tasks(int threads, int64_t tasks, TaskFunction function, void *context) {
  const int64_t helpers = (threads < tasks ? threads : tasks) - 1;
  Job job(function, context, tasks, helpers > 0 ? static_cast<int>(helpers) : 0);
  if (helpers > 0)
    pool().run(job);
  else
    job.work(0);
}

} // namespace fdm::cpu
