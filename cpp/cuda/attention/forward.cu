// SPDX-License-Identifier: BSD-3-Clause
// The forward pass on the host: which rows share a block, and over how many blocks the columns are divided.
#include "forward.h"

#include <algorithm>

#include "../../problem.h"
#include "device.h"
#include "dispatch.h"
#include "shared_tile.cuh"
#include "tiles.cuh"

namespace fdm::cuda {
namespace {

// Blocks of columns that a split must have to be worth a combine step.
constexpr int64_t kBlocksOfSplit = 4;
constexpr int64_t kMaxSplits = 32;

// Can the rows of all heads of a group share a tile? They must share its columns and a per-key bias, and fit.
bool packs_heads(const fdm_problem &p, int rows) {
  const int64_t group = group_size(p);
  const auto own_heads = [&](const fdm_tensor &t) { return present(t) && t.shape[1] == p.heads && group > 1; };
  if (own_heads(p.mask) || own_heads(p.start)) return false;
  if (own_heads(p.bias) && !per_query(p.bias)) return false;
  return group > 1 && rows % group == 0 && p.queries * group <= rows;
}

int64_t blocks_without_splits(const fdm_problem &p, int rows) {
  const int64_t heads_per_tile = packs_heads(p, rows) ? group_size(p) : 1;
  return p.batch * (p.heads / heads_per_tile) * ceil_div(p.queries, rows / heads_per_tile);
}

// Few rows (decode) leave most of the chip idle, unless the columns are divided.
int64_t choose_splits(const fdm_problem &p, const ForwardTileSize &tile, int asked, int multiprocessors) {
  const int64_t blocks = blocks_without_splits(p, tile.rows);
  if (blocks == 0) return 1;
  const int64_t most = std::max<int64_t>(1, std::min(kMaxSplits, p.keys / (tile.columns * kBlocksOfSplit)));
  if (asked > 0) return std::min<int64_t>(asked, most);
  return std::max<int64_t>(1, std::min(most, 2 * multiprocessors / blocks));
}

int64_t partial_rows(const fdm_problem &p) { return p.batch * p.heads * p.queries; }

} // namespace

ForwardTileSize forward_tile_size(int64_t head_dim) {
  return with_head_dim(head_dim, InstantiatedHeadDims{}, [](auto dim) {
    constexpr ForwardTileChoice tile = forward_tile(FDM_TILE_ARCH, dim);
    return ForwardTileSize{tile.rows, tile.columns};
  });
}

// Room for the most splits that any device would choose: the size must not depend on the current device.
int64_t forward_workspace_bytes(const fdm_problem &p) {
  const ForwardTileSize tile = forward_tile_size(p.head_dim);
  const int64_t splits = choose_splits(p, tile, 0, kMaxSplits * int(blocks_without_splits(p, tile.rows)));
  if (splits == 1 || blocks_without_splits(p, tile.rows) > 512) return 0;
  return splits * partial_rows(p) * (p.head_dim + 2) * int64_t(sizeof(float));
}

cudaError_t run_forward(const fdm_problem &p, const fdm_forward_args &args, const void *plan, void *workspace) {
  if (p.batch == 0 || p.queries == 0) return cudaSuccess;
  int count;
  if (cudaError_t error = multiprocessors(&count)) return error;
  const ForwardTileSize tile = forward_tile_size(p.head_dim);
  ForwardParams params{};
  params.p = p, params.a = args, params.plan = plan;
  params.heads_per_tile = packs_heads(p, tile.rows) ? int32_t(group_size(p)) : 1;
  params.tiles = int32_t(ceil_div(p.queries, tile.rows / params.heads_per_tile));
  params.splits = forward_workspace_bytes(p) ? int32_t(choose_splits(p, tile, args.splits, count)) : 1;
  params.partial_out = static_cast<float *>(workspace);
  params.partial_max = params.partial_out + params.splits * partial_rows(p) * p.head_dim;
  params.partial_sum = params.partial_max + params.splits * partial_rows(p);
  params.aligned =
      rows_are_aligned(p.q, p.head_dim) && rows_are_aligned(p.k, p.head_dim) && rows_are_aligned(p.v, p.head_dim);
  const auto stream = static_cast<cudaStream_t>(p.context.stream);
  const cudaError_t error = with_kernel_types(p, [&](auto element, auto dim) {
    return launch_forward<typename decltype(element)::Type, decltype(dim)::value>(params, stream);
  });
  if (error || params.splits == 1) return error;
  return launch_combine(params, stream);
}

} // namespace fdm::cuda
