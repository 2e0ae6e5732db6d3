// SPDX-License-Identifier: BSD-3-Clause
// The route of a call whose queries list their keys: how many heads of a group share a tile, and what is left in the
// workspace.
#pragma once

#include "route.h"

namespace fdm::cuda {

// How many heads share a list.
enum class ListHeads : uint8_t { up_to_16, up_to_32, up_to_64, any };
constexpr ListHeads list_heads(int64_t together) {
  if (together <= 16) return ListHeads::up_to_16;
  if (together <= 32) return ListHeads::up_to_32;
  return together <= 64 ? ListHeads::up_to_64 : ListHeads::any;
}

// A thread block computes some query heads of one query, which share a KV head and a list, as the rows of its tile: row
// tiles of 16 rows for each warp, warps with other rows, warps with other columns, and the columns of a step, each a
// listed key.
struct ListTileChoice {
  int row_tiles, row_warps, key_warps, columns;

  constexpr int rows() const { return 16 * row_tiles * row_warps; }
  constexpr int threads() const { return 32 * row_warps * key_warps; }
};

// A tile has the fewest rows that the heads fit, so that each of its four warps has some of them. A warp of 32 rows reads
// a fragment of K or V from shared memory once for two products. Accumulators of 32 rows of more than 128 columns exceed
// the registers. Shared memory of 99 KB holds two stages of 64 columns (benchmarks/profiles/h200-list-tiles.json).
constexpr ListTileChoice list_forward_tile(int head_dim, ListHeads heads) {
  // Up to 32 wide heads are two tiles of 16 rows: half of the warps of a tile of 64 rows would have no head.
  if (head_dim > 128) return heads <= ListHeads::up_to_32 ? ListTileChoice{1, 1, 2, 32} : ListTileChoice{1, 4, 1, 32};
  if (heads == ListHeads::up_to_16) return {1, 1, 4, 64};
  if (heads == ListHeads::up_to_32) return {2, 1, 4, 64};
  return heads == ListHeads::up_to_64 ? ListTileChoice{2, 2, 2, 64} : ListTileChoice{2, 4, 1, 64};
}

// Shared memory also holds dO, P and dS. Larger heads leave room for few rows only.
constexpr ListTileChoice list_backward_tile(int head_dim, ListHeads heads) {
  if (heads <= ListHeads::up_to_32 || head_dim > 128) return list_forward_tile(head_dim, ListHeads::up_to_16);
  return {1, 4, 1, 32};
}

// The head dimensions of kernels with wgmma. Wider heads leave too few registers to the lookup warps of the forward
// pass; in the backward pass, shared memory has room for Q, dO, P, dS, two stages of 64 columns, and what is added to
// the sums of keys.
constexpr bool has_list_forward_sm90(int head_dim) { return head_dim <= 192; }
constexpr bool has_list_backward_sm90(int head_dim) { return head_dim == 64 || head_dim == 128; }
constexpr int kListColumnsSm90 = 64;

// What divides the heads of a KV head into tiles.
struct ListTiles {
  int32_t heads_per_tile; // 1 where heads of a group may keep other keys than each other
  int32_t head_tiles;     // of a KV head
};

// What a launch of the backward kernel with mma.sync computes. Where L2 does not hold the sums of a KV head, launches one
// after another go through parts of its keys. Each leaves its sums of dq to the next one.
struct ListPass {
  int64_t first_tile;          // of all tiles
  int32_t first_key, past_key; // of each sequence: those whose gradients are summed
  bool is_first, is_last;      // of the passes of these tiles
};

// The longest list of which a thread block of several passes notes what is of its pass. On sm80, notes of more would
// leave room for one thread block on an SM.
constexpr int list_places(int arch) { return arch == 80 ? 1024 : 4096; }
// The fewest entries of a list for a pass. Each reads the whole list and the rows of Q and dO.
constexpr int64_t kListPassEntries = 256;

enum class ListKernel : uint8_t {
  mma,  // lists/forward.cuh
  wgmma // lists/sm90
};

// The fewest heads of a group for kernels with wgmma, whose tiles have 128 rows. Fewer heads are one tile of mma.sync,
// whose thread blocks gather more rows at a time (benchmarks/profiles/h200-steps.json, h200-list-tiles.json).
constexpr int64_t list_forward_wgmma_heads(int head_dim) { return head_dim <= 128 ? 33 : 17; }
constexpr int64_t kListBackwardWgmmaHeads = 17;
// With this many heads, wgmma is faster in the backward pass where L2 does not hold the sums of keys.
constexpr int64_t kListWgmmaHeadsBeyondL2 = 16;

struct ListRoute {
  ListKernel kernel;
  int32_t head_dim; // of the instantiation
  ListHeads heads;
  ListTileChoice tile; // of mma
  ListTiles tiles;
  int64_t rows;   // of all sequences, those of none included
  int64_t count;  // of tiles
  int64_t blocks; // of threads
  // Backward: the passes of each KV head, the keys of each, and its thread blocks.
  int64_t key_parts, part_keys, pass_blocks;
  // Float32 sums, the first cleared_bytes of the workspace. Those of dk and dv are [batch, or 1 for varlen][key][KV
  // head][D of the instantiation], those of biases have their shapes, and that of the sink its.
  Part key_sums, value_sums, bias_sums, index_sums, sink_sums;
  Part query_sums; // of passes, float32 [tile of a KV head][head][D]; the first pass writes them
  int64_t key_rounding_blocks, bias_rounding_blocks;
  int64_t cleared_bytes, workspace_bytes;
  Launches launches;

  ListPass pass(int64_t n) const {
    const int64_t part = n % key_parts;
    const bool is_last = part == key_parts - 1;
    return {n / key_parts * pass_blocks, int32_t(part * part_keys),
            is_last ? INT32_MAX : int32_t((part + 1) * part_keys), part == 0, is_last};
  }
};

// Whether 32 bits hold the bytes from head to head of a (B, rows, heads, D) tensor.
bool has_head_places(const fdm_tensor &t);

ListRoute list_forward_route(const fdm_problem &p, const DeviceFacts &device, const Alignment &lies);
// Of any gradients: the sums of those that are not wanted have room all the same.
ListRoute list_backward_route(const fdm_problem &p, const DeviceFacts &device, const Alignment &lies);

} // namespace fdm::cuda
