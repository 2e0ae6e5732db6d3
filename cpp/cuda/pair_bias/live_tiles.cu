// SPDX-License-Identifier: BSD-3-Clause
// Finds the live tiles of a row mask: those with a kept pair. Most tiles are decided by their first rows, so most of
// the mask is not read.
#include "../host/launch.cuh"
#include "ptx/dependent.cuh"
#include "sources.cuh"

namespace fdm::cuda {
namespace {

constexpr int kWarps = 32, kThreads = 32 * kWarps; // one tile per warp
constexpr int kThreadsPerRow = kPairBiasTileSm90 / 16,
              kRowsAtOnce = 32 / kThreadsPerRow; // the lanes of a row, and the rows of a load
constexpr int kReadsAtOnce = 4;                  // loads in flight per lane

// Returns nonzero if a row keeps one of 16 keys, of which the first `there` exist.
__device__ __forceinline__ uint32_t keeps_some(const uint8_t *kept, int there) {
  uint32_t some = 0;
  if (there >= 16) {
    const uint4 bytes = *reinterpret_cast<const uint4 *>(kept);
    some = bytes.x | bytes.y | bytes.z | bytes.w;
  } else {
    for (int i = 0; i < there; ++i) some |= kept[i];
  }
  return some;
}

// Whether the tile that begins at this row and key is live. All lanes of a warp call this.
__device__ __forceinline__ bool is_live_tile(const fdm_problem &p, const Matrix &mask, int first_row, int first_key) {
  const int lane = int(threadIdx.x) % 32, key = first_key + lane % kThreadsPerRow * 16, there = int(p.keys) - key;
  const int rows = min(kPairBiasTileSm90, int(p.queries) - first_row);
  const auto *tile_mask = static_cast<const uint8_t *>(mask.base) + int64_t(first_row) * mask.row + key;
#pragma unroll 1
  for (int first = lane / kThreadsPerRow; first - lane / kThreadsPerRow < rows; first += kReadsAtOnce * kRowsAtOnce) {
    uint32_t some = 0;
#pragma unroll
    for (int n = 0; n < kReadsAtOnce; ++n) {
      const int row = first + n * kRowsAtOnce;
      if (row < rows && there > 0) some |= keeps_some(tile_mask + row * mask.row, there);
    }
    if (__any_sync(0xffffffffu, some != 0)) return true;
  }
  return false;
}

// A thread block makes a word: 32 key tiles of a row tile.
__global__ void __launch_bounds__(kThreads)
    live_tiles_kernel(const __grid_constant__ PairBiasCall call, LiveTiles live) {
  ptx::start_dependents();
  const fdm_problem &p = call.p;
  __shared__ uint32_t word;
  if (threadIdx.x == 0) word = 0;
  __syncthreads();
  const int words = live.row_tiles * live.row_words, plane = int(blockIdx.x) / words, place = int(blockIdx.x) % words;
  const int number = place % live.row_words, row_tile = place / live.row_words;
  const Source source = source_of(call, plane, 0);
  const Matrix mask = score_matrix(p, p.mask, pair_bias_sequence(p, source.batch), source.head, 1);
  const int past = visible_key_tiles(p, row_tile);
  const int bit = int(threadIdx.x) / 32, tile = kWarps * number + bit;
  if (tile < past && is_live_tile(p, mask, row_tile * kPairBiasTileSm90, tile * kPairBiasTileSm90) &&
      threadIdx.x % 32 == 0)
    atomicOr(&word, 1u << bit);
  __syncthreads();
  if (threadIdx.x == 0) live.words[blockIdx.x] = word;
}

} // namespace

cudaError_t launch_live_tiles(const PairBiasCall &call, const LiveTiles &live, cudaStream_t stream) {
  const fdm_problem &p = call.p;
  // A one-dimensional grid has room for more bias heads: grid.y is at most 65535.
  const int64_t words = int64_t(live.row_tiles) * live.row_words * p.bias.shape[0] * p.bias.shape[1];
  return launch(live_tiles_kernel, Grid(words), kThreads, 0, stream, call, live);
}

} // namespace fdm::cuda
