// SPDX-License-Identifier: BSD-3-Clause
// What the Hopper kernels of dense blocks have in common: tiles of 128 rows, and the copies that fill them.
#pragma once

#include "../../tile/sm90/panel_tile.cuh"
#include "../../tile/sm90/roles.cuh"
#include "../sources.cuh"

namespace fdm::cuda::sm90 {

// Two tensors in shared memory, 128 rows of each. Those of 32 columns lie side by side in a panel of 64.
template <int kHeadDim> struct TilePair {
  static constexpr bool kPaired = kHeadDim == 32;
  static_assert(kPaired || kHeadDim == 64);
  using Tile = PanelTile<64, kWideTile>;
  static constexpr int kChunks = kHeadDim / 8, kBytes = kPaired ? Tile::kBytes : 2 * Tile::kBytes;

  __device__ static __forceinline__ uint32_t chunk_address(uint32_t base, int which, int row, int chunk) {
    return Tile::chunk_address(kPaired ? base : base + which * Tile::kBytes, row,
                               chunk + (kPaired ? which * kChunks : 0));
  }
  __device__ static __forceinline__ uint64_t descriptor(uint32_t base, int which) {
    constexpr uint64_t kSecond = kPaired ? Tile::offset(0, 32) : uint64_t(Tile::kBytes >> 4);
    return Tile::descriptor(base) + which * kSecond;
  }
};

// Does a source keep a key, as far as a mask of keys tells?
__device__ __forceinline__ bool keeps_key(const fdm_problem &p, const Source &source, int64_t key) {
  if (key >= p.keys) return false;
  if (mask_kind(p) != FDM_MASK_KEYS) return true;
  const Matrix mask = score_matrix(p, p.mask, dense_sequence(p, source.batch), source.head, 1);
  return static_cast<const uint8_t *>(mask.base)[key * mask.col] != 0;
}

// A producer warp copies its 32 of 128 rows of a tensor from row `first` on to a tile of a pair, those of which bit r of
// `there` is set; the others, and columns from head_dim on, become zeros.
template <class Pair>
__device__ __forceinline__ void copy_wide_rows(const fdm_tensor &t, int64_t head_dim, const char *tile, int which,
                                               int64_t batch, int64_t head, int64_t first, uint32_t there) {
  constexpr int kRows = kWideTile / Roles::kProducerWarps, kChunks = Pair::kChunks, kStepRows = 32 / kChunks;
  static_assert(kRows == 32);
  const int lane = threadIdx.x % 32, warp = Roles::producer_thread() / 32, chunk = lane % kChunks;
  const uint16_t *row = static_cast<const uint16_t *>(t.data) + batch * t.stride[0] + head * t.stride[2] +
                        (first + kRows * warp + lane / kChunks) * t.stride[1] + chunk * 8;
  const uint32_t base = ptx::shared_address(tile);
  const bool inside = chunk * 8 < head_dim;
#pragma unroll
  for (int step = 0; step < kRows; step += kStepRows) {
    const int r = step + lane / kChunks;
    ptx::cp_async_16(Pair::chunk_address(base, which, kRows * warp + r, chunk), row, inside && there >> r & 1);
    row += kStepRows * t.stride[1];
  }
}

} // namespace fdm::cuda::sm90
