// SPDX-License-Identifier: BSD-3-Clause
// Rounds the float32 sums of the fused kernel to dq, dk, dv and dbias, and clears the sums of the next launch.
#include "../tile/round_sums.cuh"
#include "fused.h"
#include "fused_tiles.cuh"
#include "gradient_sums.cuh"

namespace fdm::cuda {
namespace {

FDM_INLINE int64_t bands_of(const GradientSums &sums) { return ceil_div(sums.rows, kBandRows); }
// Bands per tile of dbias. A band has this many tiles of 8 columns.
constexpr int dbias_bands(int column_tiles) { return kTileQuadsSm90 / (column_tiles * 32); }

// Each row of the grid has one gradient: dq, dk, dv, and dbias if its sums are complete. Sets `non_finite` if a sum
// of dq, dk or dv is non-finite (pair_bias.h).
template <int kHeadDim> struct FusedBands {
  using Params = PairBiasBackward;
  using Band = SumBand<kHeadDim>;
  static constexpr int kTilesAtOnce = Band::kTiles; // all: rows are written over their own sums
  static constexpr int kBlocks = kTilesAtOnce <= 8 ? 3 : 2;

  const PairBiasBackward &work;
  BandRows rows;
  Band band;
  int64_t later; // byte offset from sums().first of a band that a later launch adds to; 0: none
  FusedDbiasTile tile;
  int first_quad; // this thread's first in a tile of dbias
  bool exists = false;

  __device__ static bool of_dbias() { return blockIdx.y == 3; }
  __device__ const fdm_tensor &gradient() const {
    return blockIdx.y == 0 ? work.a.dq : blockIdx.y == 1 ? work.a.dk : work.a.dv;
  }
  __device__ const GradientSums &sums() const {
    return blockIdx.y == 0 ? work.fused.dq : blockIdx.y == 1 ? work.fused.dk : work.fused.dv;
  }

  __device__ FusedBands(const PairBiasBackward &work_, int64_t number) : work(work_) {
    ptx::wait_for_kernel_ahead();
    if (*work.non_finite) return;
    if (of_dbias())
      find_dbias(number);
    else if (sums().first)
      find(number);
  }
  __device__ void find_dbias(int64_t number) {
    const FusedWork &division = work.fused;
    constexpr int kBands = dbias_bands(kTilesAtOnce);
    const int64_t all = number / kBands, tiles = int64_t(division.row_tiles) * division.key_tiles;
    const int64_t plane = quotient(all, tiles), place = all - plane * tiles,
                  row_tile = quotient(place, division.key_tiles);
    tile = {division.first_plane + int(plane), int(row_tile), int(place - row_tile * division.key_tiles)};
    first_quad = int(number % kBands) * kTilesAtOnce * 32 + int(threadIdx.x % 32);
    exists = plane < division.planes;
  }
  __device__ void find(int64_t number) {
    const FusedWork &division = work.fused;
    const GradientSums &all = sums();
    const fdm_tensor &t = gradient();
    const int64_t bands = bands_of(all), list = quotient(number, bands), first = (number - list * bands) * kBandRows;
    const int64_t batch = quotient(list, t.shape[2]), head = list - batch * t.shape[2];
    exists = batch < division.batches;
    if (!exists) return;
    band = {halves_of(all, batch, head, first), all.row, int(min64(all.rows - first, kBandRows))};
    rows.find([&](int row) -> int64_t {
      if (first + row >= t.shape[1]) return -1;
      return (division.first_batch + batch) * t.stride[0] + (first + row) * t.stride[1] + head * t.stride[2];
    });
    // No thread of this launch reads the sums of sequences 2 * batches later.
    const int64_t later_batch = 2 * int64_t(division.batches) + batch;
    later = later_batch < division.past_cleared ? later_batch * all.batch + head * all.head + first * all.row : 0;
  }

  __device__ int tiles() const { return exists ? kTilesAtOnce : 0; }
  __device__ float4 &dbias_quad(int n) const {
    return reinterpret_cast<float4 *>(
        work.fused.dbias)[dbias_tile_number(work.fused, tile) * kTileQuadsSm90 + first_quad + n * 32];
  }
  __device__ void load(int, float (&x)[kTilesAtOnce][4]) const {
    if (!of_dbias()) return band.load(x);
#pragma unroll
    for (int n = 0; n < kTilesAtOnce; ++n) reinterpret_cast<float4 &>(x[n]) = dbias_quad(n);
  }
  __device__ void store(int first, const float (&x)[kTilesAtOnce][4]) const {
    if (!of_dbias()) return rows.store(gradient(), blockIdx.y == 2 ? 1.0f : work.call.p.scale, first, x);
#pragma unroll
    for (int n = 0; n < kTilesAtOnce; ++n) {
      store_quad<uint16_t>(work, tile, first_quad + n * 32, reinterpret_cast<const float4 &>(x[n]),
                           AnyPacking{work.a.dbias.dtype == FDM_FLOAT16});
      if (work.fused.clears_sums) dbias_quad(n) = {};
    }
  }
  __device__ void end(bool finite) const {
    if (of_dbias()) return;
    if (!finite) *work.non_finite = 1;
    if (!work.fused.clears_sums) return;
    band.template clear<SumHalf::second>();
    if (work.fused.past_cleared == 0) band.template clear<SumHalf::first>();
    if (later) Band{{sums().first + later, nullptr}, band.pitch, band.rows}.template clear<SumHalf::first>();
  }
};

} // namespace

cudaError_t launch_fused_sums(const PairBiasBackward &work, bool with_dbias, cudaStream_t stream) {
  const fdm_problem &p = work.call.p;
  const FusedWork &division = work.fused;
  const int64_t bands = division.batches * max64(p.heads * bands_of(division.dq),
                                                 p.kv_heads * max64(bands_of(division.dk), bands_of(division.dv)));
  return with_sm90_types(p, [&](auto, auto dim) {
    using Bands = FusedBands<decltype(dim)::value>;
    const int64_t all = with_dbias ? max64(bands, division.tiles() * dbias_bands(Bands::kTilesAtOnce)) : bands;
    return launch<Overlap::kernel_ahead>(round_sums<Bands>, {rounding_blocks(all), with_dbias ? 4 : 3},
                                         kRoundingThreads, 0, stream, work);
  });
}

} // namespace fdm::cuda
