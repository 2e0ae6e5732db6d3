// SPDX-License-Identifier: BSD-3-Clause
// Runs the CUDA kernels on a CPU, for tests: every thread of a block is a fiber, and warps take turns at random.
//
// Asynchronous work of the hardware (copies, products of warpgroups) is put off: it happens at a random time, at the
// latest when a thread waits for it. So a kernel that reads data too early, or overwrites data that is still read,
// gives wrong results here, while on a GPU it seldom does. Thread blocks run side by side on threads of the system; no
// kernel waits for another block, but for those of its cluster. A launch returns when the kernel has ended, so
// programmatic dependent launches are not tested here (see FLASH_DMATTN_DELAYS for those), nor are proxy fences and
// orders of memory.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <vector>

namespace fdm::emulator {

struct Index3 {
  uint32_t x = 0, y = 0, z = 0;
};

// CUDA's variables, for the calling thread.
const Index3 &thread_index();
const Index3 &block_index();
const Index3 &block_size();
const Index3 &grid_size();

// Ends the launch with an error, which says where in the grid it happened.
[[noreturn]] void fail(const char *what);

// Shared memory has addresses of 32 bits, which count from the start of the block's dynamic part.
uint32_t shared_address(const void *p);
char *shared_pointer(uint32_t address);
constexpr int kSharedBytes = 227 << 10;

// Blocks until as many threads have come to the barrier; kAll: as are left in the block.
constexpr int kAll = 0;
void sync_threads(int barrier, int threads);
void arrive_threads(int barrier, int threads);
// A line of the source.
struct Place {
  const char *file = nullptr; // null: it does not matter
  int line = 0;
};
// Blocks until all threads that are left in the block have called it, which they have to do in the same place. Returns
// bit 0 if any of them has another value than 0, and bit 1 if all have.
int sync_block(int value, const Place &place);

// Blocks of a cluster: a barrier of all their threads, and the shared memory of another block at the address of `own`.
void sync_cluster();
const void *shared_of_block(const void *own, uint32_t rank);
// Barriers of which other blocks know: these arrive, or tell of bytes, and this block waits, or arrives and expects
// bytes.
void arrive_of_block(uint64_t &own, uint32_t rank);
void complete_bytes_of_block(uint64_t &own, uint32_t rank, uint32_t bytes);
void expect_of_cluster(uint64_t &barrier, uint32_t bytes);
void wait_for_cluster(uint64_t &barrier, uint32_t parity);

// The lanes of the mask meet. The last of them calls execute(lanes), which has for each lane what it gave.
using Execute = void (*)(void *const *lanes);
void meet(uint32_t mask, void *own, Execute execute);

// The barriers of ptx/barrier.cuh.
void init_barrier(uint64_t &barrier, int arrivals);
void arrive(uint64_t &barrier);
void expect_bytes(uint64_t &barrier, uint32_t bytes);
void complete_bytes(uint64_t &barrier, uint32_t bytes);
bool has_ended(const uint64_t &barrier, uint32_t parity);
void wait(uint64_t &barrier, uint32_t parity);

// Lets other warps go on.
void yield();
// Sometimes the same, after a thread has let others go on: its next accesses may then come too late.
void linger();

// Work that the hardware does later, in groups. The queues of a thread hold copies by cp.async, and the reads of bulk
// copies from shared memory; that of a warp holds products of its warpgroup. complete() does all but the last `pending`
// groups that were committed.
using Work = std::function<void()>;
enum class Queue { copies, bulk, products };
void put_off(Queue queue, Work work);
void commit(Queue queue);
void complete(Queue queue, int pending);
// Returns all work of a queue. It is done once, for the queue or for who has what this returns.
std::vector<Work> share(Queue queue);
// Work that nobody waits for by a queue: it tells a barrier when it is done.
void put_off(Work work);

struct Launch {
  Index3 grid, block;
  size_t shared_bytes;
  std::function<void()> kernel; // what each thread calls
  uint32_t cluster = 1;         // 1, or all blocks of a column of the grid, which run at the same time
  uint64_t seed = 0;            // of the block
};
// Returns false if it failed; error() tells why.
bool launch(Launch launch);
const char *error();

// The number of SMs that persistent kernels see: few, so that each block has several tiles.
int sm_count();

} // namespace fdm::emulator
