// SPDX-License-Identifier: BSD-3-Clause
// The tile table of the dense kernels, beside that of tile/tile_sizes.cuh.
#pragma once

#include "../tile/tile_sizes.cuh"

namespace fdm::cuda {

// Shared memory of a dense kernel beside its tiles, at most, and what that leaves.
constexpr int kDenseStatic = 4 * 1024, kMostShared = shared_limit(FDM_TILE_ARCH) - kDenseStatic;

// Tiles of 16 rows or keys of a warp, warps, and blocks for which an SM must have registers. There are two stages of copies
// where shared memory has room for them.
struct DenseTileChoice {
  int tiles, warps, blocks;
};

constexpr DenseTileChoice dense_forward_tile(int head_dim) {
  // With 32 rows a warp, a fragment of K or V is read from shared memory once and serves two products. Larger heads leave
  // the registers for 16.
  if (head_dim <= 32) return {2, 4, 3};
  return {1, 4, head_dim <= 64 ? 4 : 2};
}

constexpr DenseTileChoice dense_dq_tile(int head_dim) {
  if (head_dim <= 32) return {2, 4, 3};
  return {1, 4, head_dim <= 64 ? 3 : 2};
}

constexpr DenseTileChoice dense_dkdv_tile(int head_dim) {
  if (head_dim <= 32) return {2, 4, 3};
  // The accumulators of dk and dv and of two products leave no registers for a third block.
  return head_dim <= 64 ? DenseTileChoice{2, 4, 2} : DenseTileChoice{1, 4, 1};
}

// Warps of the gradient of a bias. The tile has 2048 elements for each.
constexpr int dbias_warps(int arch, int head_dim) {
  const bool small_shared = shared_limit(arch) < 100 * 1024;
  if (head_dim <= 64) return small_shared ? 4 : 8;
  return small_shared ? 2 : 4;
}

} // namespace fdm::cuda
