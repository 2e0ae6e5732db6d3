// SPDX-License-Identifier: BSD-3-Clause
// Runs the CUDA kernels on a CPU, for tests. Every thread of a block is a fiber, and the scheduler picks warps at
// random.
//
// Asynchronous hardware work (copies, wgmma) is deferred to a random time, at the latest until a thread waits for it.
// So a kernel that reads data too early, or overwrites data in use, gives wrong results here, but seldom on a GPU.
// Thread blocks run in parallel on OS threads; no kernel waits for a block outside its cluster. A launch returns when
// the kernel has ended. Therefore the emulator does not test programmatic dependent launches (FLASH_DMATTN_DELAYS
// does), proxy fences or memory orders.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <vector>

namespace fdm::emulator {

struct Index3 {
  uint32_t x = 0, y = 0, z = 0;
};

// The CUDA built-in variables of the calling thread.
const Index3 &thread_index();
const Index3 &block_index();
const Index3 &block_size();
const Index3 &grid_size();

// Ends the launch with an error that names the block and thread.
[[noreturn]] void fail(const char *what);

// Addresses of shared memory are 32-bit offsets from the block's dynamic part.
uint32_t shared_address(const void *p);
char *shared_pointer(uint32_t address);
constexpr int kSharedBytes = 227 << 10;

// Waits until `threads` threads have reached the barrier; kAllThreads: all threads left in the block.
constexpr int kAllThreads = 0;
void sync_threads(int barrier, int threads);
void arrive_threads(int barrier, int threads);
// A line of the source that calls __syncthreads().
struct CallSite {
  const char *file = nullptr; // null: not checked
  int line = 0;
};
// Waits until all threads left in the block have called it, which must be in the same place. Bit 0 of the result is
// set if any value is nonzero, bit 1 if all are.
int sync_block(int value, const CallSite &call_site);

// Clusters: a barrier of all their threads, and the shared memory of another block at the address of `own`.
void sync_cluster();
void *remote_shared(const void *own, uint32_t rank);
// A barrier at which other blocks of the cluster arrive or report bytes: this block arrives and expects bytes, or waits.
void expect_from_cluster(uint64_t &barrier, uint32_t bytes);
void wait_for_cluster(uint64_t &barrier, uint32_t parity);

// A collective of the lanes of the mask: the last one to arrive calls execute(lanes) with the argument of each lane.
using Execute = void (*)(void *const *lanes);
void run_collective(uint32_t mask, void *own, Execute execute);

// The barriers of ptx/barrier.cuh.
void init_barrier(uint64_t &barrier, int arrivals);
void arrive(uint64_t &barrier);
void expect_bytes(uint64_t &barrier, uint32_t bytes);
void complete_bytes(uint64_t &barrier, uint32_t bytes);
bool has_ended(const uint64_t &barrier, uint32_t parity);
void wait(uint64_t &barrier, uint32_t parity);

// Lets other warps run.
void yield();
// Sometimes the same, after a thread has released others: its next accesses may then come too late.
void linger();

// Deferred hardware work, in groups. The queues of a thread hold cp.async copies, and bulk copies' reads of shared
// memory. The queue of a warp holds products of its warpgroup. complete() runs all but the last `pending` committed
// groups.
using Work = std::function<void()>;
enum class Queue { copies, bulk, products };
void defer(Queue queue, Work work);
void commit(Queue queue);
void complete(Queue queue, int pending);
// Returns all work of a queue. Each item runs once, for the queue or for the holder of the result.
std::vector<Work> share(Queue queue);
// Work without a queue: it signals a barrier when it is done.
void defer(Work work);

struct Launch {
  Index3 grid, block;
  size_t shared_bytes;
  std::function<void()> kernel; // called by each thread
  uint32_t cluster = 1;         // 1, or all blocks of a column of the grid, which run concurrently
  uint64_t seed = 0;            // seed of the block
};
// Returns false on failure; error() gives the reason.
bool launch(Launch launch);
const char *error();

// The number of SMs that persistent kernels see: few, so that each block has several tiles.
int sm_count();

} // namespace fdm::emulator
