// SPDX-License-Identifier: BSD-3-Clause
// Writes the rows of a packed batch that belong to no sequence: those before cu_seqlens_q[0] and from its last bound on, as of
// tensors that are padded to a multiple. They keep no key, so out is 0 and lse is -inf.
#include <cuda_runtime.h>

#include <algorithm>

#include "../host/launch.cuh"
#include "forward.h"
#include "ptx/dependent.cuh"

namespace fdm::cuda {
namespace {

constexpr int kThreads = 256;
// Two for each SM of an H100. Most batches have no such rows, and then each block reads two bounds.
constexpr int64_t kMostBlocks = 264;

__global__ void __launch_bounds__(kThreads)
    clear_unused_rows(const __grid_constant__ fdm_problem p, const __grid_constant__ fdm_forward_args a) {
  ptx::start_dependents();
  const int64_t total = total_rows(p), begin = clamp64(cu_bound(p.cu_seqlens_q, 0), 0, total);
  const int64_t end = clamp64(cu_bound(p.cu_seqlens_q, p.batch), begin, total);
  const int64_t dim = a.out.shape[3], count = (begin + total - end) * p.heads * dim;
  for (int64_t number = int64_t(blockIdx.x) * kThreads + threadIdx.x; number < count;
       number += int64_t(gridDim.x) * kThreads) {
    const int64_t of_row = quotient(number, dim), unused = quotient(of_row, p.heads);
    const int64_t d = number - of_row * dim, head = of_row - unused * p.heads;
    const int64_t row = unused < begin ? unused : end + unused - begin;
    static_cast<uint16_t *>(a.out.data)[row * a.out.stride[1] + head * a.out.stride[2] + d * a.out.stride[3]] = 0;
    if (d == 0 && present(a.lse))
      static_cast<float *>(a.lse.data)[head * a.lse.stride[1] + row * a.lse.stride[2]] = -INFINITY;
  }
}

} // namespace

cudaError_t launch_unused_rows(const fdm_problem &p, const fdm_forward_args &args, cudaStream_t stream) {
  const int64_t blocks = ceil_div(total_rows(p) * p.heads * args.out.shape[3], kThreads);
  return launch(clear_unused_rows, std::min(blocks, kMostBlocks), kThreads, 0, stream, p, args);
}

} // namespace fdm::cuda
