// SPDX-License-Identifier: BSD-3-Clause
// Rounds the float32 sums of the fused kernel to dq, dk and dv, and to dbias.
#include "../backward/sum_bands.cuh"
#include "../host/launch.cuh"
#include "fused_tiles.cuh"

namespace fdm::cuda {
namespace {

constexpr int kThreads = 256, kBandRows = 16;

// The sums of one gradient.
struct Sums {
  const fdm_tensor &t;
  float *data; // null: not wanted
  float scale;
  int64_t rows; // of a head, whole tiles
};

// A warp has a band of 16 rows. Tells of sums that are not finite (dense.h).
template <class Element> __device__ void round_sums(const DenseBackward &work, const Sums &sums) {
  if (!sums.data) return;
  const FusedWork &division = work.fused;
  const fdm_tensor &t = sums.t;
  const int64_t number = int64_t(blockIdx.x) * (kThreads / 32) + threadIdx.x / 32, bands = sums.rows / kBandRows;
  const int64_t list = quotient(number, bands), first = (number - list * bands) * kBandRows;
  const int64_t batch = quotient(list, t.shape[2]), head = list - batch * t.shape[2];
  if (batch >= division.batches) return;
  float *band = sums.data + number * kBandRows * division.dim;
  const bool finite =
      round_band<Element>(band, division.dim, sums.scale, t, int(work.call.p.head_dim), [&](int row) -> int64_t {
        if (first + row >= t.shape[1]) return -1;
        return (division.first_batch + batch) * t.stride[0] + (first + row) * t.stride[1] + head * t.stride[2];
      });
  if (!finite) *work.odd = 1;
  if (division.clears)
    for (int i = threadIdx.x % 32; i < kBandRows * division.dim / 4; i += 32) reinterpret_cast<float4 *>(band)[i] = {};
}

// A thread has four numbers of a tile.
template <class Element> __device__ void round_dbias(const DenseBackward &work) {
  const FusedWork &division = work.fused;
  const int64_t number = int64_t(blockIdx.x) * kThreads + threadIdx.x, tile = number / kWideTileQuads;
  const auto tiles = int64_t(division.row_tiles) * division.key_tiles, unit = quotient(tile, tiles);
  if (unit >= division.units) return;
  const int64_t place = tile - unit * tiles, row_tile = quotient(place, division.key_tiles);
  float4 &sums = reinterpret_cast<float4 *>(division.dbias)[number];
  store_quad<Element>(work,
                      {division.first_unit + int(unit), int(row_tile), int(place - row_tile * division.key_tiles)},
                      int(number % kWideTileQuads), sums);
  if (division.clears) sums = {};
}

// A row of this grid has a gradient: dq, dk, dv, and dbias where its sums are complete.
template <class Element>
__global__ void __launch_bounds__(kThreads) fused_sums_kernel(const __grid_constant__ DenseBackward work) {
  if (*work.odd) return;
  const FusedWork &division = work.fused;
  const fdm_backward_args &a = work.a;
  if (blockIdx.y == 0) round_sums<Element>(work, {a.dq, division.dq, work.call.p.scale, division.sum_rows()});
  if (blockIdx.y == 1) round_sums<Element>(work, {a.dk, division.dk, work.call.p.scale, division.sum_keys()});
  if (blockIdx.y == 2) round_sums<Element>(work, {a.dv, division.dv, 1.0f, division.sum_keys()});
  if (blockIdx.y == 3) round_dbias<Element>(work);
}

} // namespace

cudaError_t launch_fused_sums(const DenseBackward &work, bool with_dbias, cudaStream_t stream) {
  const fdm_problem &p = work.call.p;
  const FusedWork &division = work.fused;
  const int64_t rows = max64(p.heads * division.sum_rows(), p.kv_heads * division.sum_keys());
  const int64_t tiles = int64_t(division.units) * division.row_tiles * division.key_tiles;
  const int64_t blocks = division.windows ? 0 : ceil_div(division.batches * rows / kBandRows, kThreads / 32);
  const auto kernel = p.q.dtype == FDM_FLOAT16 ? fused_sums_kernel<__half> : fused_sums_kernel<__nv_bfloat16>;
  const Grid grid = with_dbias ? Grid(max64(blocks, tiles * (kWideTileQuads / kThreads)), 4) : Grid(blocks, 3);
  return launch(kernel, grid, kThreads, 0, stream, work);
}

} // namespace fdm::cuda
