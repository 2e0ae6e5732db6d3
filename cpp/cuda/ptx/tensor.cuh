// SPDX-License-Identifier: BSD-3-Clause
// TMA copies of tensor boxes to shared memory (PTX ISA: cp.async.bulk.tensor, mbarrier.expect_tx; sm_90).
#pragma once

#include <cuda.h>

#include <cstdint>

#include "copy.cuh"

namespace fdm::cuda::ptx {

// The barrier's phase lasts until `bytes` more bytes have been copied. This is not an arrival.
__device__ __forceinline__ void expect_bytes(uint64_t &barrier, uint32_t bytes) {
  asm volatile("mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%0], %1;\n" ::"r"(shared_address(&barrier)), "r"(bytes)
               : "memory");
}

// Starts to copy the box at these coordinates, innermost first. The copy reports its bytes to the barrier. Elements
// outside of the tensor become zeros.
__device__ __forceinline__ void copy_box(uint32_t shared, const CUtensorMap &map, int32_t x, int32_t y, int32_t z,
                                         int32_t w, uint64_t &barrier) {
  asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes "
               "[%0], [%1, {%3, %4, %5, %6}], [%2];\n" ::"r"(shared),
               "l"(reinterpret_cast<uint64_t>(&map)), "r"(shared_address(&barrier)), "r"(x), "r"(y), "r"(z), "r"(w)
               : "memory");
}

} // namespace fdm::cuda::ptx
