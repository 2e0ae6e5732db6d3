// SPDX-License-Identifier: BSD-3-Clause
// The parts of machine.cpp: fibers, warps, barriers, and the blocks of a cluster.
#pragma once

#include <sys/mman.h>
#include <ucontext.h>

#include <atomic>
#include <barrier>
#include <csetjmp>
#include <cstring>
#include <deque>
#include <memory>
#include <new>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "machine.h"

namespace fdm::emulator {

constexpr int kWarpSize = 32, kMaxWarps = 32, kNamedBarriers = 16;
constexpr size_t kStackBytes = 256 << 10;

// A barrier in shared memory.
struct Barrier {
  uint16_t pending, arrivals;
  int32_t bytes_and_phase; // twice the missing bytes, plus the parity of the current phase

  static Barrier load(const uint64_t &word) {
    Barrier barrier;
    std::memcpy(&barrier, &word, sizeof barrier);
    return barrier;
  }
  void store(uint64_t &word) const { std::memcpy(&word, this, sizeof *this); }
  uint32_t phase() const { return bytes_and_phase & 1; }
  // Ends the phase and returns true if no arrival or byte is missing.
  bool end_phase() {
    if (pending != 0 || bytes_and_phase >> 1 != 0) return false;
    pending = arrivals;
    bytes_and_phase ^= 1;
    return true;
  }
};
static_assert(sizeof(Barrier) == sizeof(uint64_t));

// Groups of work in order; the last one is open.
struct Groups {
  std::deque<std::vector<Work>> committed;
  std::vector<Work> open;

  void complete_first() {
    std::vector<Work> group = std::move(committed.front());
    committed.pop_front();
    for (Work &work : group) work();
  }
};

// A stack keeps its address from block to block.
class Stack {
public:
  Stack() {
    memory_ = mmap(nullptr, kStackBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory_ == MAP_FAILED) throw std::bad_alloc();
    mprotect(memory_, 4096, PROT_NONE);
  }
  ~Stack() { munmap(memory_, kStackBytes); }
  Stack(const Stack &) = delete;
  Stack &operator=(const Stack &) = delete;
  void *memory() const { return memory_; }

private:
  void *memory_;
};

struct Fiber {
  Index3 thread, block;
  std::unique_ptr<Stack> stack = std::make_unique<Stack>();
  ucontext_t start;
  jmp_buf resume_point;
  bool started = false, ended = false;
  Groups copies, bulk;
  uint64_t *awaited = nullptr; // an mbarrier in shared memory, and the parity of its phase
  uint32_t parity = 0;
  int result = 0; // result of a reduction over the block
};

struct Collective {
  uint32_t mask, arrived;
  Execute execute;
  void *lanes[kWarpSize];
};

struct Warp {
  uint32_t ready = 0, yielding = 0; // lanes
  std::vector<Collective> collectives;
  Groups products;
};

struct NamedBarrier {
  CallSite call_site; // of the threads that have arrived
  int arrived = 0, any = 0, all = 1;
  std::vector<int> waiting;
};

// Blocks that run concurrently, each on an OS thread.
struct Cluster {
  explicit Cluster(uint32_t blocks) : barrier(blocks), shared(blocks) {}

  std::barrier<> barrier;
  std::vector<char *> shared;      // the shared memory of each block
  std::atomic<bool> failed{false}; // one of them has failed
};

// Runs thread blocks one after the other on an OS thread.
class Machine {
public:
  // Runs one block. Returns false on failure; `error` gives the reason.
  bool run(const Launch &launch, Index3 index);
  std::string error;

  Fiber *current = nullptr;
  int current_number = 0;
  Cluster *cluster = nullptr;

  const Launch &launch() const { return *launch_; }
  Warp &warp() { return warps_[current_number / kWarpSize]; }
  uint32_t lane() const { return 1u << current_number % kWarpSize; }
  // Leaves the fiber until another one makes it ready again.
  void leave();
  int sync(int barrier, int threads, int value, const CallSite &call_site = {});
  void arrive(int barrier, int threads);
  bool should_linger() { return random_() % 64 == 0; }
  bool should_complete_early() { return random_() % 8 == 0; }
  void phase_ended() { phases_ended_ = true; }
  void defer(Work work) { deferred_.push_back(std::move(work)); }
  [[noreturn]] void fail(const std::string &what);

private:
  static void enter();
  void resume(int number);
  void release(int number) { warps_[number / kWarpSize].ready |= 1u << number % kWarpSize; }
  void run_warp(int warp);
  bool release_waiting();
  bool run_deferred();
  void finish(NamedBarrier &barrier);
  void schedule();
  std::string describe() const;

  std::vector<std::unique_ptr<Fiber>> fibers_;
  Warp warps_[kMaxWarps];
  NamedBarrier barriers_[kNamedBarriers];
  std::deque<Work> deferred_;
  const Launch *launch_ = nullptr;
  jmp_buf scheduler_;
  std::mt19937_64 random_;
  int threads_ = 0, alive_ = 0;
  bool phases_ended_ = false, failed_ = false;
};

} // namespace fdm::emulator
