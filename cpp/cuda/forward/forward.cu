// SPDX-License-Identifier: BSD-3-Clause
// The forward pass on the host: which rows share a block, and over how many blocks the columns are divided.
#include "forward.h"

#include <algorithm>

#include "../../indexing.h"
#include "../dense/dense.h"
#include "../host/device.h"
#include "../host/dispatch.h"
#include "../host/fill.h"
#include "../tile/copy_rows.cuh"
#include "../tile/tile_sizes.cuh"
#include "decode.h"

namespace fdm::cuda {
namespace {

// Blocks of columns that a split must have to be worth a combine step. Only the device knows how many columns a mask
// keeps; splits that find none end at once.
constexpr int64_t kBlocksOfSplit = 4;
constexpr int64_t kMaxSplits = 32; // combine.cu has a lane for each
constexpr int kMostSms = 256;

// The columns that a tile may have.
int64_t most_columns(const fdm_problem &p) {
  return p.max_kept > 0 ? std::min(p.keys, p.max_kept + kTileRows - 1) : p.keys;
}

// Whether tiles have so few columns that the kernel of small_tiles.cuh serves them. It ends at a head dimension of 128. With more
// columns the persistent kernel is faster: seen on an H100, with 639, small tiles take 11 % less for heads of 64, and 8 %
// more for heads of 128.
bool has_few_columns(const fdm_problem &p) {
  return p.head_dim <= 128 && most_columns(p) <= (p.head_dim <= 64 ? 640 : 512);
}

// Which kernel runs, and how rows and columns are divided over its blocks.
struct Division {
  bool decode;
  int heads_per_tile;                // 1, or the heads of a group
  int64_t tiles;                     // tiles of the longest sequence
  int64_t blocks;                    // without splits
  int64_t least_splits, most_splits; // if there are any
  int wanted_blocks;                 // wanted on each SM
};

Division divide(const fdm_problem &p) {
  const int64_t group = group_size(p), group_rows = p.queries * group;
  const ForwardTileSize tile = forward_tile_size(p.head_dim);
  const bool share = heads_share_columns(p), shared_decode = share && group_rows <= kDecodeRows;
  // The general kernel takes a bias with a row for each query for rows of one head.
  const bool shared_forward = share && !has_rows(p.bias) && tile.rows % group == 0 && group_rows <= tile.rows;
  Division division;
  division.decode = shared_decode || (!shared_forward && p.queries <= kDecodeRows);
  division.heads_per_tile = shared_decode || (!division.decode && shared_forward) ? int(group) : 1;
  const int64_t rows = division.decode ? kDecodeRows : tile.rows;
  division.tiles = ceil_div(p.queries * division.heads_per_tile, rows);
  division.blocks = p.batch * (p.heads / division.heads_per_tile) * division.tiles;
  division.most_splits = std::clamp<int64_t>(p.keys / (tile.columns * kBlocksOfSplit), 1, kMaxSplits);
  // Kernels with wgmma, which have no splits, compute a tile sooner than others compute and merge a few parts of it, and always
  // one of few columns. Seen on an H100 without a mask, 4096 keys and heads of 64: with two parts 74 us, and undivided 46; with
  // four the same as undivided; with eight 29, and undivided 45. The condition is theirs, but for addresses.
  const bool may_use_wgmma = FDM_TILE_ARCH == 90 && !division.decode && division.heads_per_tile == 1 &&
                             !has_rows(p.bias) && p.head_dim % 8 == 0;
  division.least_splits = may_use_wgmma ? 5 : 2;
  if (may_use_wgmma && has_few_columns(p)) division.most_splits = 1;
  // Two blocks run on an SM at a time. Twice as many end closer together where their work is unequal, as a causal mask
  // makes it. Merging their results costs little where a block has as much work as a bias for each query makes, unless heads
  // are so large that an SM has room for one block: there, with 4096 queries, it cost a fifth (seen on an H100).
  division.wanted_blocks = has_rows(p.bias) && p.head_dim <= 128 ? 4 : 2;
  if (division.decode) division.wanted_blocks = decode_blocks(p.head_dim);
  return division;
}

// Few rows (decode) leave most of the chip idle, unless the columns are divided.
int64_t choose_splits(const Division &division, int sms) {
  if (division.blocks == 0) return 1;
  const int64_t splits = std::min(division.wanted_blocks * sms / division.blocks, division.most_splits);
  return splits >= division.least_splits ? splits : 1;
}

// Splits of a decoding call that are a cluster, which merges their results without another kernel; 1 if none is. Where more keys
// are kept, more SMs than a cluster has are worth that kernel; a mask may keep few. Blocks of clusters, which have to run at the
// same time, share SMs badly: with twice as many blocks as SMs they took twice as long as others (seen on an H200).
int64_t cluster_splits(const fdm_problem &p, const Division &division, int sms) {
  constexpr int64_t kKeysOfSplit = 128;
  const int64_t most_keys = mask_kind(p) == FDM_MASK_NONE ? 2048 : 8192;
  if (!kHasClusters || !division.decode || division.blocks == 0 || p.keys > most_keys) return 1;
  return std::clamp<int64_t>(std::min(p.keys / kKeysOfSplit, sms / division.blocks), 1, kMostClusterSplits);
}

// How many splits there is room for. This must not depend on the current device, so it is made for more SMs than any
// device has.
int64_t room_for_splits(const Division &division) { return choose_splits(division, kMostSms); }

// Whether kernels that copy consecutive keys as boxes serve the problem.
bool copies_boxes(const fdm_problem &p) { return mask_kind(p) == FDM_MASK_NONE && !present(p.block_table); }

// Whether sequences are so short that the kernel of small_boxes.cuh serves them, not that of forward_boxes.cuh. Seen on an
// H100 with heads of 64: 10 to 13 % less time with 512 keys, and with a bias from 7 % less to 1 % more; 4 to 7 % less with 1024 keys
// in 1024 tiles and more, 4 to 6 % more with a bias, and 18 % more in 128 tiles.
bool has_short_columns(const fdm_problem &p, const Division &division) {
  constexpr int64_t kAlwaysShort = 512, kMostKeys = 1024, kManyTiles = 512;
  if (!copies_boxes(p) || p.head_dim > 64) return false;
  if (p.keys <= kAlwaysShort) return true;
  return p.keys <= kMostKeys && !present(p.bias) && division.blocks >= kManyTiles;
}

// Whether the blocks of threads of a persistent kernel get tiles in the order in which they ask for them. With a fixed order
// some blocks are done much earlier than others, where tiles are long or of different lengths. The counter that this takes
// must be cleared first, so a block must have several tiles, of many columns.
//
// The counter lies in the workspace, which belongs to this call alone, and a memset clears it on the stream before the
// kernel. So calls that share a plan may run at the same time, and a CUDA graph clears it each time that it is launched.
bool gives_out_tiles(const fdm_problem &p, const Division &division) {
  constexpr int64_t kTilesOfBlock = 3, kUsualSms = 132, kColumns = 1024;
  return FDM_TILE_ARCH == 90 && !division.decode && division.heads_per_tile == 1 && !has_rows(p.bias) &&
         room_for_splits(division) == 1 && most_columns(p) >= kColumns &&
         division.blocks >= kTilesOfBlock * kUsualSms && !has_short_columns(p, division);
}

} // namespace

bool heads_share_columns(const fdm_problem &p) {
  const auto own_heads = [&](const fdm_tensor &t) { return present(t) && t.shape[1] == p.heads; };
  if (group_size(p) == 1) return false;
  return !own_heads(p.mask) && !own_heads(p.start) && !own_heads(p.bias);
}

ForwardTileSize forward_tile_size(int64_t head_dim) {
  return with_head_dim(head_dim, InstantiatedHeadDims{}, [](auto dim) {
    constexpr ForwardTileChoice tile = forward_tile(FDM_TILE_ARCH, dim);
    return ForwardTileSize{tile.rows, tile.columns};
  });
}

bool needs_no_plan(const fdm_problem &p) {
  return p.flags & FDM_FORWARD_ONLY && mask_kind(p) == FDM_MASK_KEYS && p.queries == 1 && divide(p).decode;
}

int64_t forward_workspace_bytes(const fdm_problem &p) {
  if (is_dense(p)) return dense_forward_workspace_bytes(p);
  const Division division = divide(p);
  if (gives_out_tiles(p, division)) return sizeof(uint32_t);
  return partials_bytes(p, room_for_splits(division));
}

cudaError_t run_forward(const fdm_problem &p, const fdm_forward_args &args, const void *plan, void *workspace) {
  const auto stream = static_cast<cudaStream_t>(p.context.stream);
  if (is_varlen(p))
    if (cudaError_t error = launch_unused_rows(p, args, stream)) return error;
  if (p.batch == 0 || p.queries == 0) return cudaSuccess;
  if (is_dense(p)) return run_dense_forward(p, args, workspace);
  int count;
  if (cudaError_t error = sm_count(&count)) return error;
  const Division division = divide(p);
  const int64_t room = room_for_splits(division);
  if (decodes_directly(p, args, count, room)) return run_direct_decode(p, args, count, room, workspace);
  ForwardParams params{};
  params.p = p;
  params.a = args;
  params.plan = plan_of(p, plan);
  params.factors = ScoreFactors(p);
  params.bias_factor = params.factors.may_begin_with_bias() ? 1.0f / params.factors.scale : 0.0f;
  params.heads_per_tile = division.heads_per_tile;
  params.heads_reciprocal = 65536u / uint32_t(division.heads_per_tile) + 1;
  params.tiles = int32_t(division.tiles);
  params.order = tile_order(p);
  params.consecutive = copies_boxes(p);
  params.few_columns = has_few_columns(p);
  params.short_columns = has_short_columns(p, division);
  params.finds_keys = needs_no_plan(p);
  const int64_t splits = args.splits > 0 ? args.splits : choose_splits(division, count);
  params.splits = int32_t(std::clamp<int64_t>(splits, 1, room));
  if (const int64_t in_cluster = cluster_splits(p, division, count); args.splits == 0 && in_cluster > 1) {
    params.splits = int32_t(in_cluster);
    params.merges_in_cluster = true;
  }
  params.partials = partials_at(workspace, p, params.splits);
  params.aligned = rows_are_aligned(p.q, p.head_dim) && rows_are_aligned(p.k, p.head_dim) &&
                   rows_are_aligned(p.v, p.head_dim) && rows_are_aligned(args.out, p.head_dim);
  params.rows = RowPlaces(p);
  if (gives_out_tiles(p, division) && params.aligned && params.rows.possible) {
    params.tickets = static_cast<uint32_t *>(workspace);
    if (cudaError_t error = cudaMemsetAsync(params.tickets, 0, sizeof(uint32_t), stream)) return error;
  }
  const cudaError_t error = with_kernel_types(p, [&](auto element, auto dim) {
    using Element = typename decltype(element)::Type;
    if (division.decode) return launch_decode<Element, decltype(dim)::value>(params, stream);
    return launch_forward<Element, decltype(dim)::value>(params, stream);
  });
  if (error || params.splits == 1 || params.merges_in_cluster) return error;
  return launch_combine(p, args, params.splits, params.partials, stream);
}

} // namespace fdm::cuda
