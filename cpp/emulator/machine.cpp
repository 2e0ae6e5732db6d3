// SPDX-License-Identifier: BSD-3-Clause
#include "machine.h"

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <thread>

#include "block.h"

namespace fdm::cuda {

// The array that kernels declare as extern.
thread_local __attribute__((aligned(1024))) char dynamic_shared[emulator::kSharedBytes];

} // namespace fdm::cuda

namespace fdm::emulator {
namespace {

using cuda::dynamic_shared;

// The byte patterns of uninitialised shared memory: NaN in every float format, or finite numbers. A kernel with
// special treatment of NaN gives wrong results only with the latter. kBeyond fills the memory beyond the block's
// allocation.
constexpr int kUninitialised[] = {0xff, 0x4b}, kBeyond = 0xa5;

uint64_t number_from_environment(const char *name, uint64_t otherwise) {
  const char *text = std::getenv(name);
  return text ? std::strtoull(text, nullptr, 10) : otherwise;
}

thread_local Machine machine;

} // namespace

void Machine::fail(const std::string &what) {
  if (!failed_) {
    const Fiber &at = *current;
    error = what + " (block " + std::to_string(at.block.x) + ", " + std::to_string(at.block.y) + ", thread " +
            std::to_string(at.thread.x) + ")";
  }
  failed_ = true;
  std::longjmp(scheduler_, 1);
}

void Machine::enter() {
  for (;;) {
    machine.launch_->kernel();
    Machine &own = machine;
    --own.alive_;
    Fiber &fiber = *own.current;
    // The hardware completes started work even if no thread waits for it.
    while (!fiber.copies.committed.empty()) fiber.copies.complete_first();
    while (!fiber.bulk.committed.empty()) fiber.bulk.complete_first();
    // Barriers do not wait for threads that have ended.
    if (NamedBarrier &barrier = own.barriers_[0]; barrier.arrived > 0 && barrier.arrived == own.alive_)
      own.finish(barrier);
    // The thread of a later block goes on from here. To start it anew would take two system calls.
    fiber.ended = true;
    own.leave();
  }
}

void Machine::leave() {
  if (!_setjmp(current->resume_point)) std::longjmp(scheduler_, 1);
}

// No local variables: they may be lost when a fiber jumps back.
__attribute__((noinline)) void Machine::resume(int number) {
  current_number = number;
  current = fibers_[number].get();
  if (_setjmp(scheduler_)) return;
  if (current->started) std::longjmp(current->resume_point, 1);
  current->started = true;
  setcontext(&current->start);
}

void Machine::run_warp(int number) {
  Warp &warp = warps_[number];
  while (warp.ready && !failed_) {
    const int lane = __builtin_ctz(warp.ready);
    warp.ready &= warp.ready - 1;
    resume(kWarpSize * number + lane);
  }
}

bool Machine::release_waiting() {
  bool released = false;
  for (int number = 0; number < threads_; ++number) {
    Fiber &fiber = *fibers_[number];
    if (!fiber.awaited || Barrier::load(*fiber.awaited).phase() == fiber.parity) continue;
    fiber.awaited = nullptr;
    release(number);
    released = true;
  }
  return released;
}

// Runs one piece of deferred work, chosen at random.
bool Machine::run_deferred() {
  if (deferred_.empty()) return false;
  const size_t chosen = random_() % deferred_.size();
  const Work work = std::move(deferred_[chosen]);
  deferred_.erase(deferred_.begin() + std::ptrdiff_t(chosen));
  work();
  return true;
}

void Machine::schedule() {
  const int warps = (threads_ + kWarpSize - 1) / kWarpSize;
  while (alive_ > 0 && !failed_) {
    int ready[kMaxWarps], count = 0;
    for (int number = 0; number < warps; ++number)
      if (warps_[number].ready) ready[count++] = number;
    if (count > 0) run_warp(ready[random_() % uint64_t(count)]);
    const bool idle = count == 0;
    if (phases_ended_) {
      phases_ended_ = false;
      if (release_waiting()) continue;
    }
    if ((idle || random_() % 16 == 0) && run_deferred()) continue;
    if (!idle) continue;
    bool yielded = false;
    for (int number = 0; number < warps; ++number) {
      yielded |= warps_[number].yielding != 0;
      warps_[number].ready |= std::exchange(warps_[number].yielding, 0);
    }
    if (!yielded && alive_ > 0 && !failed_) {
      failed_ = true;
      error = "the threads of a block wait for each other for ever: " + describe();
    }
  }
}

std::string Machine::describe() const {
  int waiting = 0, at_barriers = 0, in_collectives = 0;
  for (const auto &fiber : fibers_) waiting += fiber->awaited != nullptr;
  for (const NamedBarrier &barrier : barriers_) at_barriers += int(barrier.waiting.size());
  for (const Warp &warp : warps_)
    for (const Collective &c : warp.collectives) in_collectives += __builtin_popcount(c.arrived);
  return std::to_string(alive_) + " threads left, " + std::to_string(waiting) + " at barriers in shared memory, " +
         std::to_string(at_barriers) + " at barriers of the block, " + std::to_string(in_collectives) +
         " at their warp's";
}

void Machine::finish(NamedBarrier &barrier) {
  for (const int number : barrier.waiting) {
    fibers_[number]->result = barrier.any | barrier.all << 1;
    release(number);
  }
  barrier = {};
}

int Machine::sync(int number, int threads, int value, const CallSite &call_site) {
  NamedBarrier &barrier = barriers_[number];
  if (barrier.arrived == 0) barrier.call_site = call_site;
  if (call_site.file &&
      (barrier.call_site.line != call_site.line || std::strcmp(barrier.call_site.file, call_site.file) != 0))
    fail("threads of a block call __syncthreads() in different places");
  barrier.any |= value != 0;
  barrier.all &= value != 0;
  barrier.waiting.push_back(current_number);
  if (++barrier.arrived == (threads == kAllThreads ? alive_ : threads)) finish(barrier);
  // The last thread to arrive may be delayed, too.
  leave();
  return current->result;
}

void Machine::arrive(int number, int threads) {
  NamedBarrier &barrier = barriers_[number];
  if (++barrier.arrived == threads) finish(barrier);
}

bool Machine::run(const Launch &launch, Index3 index) {
  random_.seed(launch.seed);
  launch_ = &launch;
  threads_ = alive_ = int(launch.block.x);
  failed_ = phases_ended_ = false;
  deferred_.clear();
  for (NamedBarrier &barrier : barriers_) barrier = {};
  for (int number = 0; number < (threads_ + kWarpSize - 1) / kWarpSize; ++number) {
    warps_[number] = {};
    warps_[number].ready = ~0u;
  }
  while (int(fibers_.size()) < threads_) fibers_.push_back(std::make_unique<Fiber>());
  for (int number = 0; number < threads_; ++number) {
    Fiber &fiber = *fibers_[number];
    fiber.thread = {uint32_t(number), 0, 0};
    fiber.block = index;
    fiber.copies = fiber.bulk = {};
    fiber.awaited = nullptr;
    if (std::exchange(fiber.ended, false)) continue;
    fiber.started = false;
    getcontext(&fiber.start);
    fiber.start.uc_stack.ss_sp = fiber.stack->memory();
    fiber.start.uc_stack.ss_size = kStackBytes;
    fiber.start.uc_link = nullptr;
    makecontext(&fiber.start, enter, 0);
  }
  std::memset(dynamic_shared, kUninitialised[launch.seed >> 63], launch.shared_bytes);
  std::memset(dynamic_shared + launch.shared_bytes, kBeyond, kSharedBytes - launch.shared_bytes);
  schedule();
  while (!failed_ && run_deferred()) {
  }
  // Every byte equals the next one. memcmp() compares many at once, and small blocks take longer to check than to run.
  const char *beyond = dynamic_shared + launch.shared_bytes;
  const size_t left = kSharedBytes - launch.shared_bytes;
  if (!failed_ && left > 0 && (*beyond != char(kBeyond) || std::memcmp(beyond, beyond + 1, left - 1) != 0)) {
    failed_ = true;
    error = "a block has written beyond its shared memory";
  }
  return !failed_;
}

namespace {

std::mutex error_mutex;
std::string last_error;

Groups &groups(Queue queue) {
  if (queue == Queue::products) return machine.warp().products;
  return queue == Queue::copies ? machine.current->copies : machine.current->bulk;
}

} // namespace

const Index3 &thread_index() { return machine.current->thread; }
const Index3 &block_index() { return machine.current->block; }
const Index3 &block_size() { return machine.launch().block; }
const Index3 &grid_size() { return machine.launch().grid; }
void fail(const char *what) { machine.fail(what); }

uint32_t shared_address(const void *p) { return uint32_t(static_cast<const char *>(p) - dynamic_shared); }
char *shared_pointer(uint32_t address) { return dynamic_shared + int32_t(address); }

void sync_threads(int barrier, int threads) { machine.sync(barrier, threads, 0); }
void arrive_threads(int barrier, int threads) { machine.arrive(barrier, threads); }
int sync_block(int value, const CallSite &call_site) { return machine.sync(0, kAllThreads, value, call_site); }

void sync_cluster() {
  if (!machine.cluster) machine.fail("the block is in no cluster");
  sync_threads(0, kAllThreads);
  if (machine.current_number == 0) machine.cluster->barrier.arrive_and_wait();
  sync_threads(0, kAllThreads);
}
void *remote_shared(const void *own, uint32_t rank) {
  if (!machine.cluster || rank >= machine.cluster->shared.size()) machine.fail("there is no such block in the cluster");
  return machine.cluster->shared[rank] + int32_t(shared_address(own));
}

void run_collective(uint32_t mask, void *own, Execute execute) {
  Warp &warp = machine.warp();
  const uint32_t lane = machine.lane();
  if (!(mask & lane)) machine.fail("a thread calls a function of its warp with a mask that lacks it");
  // Lanes of the mask may still be in other collectives.
  const auto is_same = [&](const Collective &c) { return c.mask == mask && c.execute == execute; };
  auto collective = std::find_if(warp.collectives.begin(), warp.collectives.end(), is_same);
  if (collective == warp.collectives.end())
    collective = warp.collectives.insert(collective, Collective{mask, 0, execute, {}});
  collective->arrived |= lane;
  collective->lanes[__builtin_ctz(lane)] = own;
  if (collective->arrived != mask) return machine.leave();
  execute(collective->lanes);
  warp.collectives.erase(collective);
  warp.ready |= mask & ~lane;
}

void init_barrier(uint64_t &barrier, int arrivals) {
  Barrier{uint16_t(arrivals), uint16_t(arrivals), 0}.store(barrier);
}

// Blocks of a cluster are OS threads, so changes of a barrier are atomic.
template <class Change> static void change_barrier(uint64_t &barrier, const Change &change) {
  const std::atomic_ref<uint64_t> shared(barrier);
  uint64_t previous = shared.load(std::memory_order_relaxed), next;
  bool ended;
  do {
    next = previous;
    Barrier state = Barrier::load(next);
    change(state);
    ended = state.end_phase();
    state.store(next);
  } while (!shared.compare_exchange_weak(previous, next, std::memory_order_acq_rel));
  if (ended) machine.phase_ended();
}
static void add_arrival(Barrier &state) {
  if (state.pending == 0) machine.fail("more threads arrive at a barrier in shared memory than it was made for");
  --state.pending;
}
static void add_bytes(Barrier &state, int32_t bytes) { state.bytes_and_phase += 2 * bytes; }

void arrive(uint64_t &barrier) { change_barrier(barrier, add_arrival); }
void expect_bytes(uint64_t &barrier, uint32_t bytes) {
  change_barrier(barrier, [&](Barrier &state) { add_bytes(state, int32_t(bytes)); });
}
void complete_bytes(uint64_t &barrier, uint32_t bytes) {
  change_barrier(barrier, [&](Barrier &state) { add_bytes(state, -int32_t(bytes)); });
}
void expect_from_cluster(uint64_t &barrier, uint32_t bytes) {
  change_barrier(barrier, [&](Barrier &state) {
    add_arrival(state);
    add_bytes(state, int32_t(bytes));
  });
}

bool has_ended(const uint64_t &barrier, uint32_t parity) { return Barrier::load(barrier).phase() != parity; }

void wait(uint64_t &barrier, uint32_t parity) {
  if (has_ended(barrier, parity)) return;
  machine.current->awaited = &barrier;
  machine.current->parity = parity;
  machine.leave();
}

void wait_for_cluster(uint64_t &barrier, uint32_t parity) {
  for (;;) {
    const uint64_t now = std::atomic_ref<uint64_t>(barrier).load(std::memory_order_acquire);
    if (has_ended(now, parity)) return;
    if (machine.cluster->failed) machine.fail("another block of the cluster has failed");
    std::this_thread::yield();
    yield();
  }
}

void yield() {
  machine.warp().yielding |= machine.lane();
  machine.leave();
}

void linger() {
  if (machine.should_linger()) yield();
}

void defer(Queue queue, Work work) { groups(queue).open.push_back(std::move(work)); }
void defer(Work work) { machine.defer(std::move(work)); }

void complete(Queue queue, int pending) {
  Groups &own = groups(queue);
  while (int(own.committed.size()) > pending) own.complete_first();
}

void commit(Queue queue) {
  Groups &own = groups(queue);
  own.committed.push_back(std::move(own.open));
  own.open.clear();
  // Copies may also complete at once, while other threads still read the old data.
  if (queue == Queue::copies && machine.should_complete_early()) complete(queue, 0);
}

std::vector<Work> share(Queue queue) {
  // Work that both a queue group and a barrier wait for: the first to need it runs it.
  struct Shared {
    std::shared_ptr<Work> work;
    void operator()() const {
      if (Work own = std::exchange(*work, nullptr)) own();
    }
  };
  Groups &own = groups(queue);
  std::vector<Work> all;
  const auto share_group = [&](std::vector<Work> &group) {
    std::erase_if(group, [](const Work &work) {
      const Shared *shared = work.target<Shared>();
      return shared && !*shared->work;
    });
    for (Work &work : group) {
      if (!work.target<Shared>()) work = Shared{std::make_shared<Work>(std::move(work))};
      all.push_back(work);
    }
  };
  for (std::vector<Work> &group : own.committed) share_group(group);
  share_group(own.open);
  return all;
}

bool launch(Launch launch) {
  const bool is_possible = launch.shared_bytes <= size_t(kSharedBytes) && launch.block.x <= kWarpSize * kMaxWarps;
  if (!is_possible || (launch.cluster > 1 && launch.cluster != launch.grid.y)) {
    const std::lock_guard lock(error_mutex);
    last_error = "more shared memory or threads than an SM has, or a cluster that is no column of the grid";
    return false;
  }
  static std::atomic<uint64_t> launches{0};
  static const uint64_t seed = number_from_environment("FDM_EMULATOR_SEED", 0);
  const uint64_t launch_seed = (seed << 32) + launches++;
  const uint64_t blocks = uint64_t(launch.grid.x) * launch.grid.y;
  std::atomic<uint64_t> next{0};
  std::atomic<bool> succeeded{true};
  const auto run_block = [&](uint64_t index) {
    Launch own = launch;
    own.seed = launch_seed * 0x9e3779b97f4a7c15u + index;
    if (machine.run(own, {uint32_t(index % launch.grid.x), uint32_t(index / launch.grid.x)})) return;
    const std::lock_guard lock(error_mutex);
    last_error = machine.error;
    succeeded = false;
  };
  for (uint32_t column = 0; launch.cluster > 1 && succeeded && column < launch.grid.x; ++column) {
    Cluster cluster(launch.cluster);
    std::vector<std::thread> ranks;
    for (uint32_t rank = 0; rank < launch.cluster; ++rank)
      ranks.emplace_back([&, rank] {
        machine.cluster = &cluster;
        cluster.shared[rank] = dynamic_shared;
        cluster.barrier.arrive_and_wait();
        run_block(uint64_t(rank) * launch.grid.x + column);
        if (!succeeded) cluster.failed = true;
        cluster.barrier.arrive_and_drop(); // a block that has ended is not waited for
      });
    for (std::thread &rank : ranks) rank.join();
  }
  if (launch.cluster > 1) return succeeded;
  const auto work = [&] {
    for (uint64_t index; succeeded && (index = next++) < blocks;) run_block(index);
  };
  static const uint64_t max_threads =
      number_from_environment("FDM_EMULATOR_THREADS", std::max(1u, std::thread::hardware_concurrency()));
  std::vector<std::thread> others;
  for (uint64_t n = 1; n < std::min(max_threads, blocks); ++n) others.emplace_back(work);
  work();
  for (std::thread &other : others) other.join();
  return succeeded;
}

const char *error() {
  thread_local std::string text;
  const std::lock_guard lock(error_mutex);
  text = last_error;
  return text.c_str();
}

int sm_count() {
  static const int count = int(number_from_environment("FDM_EMULATOR_SMS", 3));
  return count;
}

} // namespace fdm::emulator
