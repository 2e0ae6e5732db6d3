// SPDX-License-Identifier: BSD-3-Clause
// The tile table: sizes for each head dimension and arch, with the reason for each.
//
// Shared memory of a thread block: 163 KB on sm_80, 99 KB on sm_86, sm_89 and sm_120, 227 KB on sm_90 and sm_100
// (CUDA programming guide, compute capabilities). Accumulators of a warp with 32 rows take head_dim + columns
// registers per thread.
#pragma once

#include <cstdint>

namespace fdm::cuda {

// The general kernels serve a bias per query, which needs much code. In the forward pass, they also serve rows that
// cannot be copied 16 bytes at a time.
enum class TileKind { usual, general };

constexpr int shared_limit(int arch) {
  if (arch == 80) return 163 * 1024;
  if (arch == 86 || arch == 89 || arch >= 120) return 99 * 1024;
  return 227 * 1024;
}
constexpr bool has_small_shared(int arch) { return shared_limit(arch) < 100 * 1024; }
constexpr bool has_large_shared(int arch) { return shared_limit(arch) > 200 * 1024; }

// Rows and columns of a tile of query rows, warps, and thread blocks on an SM that registers must allow.
struct RowTileChoice {
  int rows, columns, warps, blocks;
};

constexpr RowTileChoice forward_tile(int arch, int head_dim) {
  const bool small_shared = has_small_shared(arch);
  // With 32 rows a warp, a fragment of K or V is read from shared memory once and serves two products. Two thread
  // blocks share an SM: one computes while the other waits.
  if (head_dim <= 64 || (head_dim <= 128 && !small_shared)) return {128, 64, 4, 2};
  // If shared memory holds one thread block, it has eight warps.
  if (head_dim <= 128) return {128, 64, 8, 1};
  // Registers cannot hold the accumulators of 32 rows.
  if (small_shared) return {64, 32, 4, 1};
  return {128, 64, 8, 1};
}

// The tile for grids of more than two thread blocks per SM. Three smaller blocks then share an SM and have enough
// registers. Measured on an H200: twelve warps hide each other's latencies better than eight, although each barrier
// comes twice as often.
constexpr RowTileChoice many_blocks_forward_tile(int arch, int head_dim) {
  if (head_dim == 64) return {128, 32, 4, 3};
  return forward_tile(arch, head_dim);
}

// The tile of the general kernel, which also stores four bytes of bias for each row and column.
constexpr RowTileChoice general_forward_tile(int arch, int head_dim) {
  const bool large_shared = has_large_shared(arch);
  // More warps hide the latencies of the bias loads better than more work per warp.
  if (head_dim <= 64) return {128, large_shared ? 64 : 32, 8, has_small_shared(arch) ? 1 : 2};
  RowTileChoice tile = forward_tile(arch, head_dim);
  // With 32 columns it fits, and on sm_80 two thread blocks still share an SM.
  if (!large_shared) tile.columns = 32;
  return tile;
}

constexpr RowTileChoice dq_tile(int arch, int head_dim) {
  const bool small_shared = has_small_shared(arch);
  // Q and dO stay in shared memory; K and V of two key blocks share the rest. As in the forward pass, a warp has 32
  // rows if registers allow it; scores and their gradients then leave room for 32 columns.
  if (head_dim <= 64) return {128, 32, 4, 2};
  if (head_dim <= 128) {
    if (small_shared) return {64, 32, 4, 1};
    // There is shared memory for one block, so it has eight warps.
    if (arch == 80) return {128, 64, 8, 1};
    return {128, 32, 4, 2};
  }
  if (small_shared) return {32, 16, 2, 1};
  return arch == 80 ? RowTileChoice{64, 32, 4, 1} : RowTileChoice{128, 32, 8, 1};
}

constexpr RowTileChoice general_dq_tile(int arch, int head_dim) {
  if (head_dim <= 64) return {128, 32, 8, has_large_shared(arch) ? 2 : 1};
  if (has_small_shared(arch) || (arch == 80 && head_dim > 128)) return dq_tile(arch, head_dim);
  // There is shared memory for one block, so it has eight warps.
  return {128, head_dim <= 128 ? 32 : 16, 8, 1};
}

// dK and dV: keys of a block, rows of a step, warps, thread blocks on an SM that registers must allow, and whether
// one launch computes both.
struct DkdvTileChoice {
  int keys, rows, warps, blocks;
  bool both_gradients;
};

constexpr DkdvTileChoice dkdv_tile(int arch, int head_dim) {
  const bool small_shared = has_small_shared(arch);
  // With 16 keys a warp, the accumulators of dk and dv take head_dim registers per thread, and the scores of 64 rows
  // and their gradients another 64. With less shared memory a step has 32 rows, and on sm_80 two thread blocks share
  // an SM. On sm_90 a block has as many keys as in the wgmma kernels that these kernels replace.
  if (arch == 90 && head_dim <= 128) return {128, 64, 8, 1, true};
  if (head_dim <= 64) return {64, 64, 4, 2, true};
  if (head_dim <= 128) return {64, arch >= 90 && !small_shared ? 64 : 32, 4, small_shared ? 1 : 2, true};
  // Registers cannot hold both accumulators, so the scores are computed twice.
  if (small_shared) return {32, 16, 2, 1, false};
  return arch == 80 ? DkdvTileChoice{64, 32, 4, 1, false} : DkdvTileChoice{128, 32, 8, 1, false};
}

// The contents of shared memory beside K and Q: V and two stages of dO; or one stage of dO, with V in registers.
enum class SmemContents { values_and_two_douts, one_dout };

// The fused backward pass: keys of a block and rows of a step. For mma.sync also: warps, thread blocks on an SM that
// registers must allow, warps that share the same keys, and the contents of shared memory.
struct FusedTileChoice {
  int keys, rows, warps = 0, blocks = 0, warps_per_keys = 1;
  SmemContents smem_contents = SmemContents::values_and_two_douts;
};

constexpr FusedTileChoice fused_tile(int arch, int head_dim, int value_dim) {
  // With 128 keys, accumulators of dk and dv take head_dim registers per thread; with 64, half as many. P and dP take
  // as many as a part of a step has rows. Wide products read less shared memory per operation.
  if (arch == 90) {
    if (head_dim <= 64) return {128, 128};
    return head_dim <= 128 || value_dim < head_dim ? FusedTileChoice{128, 64} : FusedTileChoice{64, 64};
  }
  // With 32 keys a warp, a fragment of Q or dO serves two products. Two thread blocks share an SM: one computes while
  // the other waits at a barrier.
  if (head_dim <= 64) return {128, 32, 4, 2};
  // The accumulators of 16 keys and 64 rows fill the registers. More keys mean fewer additions to dq.
  const bool small_shared = has_small_shared(arch);
  if (head_dim <= 128) return small_shared ? FusedTileChoice{64, 32, 4, 2} : FusedTileChoice{128, 64, 8, 1};
  // Two warps share the same 16 keys; each has half of the columns of their dk and dv.
  return {64, 32, 8, 1, 2, small_shared ? SmemContents::one_dout : SmemContents::values_and_two_douts};
}

// Whether the fused kernel supports a bias per query. For smaller head dimensions, the pair bias kernels serve most
// of these.
constexpr bool fuses_row_bias(int arch, int head_dim) { return arch == 90 && head_dim > 128; }
// The same for a mask per query.
constexpr bool fuses_row_mask(int arch, int head_dim) { return arch == 90 && head_dim <= 128; }

// The fused backward pass of key blocks that one warpgroup of sm_90 computes alone. Accumulators take head_dim + 64
// registers per thread, so three thread blocks share an SM. Larger head dimensions would allow two, which is slower.
struct SmallBlockChoice {
  int keys, rows, max_head_dim;
};
constexpr SmallBlockChoice kSmallBlock{64, 64, 64};

// The gradient of a bias per query: 16 rows a warp, and the buffers that RowBiasConfig describes.
struct RowBiasTileChoice {
  int columns, warps, query_buffers, key_buffers;
};

constexpr RowBiasTileChoice row_bias_tile(int arch, int head_dim) {
  const bool small_shared = has_small_shared(arch), large_shared = has_large_shared(arch);
  // Thread blocks of four warps share an SM where two fit.
  if (head_dim <= 64)
    return small_shared ? RowBiasTileChoice{32, 8, 1, 2} : RowBiasTileChoice{large_shared ? 64 : 32, 4, 2, 2};
  // An SM has eight warps if memory holds their rows. With many sources, Q and dO come with each step. Their copies
  // should then overlap the previous step, rather than those of K and V.
  if (head_dim <= 128)
    return large_shared ? RowBiasTileChoice{64, 8, 2, 1} : RowBiasTileChoice{32, small_shared ? 4 : 8, 1, 2};
  if (large_shared) return {32, 4, 2, 2};
  return small_shared ? RowBiasTileChoice{16, 2, 1, 2} : RowBiasTileChoice{32, 2, 2, 2};
}

} // namespace fdm::cuda
