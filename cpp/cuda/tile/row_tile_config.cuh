// SPDX-License-Identifier: BSD-3-Clause
// The sizes of an mma.sync kernel whose thread blocks each have a tile of query rows of one head.
#pragma once

#include "../plan/plan.cuh"
#include "smem_tile.cuh"
#include "tile_sizes.cuh"

namespace fdm::cuda {

template <class ElementType, int kHeadDimension, int kRowCount, int kColumnCount, int kWarpCount, int kBlockCount,
          TileKind kKind>
struct RowTileConfig {
  using Element = ElementType;
  static constexpr int kHeadDim = kHeadDimension, kRows = kRowCount, kColumns = kColumnCount, kWarps = kWarpCount;
  static constexpr bool kGeneral = kKind == TileKind::general;
  static constexpr int kThreads = 32 * kWarps, kBlocks = kBlockCount; // kBlocks is the least number of blocks on an SM
  static constexpr int kRowTiles = kRows / kWarps / 16;               // tiles of 16 rows of each warp
  using Tile = SmemTile<kHeadDim>;
  static constexpr int kQBytes = Tile::bytes(kRows), kKeyBytes = Tile::bytes(kColumns);
  static constexpr int kBiasPitch = kColumns + 8; // the word pairs that a half warp reads cover all banks
  static_assert(kRows <= kTileRows && kTileRows % kRows == 0 && kRowTiles >= 1);
};

} // namespace fdm::cuda
