// SPDX-License-Identifier: BSD-3-Clause
// Adds the parts of tiles of the bias gradient that several blocks of threads have worked on, in the order of the blocks.
// A row of this grid stands for the boundary before a block; the first boundary inside of a tile adds the tile's parts.
#include "../host/launch.cuh"
#include "dbias_tiles.cuh"

namespace fdm::cuda {
namespace {

constexpr int kThreads = 256;

// Asked for one block on an SM, the compiler spills no registers to make room for a fifth.
template <class Element>
__global__ void __launch_bounds__(kThreads, 1) dbias_sum_kernel(const __grid_constant__ DenseBackward work) {
  if (is_superseded(work)) return;
  const DbiasWork &division = work.dbias;
  const int64_t boundary = int64_t(blockIdx.x) + 1, inside = first_step(division, boundary);
  const int64_t number = inside / division.groups, first = number * division.groups;
  if (inside == first || inside >= division.steps || first_step(division, boundary - 1) > first) return;
  // The block before the boundary has the tile's beginning.
  const DbiasTile tile(work, number);
  const bool only = first_step(division, boundary - 1) == first; // the tile is also the first of its block
  const auto part = [&](int64_t slot) {
    return reinterpret_cast<const float2 *>(division.parts + slot * division.tile_rows * division.tile_keys);
  };
  const auto sum = [&](int i) {
    float2 total = part(2 * (boundary - 1) + (only ? 0 : 1))[i];
    for (int64_t b = boundary; b < division.blocks && first_step(division, b) < first + division.groups; ++b) {
      const float2 other = part(2 * b)[i];
      total.x += other.x;
      total.y += other.y;
    }
    return total;
  };
  store_dbias<Element>(work, tile, int(blockIdx.y * kThreads + threadIdx.x), int(gridDim.y) * kThreads, sum);
}

} // namespace

cudaError_t launch_dense_dbias_sum(const DenseBackward &work, cudaStream_t stream) {
  const auto kernel = work.call.p.q.dtype == FDM_FLOAT16 ? dbias_sum_kernel<__half> : dbias_sum_kernel<__nv_bfloat16>;
  return launch(kernel, Grid(work.dbias.blocks - 1, 8), kThreads, 0, stream, work);
}

} // namespace fdm::cuda
