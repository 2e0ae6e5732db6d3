// SPDX-License-Identifier: BSD-3-Clause
// The tile table of the dense kernels, beside that of tile/tile_sizes.cuh.
#pragma once

#include "../tile/tile_sizes.cuh"

namespace fdm::cuda {

// Tiles of 16 rows or keys of a warp, warps, stages of copies, and blocks for which an SM must have registers.
struct DenseTileChoice {
  int tiles, warps, stages, blocks;
};

constexpr DenseTileChoice dense_forward_tile(int arch, int head_dim) {
  const bool small_shared = shared_limit(arch) < 100 * 1024;
  // With 32 rows a warp, a fragment of K or V is read from shared memory once and serves two products.
  if (head_dim <= 64) return {2, 4, 2, 3};
  if (head_dim <= 128) return {1, 4, small_shared ? 1 : 2, 2};
  return {1, 4, 1, 1};
}

constexpr DenseTileChoice dense_dq_tile(int arch, int head_dim) {
  const bool small_shared = shared_limit(arch) < 100 * 1024;
  if (head_dim <= 32) return {2, 4, 2, 3};
  if (head_dim <= 64) return {2, 4, small_shared ? 1 : 2, 2};
  if (head_dim <= 128) return {1, 4, small_shared ? 1 : 2, 2};
  return {1, small_shared ? 2 : 4, 1, 1};
}

constexpr DenseTileChoice dense_dkdv_tile(int arch, int head_dim) {
  const bool small_shared = shared_limit(arch) < 100 * 1024;
  if (head_dim <= 32) return {2, 4, 2, 2};
  if (head_dim <= 64) return {2, 4, small_shared ? 1 : 2, 2};
  if (head_dim <= 128) return {1, 4, small_shared ? 1 : 2, 1};
  return {1, small_shared ? 2 : 4, 1, 1};
}

// Warps and stages of the gradient of a bias. The tile has 2048 elements for each warp.
struct DbiasTileChoice {
  int warps, stages;
};

constexpr DbiasTileChoice dbias_tile(int arch, int head_dim) {
  const bool small_shared = shared_limit(arch) < 100 * 1024;
  if (head_dim <= 32) return {small_shared ? 4 : 8, 2};
  if (head_dim <= 64) return {small_shared ? 4 : 8, shared_limit(arch) > 200 * 1024 ? 2 : 1};
  return {small_shared ? 2 : 4, 1};
}

} // namespace fdm::cuda
