// SPDX-License-Identifier: BSD-3-Clause
// The tile table of the Hopper kernels, with the reason for each entry: 128 query rows, 64 for each of two consumer
// warpgroups; columns of a stage, and stages. A consumer thread has about 200 registers, a thread block 227 KB of
// shared memory.
#pragma once

namespace fdm::cuda {

// The lookup of the columns of a block: by all threads of the lookup warpgroup, or by one warp while others look up
// other blocks.
enum class Lookup { warpgroup, warps };

// The value dimension of instantiations with values narrower than keys: 128 with 192, as in DeepSeek's heads. 0:
// none.
constexpr int narrow_value_dim(int head_dim) { return head_dim == 192 ? 128 : 0; }

struct ForwardTileSm90 {
  int columns, k_stages, v_stages;
};

// Accumulators take value_dim / 2 + columns / 2 registers per thread, probabilities columns / 4. Wide products read
// less shared memory per operation. K of a block is needed long before its V, so if memory cannot hold one more stage
// of both, K has one more. For head dimensions up to 64, five stages of both took 1 to 3 % less time than four of K
// and three of V (measured on an H100). Boxes keep the latter: with five and four, sequences of 512 tokens without a
// mask took 5 % more.
constexpr ForwardTileSm90 forward_tile_sm90(int head_dim, int value_dim) {
  if (head_dim <= 64) return {128, 5, 5};
  if (head_dim <= 128) return {128, 3, 2};
  if (value_dim <= 128) return {128, 2, 2};
  return head_dim <= 192 ? ForwardTileSm90{64, 3, 2} : ForwardTileSm90{64, 2, 2};
}

// A block needs a chain of loads, key -> bias, which takes longer than the products of a small head dimension. If
// warps take turns at blocks, several chains overlap: 6 to 11 % less time with head dimension 64, but 4 % more with
// 128 (measured on an H200).
constexpr Lookup forward_lookup(int head_dim) { return head_dim <= 64 ? Lookup::warps : Lookup::warpgroup; }

// The tile for columns that are consecutive keys. With two query stages, Q of the next tile does not wait until this
// tile is done.
struct BoxTileSm90 {
  int columns, k_stages, v_stages, query_stages;
};

constexpr BoxTileSm90 box_tile_sm90(int head_dim, int value_dim) {
  if (head_dim <= 64) return {128, 4, 3, 2};
  if (head_dim <= 128) return {128, 2, 2, 2};
  if (value_dim <= 128) return {128, 2, 2, 1};
  return head_dim <= 192 ? BoxTileSm90{64, 3, 2, 1} : BoxTileSm90{64, 2, 2, 1};
}

// Tiles with few key blocks. Two thread blocks share an SM. Of a thread's 128 registers, accumulators take head_dim /
// 2 + columns / 2, probabilities columns / 4. 0: there is no such kernel.
struct SmallTileChoice {
  int columns, stages;
};

constexpr SmallTileChoice small_tile(int head_dim) {
  if (head_dim <= 64) return {64, 4};
  return head_dim <= 128 ? SmallTileChoice{32, 3} : SmallTileChoice{0, 0};
}

// Short sequences whose columns are consecutive keys: stages of 64 columns for 64 rows, and the thread blocks that
// share an SM. A thread has 96 registers; accumulators take head_dim / 2 + 32 of them. Four blocks took 10 % more
// time than five (measured on an H100 with 512 keys). 0: there is no such kernel.
struct SmallBoxChoice {
  int stages, blocks;
};

constexpr int kSmallBoxRows = 64, kSmallBoxColumns = 64;

constexpr SmallBoxChoice small_box(int head_dim) {
  return head_dim <= 64 ? SmallBoxChoice{2, 5} : SmallBoxChoice{0, 0};
}

struct DqTileSm90 {
  int columns, stages;
};

// K of a block is needed until the next block's scores are started, which takes at least two stages. The mma.sync
// kernels serve larger head dimensions, for which these do not fit beside Q and dO.
constexpr int kMaxDqHeadDimSm90 = 192;

// Accumulators take head_dim / 2 + columns registers, dS columns / 4.
constexpr DqTileSm90 dq_tile_sm90(int head_dim) { return head_dim <= 128 ? DqTileSm90{64, 4} : DqTileSm90{64, 2}; }

// dK and dV: 128 keys, 64 for each consumer warpgroup; rows of a stage, and stages. Accumulators of both gradients
// take head_dim registers per thread, scores and their gradients `rows`. The mma.sync kernels serve larger head
// dimensions.
struct DkdvTileSm90 {
  int rows, stages;
};

constexpr int kMaxDkdvHeadDimSm90 = 128;

constexpr DkdvTileSm90 dkdv_tile_sm90(int) { return {64, 3}; }
// The sums of probabilities only: a step takes the producers as long as the consumers need for 128 rows of Q.
constexpr DkdvTileSm90 kMassTile{128, 4};

// The stages of the fused backward pass. With three, which fit up to head dimension 128, it took 2 to 4 % more time
// (measured on an H200).
constexpr int kFusedStages = 2;

} // namespace fdm::cuda
