// SPDX-License-Identifier: BSD-3-Clause
// The route of a call whose queries list their keys: how many heads of a group share a tile, and what is left in the
// workspace.
#pragma once

#include "route.h"

namespace fdm::cuda {

// The heads of a tile: few, whose warps have keys of their own, or many, whose warps have rows of their own.
enum class ListHeads : uint8_t { few, many };

// A thread block computes some query heads of one query, which share a KV head and a list, as the rows of its tile: row
// tiles of 16 rows for each warp, warps with other rows, warps with other columns, and the columns of a step, each a
// listed key.
struct ListTileChoice {
  int row_tiles, row_warps, key_warps, columns;

  constexpr int rows() const { return 16 * row_tiles * row_warps; }
  constexpr int threads() const { return 32 * row_warps * key_warps; }
};

constexpr ListTileChoice list_forward_tile(int head_dim, ListHeads heads) {
  // Each warp has 16 columns of a step. Two stages of more columns would not fit 99 KB of shared memory.
  if (heads == ListHeads::few) return head_dim <= 128 ? ListTileChoice{1, 1, 4, 64} : ListTileChoice{1, 1, 2, 32};
  // With 32 rows a warp, a fragment of K or V is read from shared memory once and serves two products. The accumulators
  // of 32 rows of more than 128 columns do not fit the registers.
  return head_dim <= 128 ? ListTileChoice{2, 4, 1, 64} : ListTileChoice{1, 4, 1, 32};
}

// Shared memory also holds dO, P and dS. Larger heads leave room for few rows only.
constexpr ListTileChoice list_backward_tile(int head_dim, ListHeads heads) {
  if (heads == ListHeads::few || head_dim > 128) return list_forward_tile(head_dim, ListHeads::few);
  return {1, 4, 1, 32};
}

// The head dimensions of kernels with wgmma. Wider heads leave too few registers to the lookup warps of the forward
// pass; in the backward pass, shared memory has room for Q, dO, P, dS, two stages of 64 columns, and what is added to
// the sums of keys.
constexpr bool has_list_forward_sm90(int head_dim) { return head_dim <= 192; }
constexpr bool has_list_backward_sm90(int head_dim) { return head_dim == 64 || head_dim == 128; }
constexpr int kListColumnsSm90 = 64;

// The most heads of a group for which few rows are a tile. Two tiles gather their keys twice, which 32 heads of a tile
// for 64 to 128 do not make up for: half of its warps, or more, would have no rows.
constexpr int64_t kListFewHeads = 32;

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

// The fewest heads of a group for kernels with wgmma, most of whose rows are then none: gathered rows and additions to
// sums take longer than products. Up to 16 heads are one tile of mma.sync, whose thread blocks gather more rows at a
// time (benchmarks/profiles/h200-steps.json). But in the backward pass so many blocks add to sums of keys that 16 heads
// are faster with wgmma where L2 does not hold these.
constexpr int64_t kListWgmmaHeads = 17, kListWgmmaHeadsBeyondL2 = 16;

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
