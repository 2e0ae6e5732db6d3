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
  fdm_tensor t;
  const float *data;
  float scale;
  int64_t rows; // of a head, whole tiles
};

struct SumsOfAll {
  Sums sums[3]; // of dq, dk and dv
  int64_t first_batch, batches;
  int dim; // of the sums
  int head_dim;
  const uint32_t *odd;
};

// A warp has a band of 16 rows; a row of this grid has a gradient.
template <class Element>
__global__ void __launch_bounds__(kThreads) fused_sums_kernel(const __grid_constant__ SumsOfAll all) {
  if (*all.odd) return;
  const Sums &sums = all.sums[blockIdx.y];
  if (!sums.data) return;
  const fdm_tensor &t = sums.t;
  const int64_t number = int64_t(blockIdx.x) * (kThreads / 32) + threadIdx.x / 32, bands = sums.rows / kBandRows;
  const int64_t list = quotient(number, bands), first = (number - list * bands) * kBandRows;
  const int64_t batch = quotient(list, t.shape[2]), head = list - batch * t.shape[2];
  if (batch >= all.batches) return;
  const float *band = sums.data + number * kBandRows * all.dim;
  round_band<Element>(band, all.dim, sums.scale, t, all.head_dim, [&](int row) -> int64_t {
    if (first + row >= t.shape[1]) return -1;
    return (all.first_batch + batch) * t.stride[0] + (first + row) * t.stride[1] + head * t.stride[2];
  });
}

// A thread has four numbers of a tile.
template <class Element>
__global__ void __launch_bounds__(kThreads) fused_dbias_kernel(const __grid_constant__ DenseBackward work) {
  if (*work.odd) return;
  const FusedWork &division = work.fused;
  const int64_t number = int64_t(blockIdx.x) * kThreads + threadIdx.x, tile = number / kWideTileQuads;
  const auto tiles = int64_t(division.row_tiles) * division.key_tiles, unit = quotient(tile, tiles);
  const int64_t place = tile - unit * tiles, row_tile = quotient(place, division.key_tiles);
  store_quad<Element>(work,
                      {division.first_unit + int(unit), int(row_tile), int(place - row_tile * division.key_tiles)},
                      int(number % kWideTileQuads), reinterpret_cast<const float4 *>(division.dbias)[number]);
}

} // namespace

cudaError_t launch_fused_sums(const DenseBackward &work, cudaStream_t stream) {
  const fdm_problem &p = work.call.p;
  const FusedWork &division = work.fused;
  const auto sums_of = [&](const fdm_tensor &t, const float *data, float scale, int64_t rows) {
    return Sums{t, data, scale, rows};
  };
  const SumsOfAll all{{sums_of(work.a.dq, division.dq, p.scale, division.sum_rows()),
                       sums_of(work.a.dk, division.dk, p.scale, division.sum_keys()),
                       sums_of(work.a.dv, division.dv, 1.0f, division.sum_keys())},
                      division.first_batch,
                      division.batches,
                      division.dim,
                      int(p.head_dim),
                      work.odd};
  const int64_t rows = max64(p.heads * division.sum_rows(), p.kv_heads * division.sum_keys());
  const auto kernel = p.q.dtype == FDM_FLOAT16 ? fused_sums_kernel<__half> : fused_sums_kernel<__nv_bfloat16>;
  return launch(kernel, Grid(ceil_div(division.batches * rows / kBandRows, kThreads / 32), 3), kThreads, 0, stream,
                all);
}

cudaError_t launch_fused_dbias(const DenseBackward &work, cudaStream_t stream) {
  const FusedWork &division = work.fused;
  const int64_t tiles = int64_t(division.units) * division.row_tiles * division.key_tiles;
  const auto kernel =
      work.call.p.q.dtype == FDM_FLOAT16 ? fused_dbias_kernel<__half> : fused_dbias_kernel<__nv_bfloat16>;
  return launch(kernel, tiles * (kWideTileQuads / kThreads), kThreads, 0, stream, work);
}

} // namespace fdm::cuda
