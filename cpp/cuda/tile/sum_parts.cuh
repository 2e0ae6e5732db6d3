// SPDX-License-Identifier: BSD-3-Clause
// The kernel that adds float32 partial sums of thread blocks, in the order of the parts. blockIdx.x strides over
// items; the blocks of a grid column share the values of each item. `Items` gives access to them:
//   Params, Value          the kernel's parameters; a few consecutive floats, for one thread
//   Items(params), count   the number of items
//   find(n)                finds item n and its `parts`; false: there is none, or it was not divided
//   values()               the number of its values
//   index(i)               the index of value i in each of its parts; -1: not needed
//   store(i, sum)
#pragma once

#include "../host/launch.cuh"
#include "products.cuh"
#include "ptx/dependent.cuh"

namespace fdm::cuda {

constexpr int kPartsThreads = 256;

// Each part after the second is `stride` floats behind the previous one.
struct PartSums {
  const float *first, *second;
  int64_t stride;
  int64_t count;
};

__device__ __forceinline__ void add(float2 &sum, const float2 &x) {
  sum.x += x.x;
  sum.y += x.y;
}
__device__ __forceinline__ void add(float4 &sum, const float4 &x) {
  sum.x += x.x;
  sum.y += x.y;
  sum.z += x.z;
  sum.w += x.w;
}

// The bound of one block per SM keeps the compiler from spilling registers to fit a fifth block.
template <class Items>
__global__ void __launch_bounds__(kPartsThreads, 1) sum_parts(const __grid_constant__ typename Items::Params params) {
  using Value = typename Items::Value;
  ptx::wait_for_kernel_ahead();
  Items items(params);
  for (int64_t number = blockIdx.x; number < items.count; number += gridDim.x) {
    if (!items.find(number)) continue;
    const PartSums &parts = items.parts;
    const int values = items.values();
#pragma unroll 1
    for (int i = int(blockIdx.y) * kPartsThreads + int(threadIdx.x); i < values; i += int(gridDim.y) * kPartsThreads) {
      const int index = items.index(i);
      if (index < 0) continue;
      Value sum = reinterpret_cast<const Value *>(parts.first)[index];
#pragma unroll 4
      for (int64_t part = 0; part < parts.count - 1; ++part)
        add(sum, reinterpret_cast<const Value *>(parts.second + part * parts.stride)[index]);
      items.store(i, sum);
    }
  }
}

} // namespace fdm::cuda
