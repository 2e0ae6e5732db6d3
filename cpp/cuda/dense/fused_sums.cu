// SPDX-License-Identifier: BSD-3-Clause
// Rounds the float32 sums of the fused kernel to dq, dk and dv, and to dbias; and clears what the next launch adds to.
#include "../host/launch.cuh"
#include "fused_tiles.cuh"
#include "gradient_sums.cuh"
#include "ptx/dependent.cuh"
#include "wide_plan.h"

namespace fdm::cuda {
namespace {

constexpr int kThreads = 256;

FDM_INLINE int64_t bands_of(const GradientSums &sums) { return ceil_div(sums.rows, kSumBandRows); }

// A warp has a band of 16 rows. Tells of sums that are not finite (dense.h).
template <class Element, int kHeadDim>
__device__ void round_sums(const DenseBackward &work, const GradientSums &sums, const fdm_tensor &t, float scale) {
  if (!sums.first) return;
  using Band = SumBand<kHeadDim>;
  constexpr int kTogether = 4; // tiles of columns
  const FusedWork &division = work.fused;
  const int64_t number = int64_t(blockIdx.x) * (kThreads / 32) + threadIdx.x / 32, bands = bands_of(sums);
  const int64_t list = quotient(number, bands), first = (number - list * bands) * kSumBandRows;
  const int64_t batch = quotient(list, t.shape[2]), head = list - batch * t.shape[2];
  if (batch >= division.batches) return;
  const int rows = int(min64(sums.rows - first, kSumBandRows));
  const Band band{halves_of(sums, batch, head, first), sums.row, rows};
  float x[Band::kTiles][4];
  band.load(x);
  __syncwarp(); // rows may be written where other threads have read
  bool finite = true;
  int64_t offset[2];
#pragma unroll
  for (int half = 0; half < 2; ++half)
    offset[half] = (division.first_batch + batch) * t.stride[0] + (first + accumulator_row(half)) * t.stride[1] +
                   head * t.stride[2];
#pragma unroll
  for (int n = 0; n < Band::kTiles; n += kTogether) {
    const auto &together = reinterpret_cast<const float (&)[kTogether][4]>(x[n]);
#pragma unroll
    for (int half = 0; half < 2; ++half)
      if (8 * n < t.shape[3])
        write_row(static_cast<Element *>(t.data) + offset[half] + 8 * n * t.stride[3], t.stride[3],
                  int(t.shape[3]) - 8 * n, together, half, scale, first + accumulator_row(half) < t.shape[1]);
#pragma unroll
    for (int k = 0; k < kTogether; ++k)
#pragma unroll
      for (int i = 0; i < 4; ++i) finite &= fabsf(together[k][i]) < INFINITY;
  }
  if (!finite) *work.odd = 1;
  if (!division.clears) return;
  band.template clear<false>();
  if (division.past_cleared == 0) band.template clear<true>();
  // As many sequences later as have sums now, nobody reads.
  const int64_t later = 2 * int64_t(division.batches) + batch;
  if (later >= division.past_cleared) return;
  char *const start = sums.first + later * sums.batch + head * sums.head + first * sums.row;
  Band{{start, nullptr}, sums.row, rows}.template clear<true>();
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
template <class Element, int kHeadDim>
__global__ void __launch_bounds__(kThreads) fused_sums_kernel(const __grid_constant__ DenseBackward work) {
  ptx::wait_for_kernel_ahead();
  if (*work.odd) return;
  const FusedWork &division = work.fused;
  const fdm_backward_args &a = work.a;
  const float scale = work.call.p.scale;
  if (blockIdx.y == 0) round_sums<Element, kHeadDim>(work, division.dq, a.dq, scale);
  if (blockIdx.y == 1) round_sums<Element, kHeadDim>(work, division.dk, a.dk, scale);
  if (blockIdx.y == 2) round_sums<Element, kHeadDim>(work, division.dv, a.dv, 1.0f);
  if (blockIdx.y == 3) round_dbias<Element>(work);
}

} // namespace

cudaError_t launch_fused_sums(const DenseBackward &work, bool with_dbias, cudaStream_t stream) {
  const fdm_problem &p = work.call.p;
  const FusedWork &division = work.fused;
  const int64_t bands = division.batches * max64(p.heads * bands_of(division.dq),
                                                 p.kv_heads * max64(bands_of(division.dk), bands_of(division.dv)));
  const int64_t tiles = int64_t(division.units) * division.row_tiles * division.key_tiles;
  const int64_t blocks = ceil_div(bands, kThreads / 32);
  const Grid grid = with_dbias ? Grid(max64(blocks, tiles * (kWideTileQuads / kThreads)), 4) : Grid(blocks, 3);
  return with_wide_types(p, [&](auto element, auto dim) {
    return launch<Overlap::kernel_ahead>(fused_sums_kernel<typename decltype(element)::Type, decltype(dim)::value>,
                                         grid, kThreads, 0, stream, work);
  });
}

} // namespace fdm::cuda
