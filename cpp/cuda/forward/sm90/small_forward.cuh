// SPDX-License-Identifier: BSD-3-Clause
// Forward pass with wgmma (Hopper) for tiles with few key blocks: a thread block for each tile, or for 64 rows of
// one. Several share an SM, so that one computes while others wait for columns and keys, search maxima or write rows.
// The persistent kernel of forward.cuh hides these latencies behind products of other key blocks; these tiles have
// too few.
//
// The columns come from a plan (small_tiles.cuh), or are consecutive keys (small_boxes.cuh).
#pragma once

#include "../../tile/sm90/products.cuh"
#include "../../tile/sm90/tile_scheduler.cuh"
#include "../forward_rows.cuh"
#include "ptx/dependent.cuh"

namespace fdm::cuda {

// Shared memory of an SM, and the part reserved for each thread block (CUDA programming guide, compute capability
// 9.0).
constexpr int kSmShared = 228 << 10, kSharedOfBlock = 1 << 10;

template <class Columns>
__global__ void __launch_bounds__(Columns::Config::kThreads, Columns::Config::kBlocks)
    small_forward_kernel(const __grid_constant__ typename Columns::Params params) {
  using Config = typename Columns::Config;
  using Element = typename Config::Element;
  using KeyTile = typename Config::KeyTile;
  auto &shared = dynamic_memory<typename Columns::Shared>();
  static_assert(Config::kBlocks * (int(sizeof(shared)) + kSharedOfBlock) <= kSmShared);
  ptx::wait_for_kernel_ahead();
  Columns tile(params, shared);
  if (!tile.load_first()) return;
#pragma unroll 1
  for (int block = 0; block < tile.blocks; ++block) {
    tile.wait_for_keys(block);
    tile.start_scores(block);
    tile.look_ahead(block);
    ptx::warpgroup_wait<0>(tile.scores[0]);
    tile.make_probabilities(block);
    uint32_t probabilities[Config::kColumns / 16][4];
    pack_left<Element>(probabilities, tile.scores[0]);
    tile.wait_for_values(block);
    warpgroup_add_rs<Element, KeyTile>(tile.out[0], probabilities,
                                       KeyTile::descriptor(ptx::shared_address(shared.sV[block % Config::kStages])));
    tile.release(block);
  }
  tile.finish();
  tile.write_aligned();
}

} // namespace fdm::cuda
