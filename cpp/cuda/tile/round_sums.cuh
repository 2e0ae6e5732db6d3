// SPDX-License-Identifier: BSD-3-Clause
// The kernel that rounds float32 sums to gradients. Each warp has a band of 16 rows and holds it as accumulators of
// 8-column tiles (ptx/matrix.cuh). `Bands` gives access to the sums:
//   Params                      the kernel's parameters
//   kTilesAtOnce                the tiles that are loaded before any of them is written
//   kBlocks                     the thread blocks on an SM that registers must allow
//   Bands(params, n)            band n, constructed once per warp; waits for the kernel ahead if it reads its results
//   tiles()                     the number of its tiles: 0 if there is no such band
//   load(first tile, sums), store(first tile, sums)
//   end(finite)                 receives whether all sums of this thread are finite
#pragma once

#include "../host/launch.cuh"
#include "../route/helper_work.h"
#include "products.cuh"
#include "ptx/dependent.cuh"

namespace fdm::cuda {

// The offsets of this thread's two rows of a band in t; -1: there is no such row.
struct BandRows {
  int64_t offset[2];

  template <class RowOffset> __device__ __forceinline__ void find(const RowOffset &row_offset) {
#pragma unroll
    for (int half = 0; half < 2; ++half) offset[half] = row_offset(accumulator_row(half));
  }

  template <int kTiles>
  __device__ __forceinline__ void store(const fdm_tensor &t, float scale, int first,
                                        const float (&sums)[kTiles][4]) const {
    const int column = 8 * first, head_dim = int(t.shape[3]);
    if (column >= head_dim) return;
#pragma unroll
    for (int half = 0; half < 2; ++half)
      write_row(static_cast<uint16_t *>(t.data) + offset[half] + column * t.stride[3], t.stride[3], head_dim - column,
                sums, half, scale, offset[half] >= 0, false, AnyPacking{t.dtype == FDM_FLOAT16});
  }
};

// A band of dk or dv whose rows are addressed separately. blockIdx.y selects dk (0) or dv (1).
struct KeyBand {
  const float *sums[2]; // of this thread's two rows, where they exist
  BandRows rows{{-1, -1}};

  __device__ static bool is_dv() { return blockIdx.y == 1; }
  __device__ static const fdm_tensor &gradient(const fdm_backward_args &a) { return is_dv() ? a.dv : a.dk; }

  // A thread loads four consecutive floats of two column tiles, as the kernels that add to the sums write them.
  template <int kTiles> __device__ void load(int first, float (&x)[kTiles][4]) const {
#pragma unroll
    for (int half = 0; half < 2; ++half)
#pragma unroll
      for (int n = 0; n < kTiles; n += 2) {
        const auto *quads = reinterpret_cast<const float4 *>(sums[half]) + threadIdx.x % 4;
        const float4 quad = rows.offset[half] >= 0 ? quads[(first + n) * 2] : float4{};
        x[n][2 * half] = quad.x;
        x[n][2 * half + 1] = quad.y;
        x[n + 1][2 * half] = quad.z;
        x[n + 1][2 * half + 1] = quad.w;
      }
  }
  template <int kTiles>
  __device__ void store(const fdm_backward_args &a, float scale, int first, const float (&x)[kTiles][4]) const {
    rows.store(gradient(a), is_dv() ? 1.0f : scale, first, x);
  }
};

template <class Bands>
__global__ void __launch_bounds__(kRoundingThreads, Bands::kBlocks)
    round_sums(const __grid_constant__ typename Bands::Params params) {
  constexpr int kTilesAtOnce = Bands::kTilesAtOnce;
  ptx::start_dependents();
  const Bands band(params, int64_t(blockIdx.x) * (kRoundingThreads / 32) + threadIdx.x / 32);
  ptx::wait_for_kernel_ahead();
  const int tiles = band.tiles();
  bool finite = true;
#pragma unroll 1
  for (int first = 0; first < tiles; first += kTilesAtOnce) {
    float sums[kTilesAtOnce][4];
    band.load(first, sums);
    __syncwarp(); // other threads of the warp may have read the rows that are overwritten
    band.store(first, sums);
    for_accumulators(sums, [&](int k, int i) { finite &= fabsf(sums[k][i]) < INFINITY; });
  }
  if (tiles > 0) band.end(finite);
}

} // namespace fdm::cuda
