// SPDX-License-Identifier: BSD-3-Clause
// Sums dk and dv of the members of groups (route/members.h) in float32.
#include <cuda_runtime.h>

#include "../host/launch.cuh"
#include "../route/members.h"
#include "../tile/products.cuh"
#include "backward.h"

namespace fdm::cuda {
namespace {

constexpr int kThreads = kMemberThreads;

struct MemberSum {
  fdm_tensor to[2];
  const uint16_t *from[2];
  int64_t elements, pitch;
  int32_t members;
};

// A thread sums eight neighbours of a row of a KV head. One row of the grid sums dk, the other dv.
__global__ void __launch_bounds__(kThreads) sum_members(const __grid_constant__ MemberSum work) {
  const fdm_tensor &t = work.to[blockIdx.y];
  const int64_t first = 8 * (int64_t(blockIdx.x) * kThreads + threadIdx.x);
  if (first >= work.elements || !present(t)) return;
  const AnyPacking packing{t.dtype == FDM_FLOAT16};
  float sums[8] = {};
  for (int32_t member = 0; member < work.members; ++member) {
    const uint4 eight = *reinterpret_cast<const uint4 *>(work.from[blockIdx.y] + member * work.elements + first);
    const uint32_t pairs[4] = {eight.x, eight.y, eight.z, eight.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      float low, high;
      packing.unpack(pairs[i], low, high);
      sums[2 * i] += low;
      sums[2 * i + 1] += high;
    }
  }
  const int64_t row = quotient(first, work.pitch), d = first - row * work.pitch;
  const int64_t key = quotient(row, t.shape[2]), head = row - key * t.shape[2];
  const int64_t batch = quotient(key, t.shape[1]), j = key - batch * t.shape[1];
  const int64_t offset = batch * t.stride[0] + j * t.stride[1] + head * t.stride[2] + d * t.stride[3];
  auto *to = static_cast<uint16_t *>(t.data) + offset;
  const int32_t count = int32_t(min64(8, t.shape[3] - d));
  uint32_t pairs[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) pairs[i] = packing(sums[2 * i], sums[2 * i + 1]);
  if (count == 8 && t.stride[3] == 1 && reinterpret_cast<uintptr_t>(to) % 16 == 0) {
    *reinterpret_cast<uint4 *>(to) = {pairs[0], pairs[1], pairs[2], pairs[3]};
    return;
  }
#pragma unroll
  for (int i = 0; i < 8; ++i)
    if (i < count) to[i * t.stride[3]] = uint16_t(pairs[i / 2] >> 16 * (i % 2));
}

} // namespace

cudaError_t launch_member_sums(const fdm_problem &p, const fdm_backward_args &args, const BackwardRoute &route,
                               void *workspace, cudaStream_t stream) {
  if (!present(args.dk) && !present(args.dv)) return cudaSuccess;
  const MemberSum work{{args.dk, args.dv},
                       {at<uint16_t>(workspace, route.member_keys), at<uint16_t>(workspace, route.member_values)},
                       member_elements(p),
                       member_pitch(p),
                       route.members};
  return launch(sum_members, Grid(route.member_sum_blocks, 2), kThreads, 0, stream, work);
}

} // namespace fdm::cuda
