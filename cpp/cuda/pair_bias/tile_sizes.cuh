// SPDX-License-Identifier: BSD-3-Clause
// The tile table of the pair bias kernels. It complements tile/tile_sizes.cuh.
#pragma once

#include <type_traits>

#include "../tile/tile_sizes.cuh"

namespace fdm::cuda {

// The dtype of a bias per query: that of q, or float32.
enum class BiasType { element, float32 };
constexpr std::integral_constant<BiasType, BiasType::element> kElementType{};
constexpr std::integral_constant<BiasType, BiasType::float32> kFloat32Type{};

// Keys of a key block.
constexpr int kPairBiasKeys = 64;

// Bytes of dynamic shared memory for the tiles of a pair bias kernel. kOthers covers static shared memory.
constexpr int pair_bias_shared_limit(int arch) {
  constexpr int kOthers = 4 * 1024;
  return shared_limit(arch) - kOthers;
}
#ifdef FDM_TILE_ARCH
constexpr int kPairBiasSharedLimit = pair_bias_shared_limit(FDM_TILE_ARCH);
#endif

// Tiles of 16 rows or keys per warp, warps per block, and blocks per SM for which registers must suffice. Copies have
// two stages if shared memory has room for them.
struct PairBiasTileChoice {
  int tiles, warps, blocks;
};

constexpr PairBiasTileChoice pair_bias_forward_tile(int head_dim) {
  // With 32 rows per warp, a fragment of K or V read from shared memory serves two products. Larger heads leave
  // registers for 16 rows.
  if (head_dim <= 32) return {2, 4, 3};
  return {1, 4, head_dim <= 64 ? 4 : 2};
}

constexpr PairBiasTileChoice pair_bias_dq_tile(int head_dim) {
  if (head_dim <= 32) return {2, 4, 3};
  return {1, 4, head_dim <= 64 ? 3 : 2};
}

constexpr PairBiasTileChoice pair_bias_dkdv_tile(int head_dim) {
  if (head_dim <= 32) return {2, 4, 3};
  // The accumulators of dk, dv and two products leave no registers for a third block.
  return head_dim <= 64 ? PairBiasTileChoice{2, 4, 2} : PairBiasTileChoice{1, 4, 1};
}

// Warps of the dbias kernel. The tile has 2048 elements per warp.
constexpr int dbias_warps(int arch, int head_dim) {
  const bool small_shared = has_small_shared(arch);
  if (head_dim <= 64) return small_shared ? 4 : 8;
  return small_shared ? 2 : 4;
}

// Bytes of: a row of a 16-bit tile in the layout of SmemTile; a bias tile, whose rows have `pitch` elements in
// float32 or kPairBiasKeys in 16 bits; a panel, which is a bias tile and the booleans of a mask.
constexpr int pair_bias_row_bytes(int head_dim) { return head_dim <= 32 ? 64 : (head_dim + 63) / 64 * 128; }
constexpr int pair_bias_bias_bytes(int rows, int pitch, bool float32_bias) {
  return rows * (float32_bias ? pitch * 4 : kPairBiasKeys * 2);
}
constexpr int pair_bias_panel_bytes(int rows, int pitch, bool float32_bias, bool mask) {
  return pair_bias_bias_bytes(rows, pitch, float32_bias) + (mask ? rows * kPairBiasKeys : 0);
}

// The stages of copies for which shared memory has room beside `others` bytes.
constexpr int pair_bias_stages(int arch, int others, int stage_bytes) {
  return others + 2 * stage_bytes <= pair_bias_shared_limit(arch) ? 2 : 1;
}

// Shared memory of the row-tile kernels. `row_tensors` tensors have rows of the tile: q, and dout in the backward
// pass. `mask`: the mask has a row for each query.
struct RowBlockSizes {
  static constexpr int kPitch = kPairBiasKeys + 8; // of a float32 bias: the pairs of four rows cover all banks
  int arch, head_dim, row_tensors, slots;
  bool float32_bias, mask;

  constexpr PairBiasTileChoice tile() const {
    return row_tensors == 1 ? pair_bias_forward_tile(head_dim) : pair_bias_dq_tile(head_dim);
  }
  constexpr int rows() const { return 16 * tile().tiles * tile().warps; }
  constexpr int row_bytes() const { return rows() * pair_bias_row_bytes(head_dim); } // per tensor
  constexpr int stage_bytes() const {
    return 2 * slots * kPairBiasKeys * pair_bias_row_bytes(head_dim) +
           pair_bias_panel_bytes(rows() / slots, kPitch, float32_bias, mask);
  }
  constexpr int stages() const { return pair_bias_stages(arch, row_tensors * row_bytes(), stage_bytes()); }
  constexpr int shared_bytes() const { return row_tensors * row_bytes() + stages() * stage_bytes(); }
};

// Shared memory of the key-tile kernel, whose steps have kStepRows rows.
constexpr int kStepRows = 64;

struct KeyTileSizes {
  static constexpr int kPitch = kPairBiasKeys + 4; // of a float32 bias: eight keys of every second row cover all banks
  int arch, head_dim, slots;
  bool float32_bias, mask;

  constexpr int keys() const { return 16 * pair_bias_dkdv_tile(head_dim).tiles * pair_bias_dkdv_tile(head_dim).warps; }
  constexpr int key_bytes() const { return keys() * pair_bias_row_bytes(head_dim); } // of K or V
  constexpr int panels() const { return (keys() / slots + kPairBiasKeys - 1) / kPairBiasKeys; }
  constexpr int panel_bytes() const { return pair_bias_panel_bytes(kStepRows, kPitch, float32_bias, mask); }
  constexpr int statistics_bytes() const { return slots * kStepRows * 2 * int(sizeof(float)); }
  constexpr int stage_bytes() const {
    return 2 * slots * kStepRows * pair_bias_row_bytes(head_dim) + panels() * panel_bytes() + statistics_bytes();
  }
  constexpr int stages() const { return pair_bias_stages(arch, 2 * key_bytes(), stage_bytes()); }
  constexpr int shared_bytes() const { return 2 * key_bytes() + stages() * stage_bytes(); }
};

// Shared memory of the dbias kernel.
struct DbiasSizes {
  static constexpr int kPitch = kPairBiasKeys + 8; // of a float32 bias: the pairs of four rows cover all banks
  int arch, head_dim;

  constexpr int elements() const { return dbias_warps(arch, head_dim) * 2048; } // of the tiles of all slots
  constexpr int stage_bytes(int slots, int tile_rows, int tile_keys) const {
    return 2 * slots * (tile_rows + tile_keys) * pair_bias_row_bytes(head_dim) +
           slots * tile_rows * 2 * int(sizeof(float));
  }
  constexpr int panel_bytes(int tile_rows, bool float32_bias, bool mask) const {
    return pair_bias_panel_bytes(tile_rows, kPitch, float32_bias, mask);
  }
  constexpr int shared_bytes(int slots, int tile_rows, int tile_keys, int stages, bool float32_bias, bool mask) const {
    return stages * stage_bytes(slots, tile_rows, tile_keys) +
           tile_keys / kPairBiasKeys * panel_bytes(tile_rows, float32_bias, mask);
  }
};

} // namespace fdm::cuda
