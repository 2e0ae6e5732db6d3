// SPDX-License-Identifier: BSD-3-Clause
// The tasks of a thread block that run a second time with exact arithmetic. Consumers mark them during the first
// pass. Producers and consumers then read the marks at different places, where __syncthreads_or() must not be called.
#pragma once

#include "../../tile/sm90/roles.cuh"

namespace fdm::cuda {

// Tasks are numbered in the order of the thread block. Those with equal numbers modulo 32 * kWords share a mark.
template <int kWords> struct ExactTasks {
  uint32_t bits[kWords];
  uint64_t marked; // completes when all consumers have marked their tasks

  // One thread of the block calls this, before the others use it.
  __device__ void init() {
    for (uint32_t &word : bits) word = 0;
    ptx::init_barrier(marked, Roles::kConsumerThreads);
  }
  __device__ void mark(int number) { atomicOr(&bits[number / 32 % kWords], 1u << number % 32); }
  // A consumer calls this once, after its last mark.
  __device__ void finish() { ptx::arrive(marked); }

  // Whether a task is marked. Waits until all consumers have finished.
  __device__ bool any() {
    ptx::wait(marked, 0);
    uint32_t found = 0;
    for (const uint32_t word : bits) found |= word;
    return found != 0;
  }
  __device__ bool has(int number) const { return bits[number / 32 % kWords] >> number % 32 & 1; }
};

} // namespace fdm::cuda
