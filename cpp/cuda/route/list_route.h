// SPDX-License-Identifier: BSD-3-Clause
// The route of a call with key lists: the heads of a tile, the kernel, and the parts of the workspace.
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

// The tile of a thread block with mma.sync: row tiles of 16 rows per warp, warps along the rows, warps along the
// columns, and the columns of a step. Rows are query heads of one query that share a KV head and a list; columns are
// listed keys.
struct ListTileChoice {
  int row_tiles, row_warps, key_warps, columns;

  constexpr int rows() const { return 16 * row_tiles * row_warps; }
  constexpr int threads() const { return 32 * row_warps * key_warps; }
};

// A tile has the fewest rows that the heads fit, so that each of its four warps has some of them. A warp of 32 rows
// reads a fragment of K or V from shared memory once for two products. Accumulators of 32 rows of more than 128
// columns exceed the registers. Shared memory of 99 KB holds two stages of 64 columns
// (benchmarks/profiles/h200-list-tiles.json).
constexpr ListTileChoice list_forward_tile(int head_dim, ListHeads heads) {
  // Up to 32 wide heads are two tiles of 16 rows: half of the warps of a tile of 64 rows would have no head.
  if (head_dim > 128) return heads <= ListHeads::up_to_32 ? ListTileChoice{1, 1, 2, 32} : ListTileChoice{1, 4, 1, 32};
  if (heads == ListHeads::up_to_16) return {1, 1, 4, 64};
  if (heads == ListHeads::up_to_32) return {2, 1, 4, 64};
  return heads == ListHeads::up_to_64 ? ListTileChoice{2, 2, 2, 64} : ListTileChoice{2, 4, 1, 64};
}

// Shared memory also holds dO, P and dS. Head dimensions above 128 leave room for 16 rows.
constexpr ListTileChoice list_backward_tile(int head_dim, ListHeads heads) {
  if (heads <= ListHeads::up_to_32 || head_dim > 128) return list_forward_tile(head_dim, ListHeads::up_to_16);
  return {1, 4, 1, 32};
}

// The head dimensions of kernels with wgmma. Larger ones leave too few registers for the lookup warps of the forward
// pass. In the backward pass, shared memory holds Q, dO, P, dS, two stages of 64 columns, and the gradients of a step's
// keys.
constexpr bool has_list_forward_sm90(int head_dim) { return head_dim <= 192; }
constexpr bool has_list_backward_sm90(int head_dim) { return head_dim == 64 || head_dim == 128; }
constexpr int kListColumnsSm90 = 64;

// The division of a KV head's query heads into tiles.
struct ListTiles {
  int32_t heads_per_tile; // 1 if heads of a group may keep different keys
  int32_t head_tiles;     // of a KV head
};

// A launch of the backward kernel with mma.sync. If L2 does not hold the sums of a KV head, each of its passes computes
// the gradients of a part of the keys, and hands its dQ sums to the next pass.
struct ListPass {
  int64_t first_tile;
  int32_t first_key, past_key; // in each sequence
  bool is_first, is_last;      // of the passes over these tiles
};

// Maximum list length with several passes: shared memory holds the places of a pass's entries. On sm80, more places
// would leave room for one thread block per SM.
constexpr int list_places(int arch) { return arch == 80 ? 1024 : 4096; }
// Maximum bytes of the float32 sums of a pass: L2 of an H200 holds them beside the rows that are read
// (benchmarks/profiles/h200-list-tiles.json).
constexpr int64_t kListSumBytes = 40 << 20;
// Minimum mean number of list entries per pass: each pass reads the whole list, Q and dO.
constexpr int64_t kListPassEntries = 256;

enum class ListKernel : uint8_t {
  mma,  // lists/forward.cuh
  wgmma // lists/sm90
};

// Minimum heads of a group for kernels with wgmma, whose tiles have 128 rows. With fewer heads, an SM has more thread
// blocks of mma.sync, which gather more rows at a time (benchmarks/profiles/h200-steps.json, h200-list-tiles.json).
constexpr int64_t list_forward_wgmma_heads(int head_dim) { return head_dim <= 128 ? 33 : 17; }
constexpr int64_t kListBackwardWgmmaHeads = 17;
// The same in the backward pass if L2 does not hold the sums of keys.
constexpr int64_t kListWgmmaHeadsBeyondL2 = 16;

struct ListRoute {
  ListKernel kernel;
  int32_t head_dim; // of the instantiation
  ListHeads heads;
  ListTileChoice tile; // of mma
  ListTiles tiles;
  int64_t rows;   // of queries, those outside all sequences included
  int64_t count;  // tiles
  int64_t blocks; // thread blocks
  // Backward: passes per KV head, keys per pass, thread blocks per pass.
  int64_t key_parts, part_keys, pass_blocks;
  // Float32 sums in the first cleared_bytes of the workspace. dK, dV: [batch, or 1 for varlen][key][KV head][D of the
  // instantiation]. Biases and sink: the shape of the tensor.
  Part key_sums, value_sums, bias_sums, index_sums, sink_sums;
  Part query_sums; // dQ sums between passes, float32 [tile of a KV head][head][D], written by the first pass
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

ListRoute list_forward_route(const fdm_problem &p, const DeviceFacts &device, const Alignment &alignment);
// The workspace has room for the sums of all gradients, wanted or not.
ListRoute list_backward_route(const fdm_problem &p, const DeviceFacts &device, const Alignment &alignment);

} // namespace fdm::cuda
