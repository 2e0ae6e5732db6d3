// SPDX-License-Identifier: BSD-3-Clause
// Rounds the float32 sums of dq, times the scale, to dq: a warp for each band of 16 rows of a head.
#include <cuda_runtime.h>

#include "../host/launch.cuh"
#include "../ptx/dependent.cuh"
#include "../tile/products.cuh"
#include "query_sums.cuh"

namespace fdm::cuda {
namespace {

constexpr int kThreads = 256;

// The sequence whose tiles a row of the sums belongs to, if to any: the last one that begins there or before.
__device__ int64_t sequence_of(const fdm_problem &p, int32_t tile_rows, int64_t row) {
  int64_t first = 0, past = p.batch;
  while (past - first > 1) {
    const int64_t middle = (first + past) / 2;
    if (first_query_sum(p, tile_rows, sequence(p, middle).q_begin, middle) <= row)
      first = middle;
    else
      past = middle;
  }
  return first;
}

// The four threads of a quad have four numbers each; thread i gives number j to thread j, and gets the i-th of each.
__device__ void transpose(uint32_t (&x)[4]) {
  const int lane = threadIdx.x;
#pragma unroll
  for (int distance = 1; distance < 4; distance *= 2) {
    const bool upper = lane & distance;
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      if (n & distance) continue;
      uint32_t &low = x[n], &high = x[n + distance];
      const uint32_t other = __shfl_xor_sync(0xffffffffu, upper ? low : high, distance);
      (upper ? low : high) = other;
    }
  }
}

// Writes eight neighbours of a row, of 16 bits each.
__device__ void write(const fdm_tensor &t, int64_t offset, int column, int head_dim, bool aligned,
                      const uint32_t (&pairs)[4]) {
  auto *row = static_cast<uint16_t *>(t.data) + offset;
  if (aligned) {
    if (column < head_dim)
      *reinterpret_cast<uint4 *>(row + column) = make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
    return;
  }
#pragma unroll
  for (int i = 0; i < 8; ++i)
    if (column + i < head_dim) row[(column + i) * t.stride[3]] = uint16_t(pairs[i / 2] >> (16 * (i % 2)));
}

template <class Element>
__global__ void __launch_bounds__(kThreads)
    round_query_sums(const __grid_constant__ BackwardParams params, bool aligned) {
  ptx::wait_for_kernel_ahead();
  const fdm_problem &p = params.p;
  const fdm_tensor &t = params.a.dq;
  const QuerySums &sums = params.query_sums;
  const int64_t number = int64_t(blockIdx.x) * (kThreads / 32) + threadIdx.x / 32, bands = sums.head_rows / kBandRows;
  const int64_t row_of_heads = quotient(number, bands), batch = quotient(row_of_heads, p.heads);
  const int64_t head = row_of_heads - batch * p.heads;
  if (batch >= (is_varlen(p) ? 1 : p.batch)) return;
  const int64_t first = (number - row_of_heads * bands) * kBandRows;
  const int64_t sequence_index = is_varlen(p) ? sequence_of(p, sums.tile_rows, first) : batch;
  const Sequence s = sequence(p, sequence_index);
  const int quad = threadIdx.x % 32 / 4;
  const int64_t row = first - first_query_sum(p, sums.tile_rows, s.q_begin, sequence_index) + quad;
  const auto *band = reinterpret_cast<const float4 *>(sums.data + number * kBandRows * sums.dim);
  // A quad has the columns of four tiles, which its threads then write, a tile each.
  const int lane = threadIdx.x % 32, tiles = sums.dim / 8;
#pragma unroll 2
  for (int first_tile = 0; first_tile < tiles; first_tile += 4) {
    uint32_t pairs[2][4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float4 x = band[(first_tile + i) * 32 + lane];
      pairs[0][i] = ptx::pack<Element>(p.scale * x.x, p.scale * x.y);
      pairs[1][i] = ptx::pack<Element>(p.scale * x.z, p.scale * x.w);
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      transpose(pairs[half]);
      if (row >= 0 && row + 8 * half < s.q_count)
        write(t, row_offset(t, s, row + 8 * half, head), 8 * (first_tile + lane % 4), int(p.head_dim), aligned,
              pairs[half]);
    }
  }
}

} // namespace

cudaError_t launch_query_sums(const BackwardParams &params, cudaStream_t stream) {
  const fdm_problem &p = params.p;
  const int64_t bands = query_sum_count(p, params.query_sums) / (kBandRows * params.query_sums.dim);
  const auto kernel = p.q.dtype == FDM_FLOAT16 ? round_query_sums<__half> : round_query_sums<__nv_bfloat16>;
  return launch<Overlap::kernel_ahead>(kernel, ceil_div(bands, kThreads / 32), kThreads, 0, stream, params,
                                       rows_are_aligned(params.a.dq, p.head_dim));
}

} // namespace fdm::cuda
