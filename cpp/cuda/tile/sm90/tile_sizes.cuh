// SPDX-License-Identifier: BSD-3-Clause
// The tile table of the Hopper kernels: 128 query rows, 64 for each of two consumer warpgroups; columns of a stage and
// stages, with the reason for each. Registers of a consumer thread: about 200; shared memory of a block: 227 KB.
#pragma once

namespace fdm::cuda {

// How the columns of a block are looked up: by all threads of the lookup warpgroup, or by one warp while others look up
// other blocks.
enum class Lookup { warpgroup, warps };

// Instantiations for values that are narrower than keys: 128 columns beside 192, as DeepSeek's heads have. 0: none.
constexpr int narrow_value_dim(int head_dim) { return head_dim == 192 ? 128 : 0; }

struct ForwardTileSm90 {
  int columns, k_stages, v_stages;
};

// Accumulators take value_dim / 2 + columns / 2 registers of a thread, probabilities columns / 4. Wide products read
// less shared memory for each operation. K of a block is needed long before its V, so where there is no room for more
// of both, it has a stage more. Up to 64 columns, five stages of both took 1 to 3 % less than four of K and three of V
// (seen on an H100). Boxes keep the latter: with five and four, sequences of 512 tokens without a mask took 5 % more.
constexpr ForwardTileSm90 forward_tile_sm90(int head_dim, int value_dim) {
  if (head_dim <= 64) return {128, 5, 5};
  if (head_dim <= 128) return {128, 3, 2};
  if (value_dim <= 128) return {128, 2, 2};
  return head_dim <= 192 ? ForwardTileSm90{64, 3, 2} : ForwardTileSm90{64, 2, 2};
}

// What a block needs is a chain of loads, key -> bias, which takes longer than the products of a small head dimension.
// Where warps take turns at blocks, several chains are under way: 6 to 11 % less time with 64 columns of a head, but 4
// % more with 128 (seen on an H200).
constexpr Lookup forward_lookup(int head_dim) { return head_dim <= 64 ? Lookup::warps : Lookup::warpgroup; }

// Where the columns of a tile are consecutive keys. Q of the next tile need not wait until this tile is done, where
// there is room for it.
struct BoxTileSm90 {
  int columns, k_stages, v_stages, query_stages;
};

constexpr BoxTileSm90 box_tile_sm90(int head_dim, int value_dim) {
  if (head_dim <= 64) return {128, 4, 3, 2};
  if (head_dim <= 128) return {128, 2, 2, 2};
  if (value_dim <= 128) return {128, 2, 2, 1};
  return head_dim <= 192 ? BoxTileSm90{64, 3, 2, 1} : BoxTileSm90{64, 2, 2, 1};
}

// Tiles with few blocks of columns, of which two share an SM: a thread has 128 registers, of which accumulators take
// head_dim / 2 + columns / 2, probabilities columns / 4. 0: there is no such kernel.
struct SmallTileChoice {
  int columns, stages;
};

constexpr SmallTileChoice small_tile(int head_dim) {
  if (head_dim <= 64) return {64, 4};
  return head_dim <= 128 ? SmallTileChoice{32, 3} : SmallTileChoice{0, 0};
}

// Short sequences whose columns are consecutive keys: stages of 64 columns for 64 rows, and how many thread blocks
// share an SM. A thread has 96 registers, of which accumulators take head_dim / 2 + 32. Four took 10 % more than five
// (seen on an H100 with 512 keys). 0: there is no such kernel.
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

// K of a block is needed until the next block's scores are started, which takes two stages at least. Larger head
// dimensions, which have no room for them beside Q and dO, are left to the mma.sync kernels.
constexpr int kDqHeadDimSm90 = 192;

// Accumulators take head_dim / 2 + columns registers, dS columns / 4.
constexpr DqTileSm90 dq_tile_sm90(int head_dim) { return head_dim <= 128 ? DqTileSm90{64, 4} : DqTileSm90{64, 2}; }

// The gradients of keys and values: 128 keys, 64 for each consumer warpgroup; rows of a stage and stages. Accumulators
// of both gradients take head_dim registers of a thread, scores and their gradients `rows`: larger head dimensions are
// left to the mma.sync kernels.
struct DkdvTileSm90 {
  int rows, stages;
};

constexpr int kDkdvHeadDimSm90 = 128;

constexpr DkdvTileSm90 dkdv_tile_sm90(int) { return {64, 3}; }
// The sums of probabilities alone: the producers need as long for a step as the consumers for 128 rows of Q.
constexpr DkdvTileSm90 kMassTile{128, 4};

// All gradients at once: the stages that shared memory has room for.
constexpr int fused_stages(int head_dim) {
  if (head_dim <= 64) return 4;
  return head_dim <= 128 ? 3 : 2;
}
// With a mask that has a row for each query, whose words have a place in each stage.
constexpr int kRowMaskStages = 3;

} // namespace fdm::cuda
