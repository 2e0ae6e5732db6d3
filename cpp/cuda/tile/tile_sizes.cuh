// SPDX-License-Identifier: BSD-3-Clause
// The tile table: sizes for each head dimension and arch, with the reason for each.
//
// Shared memory of a block: 163 KB on sm_80, 99 KB on sm_86, sm_89 and sm_120, 227 KB on sm_90 and sm_100 (CUDA
// programming guide, compute capabilities). Accumulators of a warp with 32 rows take head_dim + columns registers of
// each thread.
#pragma once

#include <cstdint>

namespace fdm::cuda {

// The general kernel also serves rows that cannot be copied 16 bytes at a time, and a bias per query. Both are rare,
// and need much code.
enum class TileKind { usual, general };

constexpr int shared_limit(int arch) {
  if (arch == 80) return 163 * 1024;
  if (arch == 86 || arch == 89 || arch >= 120) return 99 * 1024;
  return 227 * 1024;
}

// Rows and columns of a block, and blocks for which an SM must have registers.
struct ForwardTileChoice {
  int rows, columns, warps, blocks;
};

constexpr ForwardTileChoice forward_tile(int arch, int head_dim) {
  const bool small_shared = arch == 86 || arch == 89 || arch >= 120;
  // With 32 rows a warp, a fragment of K or V is read from shared memory once and serves two products. Two blocks
  // share an SM, and one computes while the other waits.
  if (head_dim <= 64 || (head_dim <= 128 && !small_shared)) return {128, 64, 4, 2};
  // Where there is the shared memory for one block, it has eight warps.
  if (head_dim <= 128) return {128, 64, 8, 1};
  // The accumulators of 32 rows do not fit the registers.
  if (small_shared) return {64, 32, 4, 1};
  return {128, 64, 8, 1};
}

// The tile where there are thread blocks for more than two on every SM. Three smaller ones share an SM then, and have
// enough registers: seen on an H200, where twelve warps hide each other's latencies better than eight, though each
// barrier comes twice as often.
constexpr ForwardTileChoice crowded_forward_tile(int arch, int head_dim) {
  if (head_dim == 64) return {128, 32, 4, 3};
  return forward_tile(arch, head_dim);
}

// The tile of the general kernel, which has four bytes of bias for each row and column too.
constexpr ForwardTileChoice general_forward_tile(int arch, int head_dim) {
  const bool large_shared = shared_limit(arch) > 200 * 1024;
  // The loads of the bias have latencies that more warps hide better than more work of each.
  if (head_dim <= 64) return {128, large_shared ? 64 : 32, 8, shared_limit(arch) < 100 * 1024 ? 1 : 2};
  ForwardTileChoice tile = forward_tile(arch, head_dim);
  // With fewer columns it fits, and on sm_80 two blocks still share an SM.
  if (!large_shared) tile.columns = 32;
  return tile;
}

// The gradient of the queries: rows and columns of a block, and blocks for which an SM must have registers.
struct DqTileChoice {
  int rows, columns, warps, blocks;
};

constexpr DqTileChoice dq_tile(int arch, int head_dim) {
  const bool small_shared = arch == 86 || arch == 89 || arch >= 120;
  // Q and dO stay in shared memory; K and V of two blocks of columns share the rest. As in the forward pass, 32 rows a
  // warp where the registers allow it; scores and their gradients then leave room for 32 columns.
  if (head_dim <= 64) return {128, 32, 4, 2};
  if (head_dim <= 128) {
    if (small_shared) return {64, 32, 4, 1};
    // There is shared memory for one block, so it has eight warps.
    if (arch == 80) return {128, 64, 8, 1};
    return {128, 32, 4, 2};
  }
  if (small_shared) return {32, 16, 2, 1};
  return arch == 80 ? DqTileChoice{64, 32, 4, 1} : DqTileChoice{128, 32, 8, 1};
}

constexpr DqTileChoice general_dq_tile(int arch, int head_dim) {
  const bool small_shared = shared_limit(arch) < 100 * 1024;
  if (head_dim <= 64) return {128, 32, 8, shared_limit(arch) > 200 * 1024 ? 2 : 1};
  if (small_shared || (arch == 80 && head_dim > 128)) return dq_tile(arch, head_dim);
  // There is shared memory for one block, so it has eight warps.
  return {128, head_dim <= 128 ? 32 : 16, 8, 1};
}

// The gradients of keys and values: keys of a block, rows of a step, blocks for which an SM must have registers, and
// whether one launch computes both.
struct DkdvTileChoice {
  int keys, rows, warps, blocks;
  bool together;
};

constexpr DkdvTileChoice dkdv_tile(int arch, int head_dim) {
  const bool small_shared = arch == 86 || arch == 89 || arch >= 120;
  // With 16 keys a warp, the accumulators of dk and dv take head_dim registers of a thread, and the scores of 64 rows
  // and their gradients another 64. With less shared memory a step has 32 rows, and on sm_80 two blocks share an SM. On
  // sm_90 a block has as many keys as in the wgmma kernels, which these kernels stand in for.
  if (arch == 90 && head_dim <= 128) return {128, 64, 8, 1, true};
  if (head_dim <= 64) return {64, 64, 4, 2, true};
  if (head_dim <= 128) return {64, arch >= 90 && !small_shared ? 64 : 32, 4, small_shared ? 1 : 2, true};
  // The registers do not hold both accumulators, so the scores are computed twice.
  if (small_shared) return {32, 16, 2, 1, false};
  return arch == 80 ? DkdvTileChoice{64, 32, 4, 1, false} : DkdvTileChoice{128, 32, 8, 1, false};
}

// What shared memory holds beside K and Q: V and two stages of dO; or one stage of dO, with V in registers.
enum class SharedHolds { values_and_two_douts, one_dout };

// All gradients at once: keys of a block and rows of a step; of the kernel with mma.sync also warps, blocks for which
// an SM must have registers, warps with the same keys, and what shared memory holds.
struct FusedTileChoice {
  int keys, rows, warps = 0, blocks = 0, shares = 1;
  SharedHolds shared_holds = SharedHolds::values_and_two_douts;
};

constexpr FusedTileChoice fused_tile(int arch, int head_dim, int value_dim) {
  // Accumulators of dk and dv take head_dim registers of a thread for 128 keys, and as many as 128 for 64. P and dP
  // take as many as there are rows; wide products read less shared memory for each operation. Up to 64 columns, three
  // warpgroups have registers for 64 keys each.
  if (arch == 90) {
    if (head_dim <= 64) return {192, 64};
    return head_dim <= 128 || value_dim < head_dim ? FusedTileChoice{128, 64} : FusedTileChoice{64, 64};
  }
  // With 32 keys a warp, a fragment of Q or dO serves two products. Two blocks share an SM, and one computes while the
  // other waits at a barrier.
  if (head_dim <= 64) return {128, 32, 4, 2};
  // The accumulators of 16 keys and 64 rows fill the registers. More keys mean fewer additions to dq.
  const bool small_shared = shared_limit(arch) < 100 * 1024;
  if (head_dim <= 128) return small_shared ? FusedTileChoice{64, 32, 4, 2} : FusedTileChoice{128, 64, 8, 1};
  // Two warps have the same 16 keys, and half of the columns of their dk and dv each.
  return {64, 32, 8, 1, 2, small_shared ? SharedHolds::one_dout : SharedHolds::values_and_two_douts};
}

// Whether the kernel knows biases per query. With fewer columns, the pair bias kernels serve most of these.
constexpr bool fuses_row_bias(int arch, int head_dim) { return arch == 90 && head_dim > 128; }
// The same with a mask that has a row for each query.
constexpr bool fuses_row_mask(int arch, int head_dim) { return arch == 90 && head_dim <= 128; }

// All gradients at once, of key blocks that one warpgroup of sm_90 computes by itself. Accumulators take head_dim + 64
// registers of a thread, so three of them share an SM; of larger head dimensions two would, which is slower.
struct SmallBlockChoice {
  int keys, rows, most_head_dim;
};
constexpr SmallBlockChoice kSmallBlock{64, 64, 64};

// The gradient of a bias per query: 16 rows a warp, and the buffers that RowBiasConfig describes.
struct RowBiasTileChoice {
  int columns, warps, query_buffers, key_buffers;
};

constexpr RowBiasTileChoice row_bias_tile(int arch, int head_dim) {
  const bool small_shared = shared_limit(arch) < 100 * 1024, large_shared = shared_limit(arch) > 200 * 1024;
  // Blocks of four warps share an SM where two fit.
  if (head_dim <= 64)
    return small_shared ? RowBiasTileChoice{32, 8, 1, 2} : RowBiasTileChoice{large_shared ? 64 : 32, 4, 2, 2};
  // An SM has eight warps where there is the memory for their rows. With many sources, Q and dO come with each step.
  // Their copies should then be under way during the step before, rather than those of K and V.
  if (head_dim <= 128)
    return large_shared ? RowBiasTileChoice{64, 8, 2, 1} : RowBiasTileChoice{32, small_shared ? 4 : 8, 1, 2};
  if (large_shared) return {32, 4, 2, 2};
  return small_shared ? RowBiasTileChoice{16, 2, 1, 2} : RowBiasTileChoice{32, 2, 2, 2};
}

} // namespace fdm::cuda
