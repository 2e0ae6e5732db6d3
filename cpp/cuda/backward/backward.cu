// SPDX-License-Identifier: BSD-3-Clause
// The backward pass on the host: what the workspace holds, and which kernels a problem needs.
#include "backward.h"

#include <cuda_runtime.h>

#include <algorithm>

#include "../dense/dense.h"
#include "../host/device.h"
#include "../host/dispatch.h"
#include "../host/fill.h"
#include "../plan/list_work.cuh"
#include "../tile/copy_rows.cuh"
#include "../tile/tile_sizes.cuh"
#include "query_sums.cuh"
#include "row_statistics.cuh"

namespace fdm::cuda {
namespace {

// Whether the keys of a block are taken from the lists of a plan. Query heads of a group with lists of their own share no keys.
bool takes_listed_keys(const fdm_problem &p) { return is_interval_plan(mask_kind(p)) && group_shares_mask(p); }

bool sums_bias_of_keys(const fdm_problem &p) { return present(p.bias) && !per_query(p.bias); }

// Whether the kernel that computes all gradients knows the form of a bias with a row for each query. A block of keys serves the
// query heads of a group, and what it writes of the gradient of the bias must be all of it. Heads may have rows of a mask of
// their own, since it tests each pair, and makes K finite.
bool has_usual_row_bias(const fdm_problem &p) {
  const fdm_tensor &bias = p.bias;
  return p.softcap <= 0 && !is_varlen(p) && group_shares_mask(p) && bias.shape[0] == p.batch &&
         bias.shape[3] == p.keys && (bias.shape[1] == p.heads || bias.shape[1] == p.kv_heads);
}

// Whether one kernel can compute all gradients, if all are wanted. Every query head of a group must keep the same keys there, since
// K of a block serves all of them, and what a key that a head drops holds must not reach that head.
bool can_fuse(const fdm_problem &p) {
  if (has_rows(p.bias))
    return has_usual_row_bias(p) && with_head_dim(p.head_dim, InstantiatedHeadDims{},
                                                  [](auto dim) { return fuses_row_bias(FDM_TILE_ARCH, dim); });
  if (mask_kind(p) == FDM_MASK_ROWS) return false;
  const auto has_heads = [&](const fdm_tensor &t) { return present(t) && t.shape[1] == p.heads; };
  return group_size(p) == 1 || !(has_heads(p.bias) || has_heads(p.mask) || has_heads(p.start));
}

template <class T> T *take(char *base, int64_t *used, int64_t count) {
  T *pointer = reinterpret_cast<T *>(base + *used);
  *used += align_256(count * int64_t(sizeof(T)));
  return pointer;
}

// Of problems with so many keys the parts of a block are chosen by the host, which knows neither how many keys are kept
// nor for how long. Waiting for the device to make a schedule takes longer than unequal parts do.
constexpr int64_t kMostUnscheduledKeys = 4096;

// Nor is a schedule worth its launch and its sums where the first keys, whose blocks come first, are those that most
// rows see: the long blocks are begun first, and where there are nearly two for each SM, the short ones even out what
// they leave. Seen on an H100 with 8192 tokens, heads of 128 and 256 took 2 to 3 % less, heads of 64 up to 4 % more.
bool is_in_order(const fdm_problem &p, const KeyWork &keys, int64_t blocks) {
  return !keys.listed && is_causal(p) && p.queries >= p.keys && keys.slot_dim > 64 && 3 * blocks >= 2 * kWantedItems;
}

// Where all blocks of keys go through the rows together, from the last tile on, the sums of dQ that they add to, and their Q
// and dO, are those of a few tiles at a time and stay in L2, which holds a fraction of those of all heads. Seen on an H100
// without a mask, with 8192 tokens: heads of 256, whose blocks of 64 keys add the most, took 15 % less, heads of 64 1 to 3 %
// less, and heads of 128 5 % more. With a mask of keys, which leaves few blocks, heads of 128 took 19 to 38 % less with up to
// half of the keys, and with all of them the same where a schedule keeps blocks of the same heads together. The small blocks
// have an order of their own.
HeadsInside heads_inside(const fdm_problem &p, const KeyWork &keys) {
  if (has_rows(p.bias)) return HeadsInside::all; // the gradient of a bias is summed over heads that share it
  if (FDM_TILE_ARCH != 90 || keys.small) return HeadsInside::none;
  const bool usual = keys.slot_dim > 128 || keys.slot_dim <= 64;
  if (mask_kind(p) == FDM_MASK_KEYS && keys.listed) {
    const bool scheduled = !is_varlen(p) && p.keys > kMostUnscheduledKeys;
    return usual || scheduled ? HeadsInside::all : HeadsInside::few;
  }
  return usual && mask_kind(p) == FDM_MASK_NONE ? HeadsInside::all : HeadsInside::none;
}

// Most blocks of keys of a segment, as many as key_segments.cuh has threads; and most rows, as it has classes.
constexpr int64_t kMostSegmentBlocks = 512, kMostSegmentRows = 4096;

// Blocks of keys of a segment of so many rows, and enough for all keys of a list, should it keep more than it says.
int64_t segment_blocks(const fdm_problem &p, const KeyWork &keys, int64_t rows) {
  const int64_t room = p.max_kept < p.keys ? std::min(p.keys, p.max_kept + rows - 1) : p.keys;
  const int64_t all = ceil_div(p.keys, keys.block_keys);
  return std::max(ceil_div(room, keys.block_keys), ceil_div(all, ceil_div(p.queries, rows)));
}

// Whether each packed sequence has as many keys as queries. The host sees only that cu_seqlens are the same. Then all
// segments of a sequence have blocks for all of its keys, should a list keep more than it says.
bool packs_equal_lengths(const fdm_problem &p) {
  return p.cu_seqlens_q.data == p.cu_seqlens_k.data && p.cu_seqlens_q.stride[0] == p.cu_seqlens_k.stride[0] &&
         !present(p.block_table) && p.q.shape[1] == p.k.shape[1] && p.queries == p.keys;
}

// The segments of a list, or numbers for them.
int64_t segment_count(const fdm_problem &p, int64_t rows) {
  return is_varlen(p) ? total_rows(p) / rows + p.batch : ceil_div(p.queries, rows);
}

// The rows of a segment, or 0: blocks of keys are for all rows. With fewer rows fewer pairs are computed that are not
// kept, but each block of keys has a prologue, and sums of keys that go on in the next segment to add to: as many rows as
// a query keeps keys are best, up to kMostWindow (seen on an H200), and at least kSteps steps. Sums of keys for many short
// segments would also take memory.
int64_t segment_rows(const fdm_problem &p, const KeyWork &keys) {
  if (!keys.listed || mask_kind(p) != FDM_MASK_INTERVALS || p.max_kept <= 0) return 0;
  if (p.queries == 0 || p.heads == 0 || (is_varlen(p) && !packs_equal_lengths(p))) return 0;
  constexpr int64_t kLeastRows = 256, kMostWindow = 1024, kSteps = 32, kMostSegments = 32;
  const int64_t window = std::min(p.max_kept, kMostWindow), steps = kSteps * keys.tile_rows / group_size(p);
  const int64_t wanted = std::max({window, steps, p.queries / kMostSegments});
  int64_t rows = kLeastRows;
  while (rows < wanted && rows < kMostSegmentRows) rows *= 2;
  // Fewer blocks of keys than this would leave SMs idle.
  const int64_t kept = std::min(p.max_kept, p.keys), heads = is_varlen(p) ? p.kv_heads : keys.heads;
  const auto blocks = [&] { return segment_count(p, rows) * (kept / keys.block_keys + 2) * heads; };
  while (rows > kLeastRows && blocks() < kWantedItems) rows /= 2;
  const int64_t most = segment_blocks(p, keys, rows);
  // Sequences of few rows each would leave most of the room of their segments empty.
  constexpr int64_t kMostRoomOfRow = 4;
  const bool is_used = !is_varlen(p) || p.batch * most * keys.block_keys <= kMostRoomOfRow * total_rows(p);
  return most <= kMostSegmentBlocks && is_used ? rows : 0;
}

// Sums of keys that several segments keep, of a head: those that rows at the borders of segments keep, or one for each key.
int64_t most_segment_sums(const fdm_problem &p, int64_t rows) {
  const int64_t borders = is_varlen(p) ? total_rows(p) / rows : ceil_div(p.queries, rows) - 1;
  return std::min(list_keys(p), std::min(p.max_kept, p.keys) * borders);
}

// Lays out the segments of so many rows, and the blocks of keys of all of them.
void lay_out_segments(const fdm_problem &p, int64_t rows, char *base, int64_t *used, KeyWork &keys) {
  KeySegments &segments = keys.segments;
  const int64_t lists = list_tensor(p).shape[0] * list_tensor(p).shape[1], size = keys.block_keys;
  const int64_t count = segment_count(p, rows);
  if (is_varlen(p)) keys.heads = int32_t(p.kv_heads);
  segments.rows = int32_t(rows);
  segments.count = int32_t(count);
  segments.blocks = int32_t(segment_blocks(p, keys, rows));
  keys.blocks = int32_t(count * segments.blocks);
  segments.leading = int32_t(std::min<int64_t>(p.max_kept / size, segments.blocks));
  keys.ordered = take<KeyRows>(base, used, lists * keys.blocks * size);
  segments.order = take<SegmentBlock>(base, used, lists * keys.blocks);
  segments.live = take<int32_t>(base, used, lists * count);
  segments.most_sums = int32_t(most_segment_sums(p, rows));
  if (is_varlen(p) && segments.most_sums < list_keys(p)) segments.row_sums = int32_t(std::min(p.max_kept, p.keys));
  segments.sums = take<float>(base, used, int64_t(keys.heads) * segments.most_sums * 2 * keys.slot_dim);
  segments.bias_sums = take<float>(base, used, int64_t(keys.heads) * segments.most_sums);
  segments.sum_keys = take<int32_t>(base, used, lists * segments.most_sums);
  segments.sum_count = take<int32_t>(base, used, lists * list_sequences(p));
  keys.parts = 1;
  keys.max_items = int32_t(std::min<int64_t>(INT32_MAX, int64_t(keys.blocks) * keys.heads));
}

// Whether the small blocks of keys take consecutive keys, though a mask has lists of kept ones. A selection of many of
// so few keys leaves nearly every block one that is kept to the end. Ordering keys would spare few steps, and take as long.
bool takes_consecutive_keys(const fdm_problem &p) {
  constexpr int64_t kMostKeys = 512, kLeastShare = 8;
  return mask_kind(p) == FDM_MASK_INTERVALS && p.keys <= kMostKeys && p.max_kept >= ceil_div(p.keys, kLeastShare);
}

// About how many keys the rows of a segment keep together after a selection with random biases: of i rows that see one key
// more each, max_kept / i begin to keep it.
int64_t keys_of_segment(const fdm_problem &p, int64_t rows) {
  return p.max_kept + 2 * p.max_kept * rows / std::max<int64_t>(1, p.keys);
}

// The work of small blocks of keys, as far as it is known before: a half of the steps are beyond a causal limit or dropped.
struct SmallBlockWork {
  int64_t blocks, steps; // of the block with the most
  double mean_steps;

  SmallBlockWork(const fdm_problem &p, const KeyWork &keys, int64_t rows) {
    const int64_t of_rows = keys.listed ? std::min(p.keys, keys_of_segment(p, rows)) : p.keys;
    blocks = ceil_div(of_rows, keys.block_keys) * ceil_div(p.queries, rows) * keys.heads;
    steps = ceil_div(rows, keys.tile_rows) * group_size(p);
    const bool is_partial = is_causal(p) || mask_kind(p) != FDM_MASK_NONE;
    mean_steps = double(is_partial ? steps + group_size(p) : 2 * steps) / 2;
  }

  // How many blocks of threads share the steps of each. The longest block may take longer than all of them keep the SMs busy;
  // but each block of threads takes as long as some more steps to begin and to end. Times are those seen on an H100, where a step takes
  // longer beside others.
  int32_t shares() const {
    constexpr double kStepMicroseconds = 3.0, kCrowdedStepMicroseconds = 4.2, kOtherSteps = 3.0, kLeastGain = 0.9;
    constexpr double kSlots = 3 * 132; // blocks of threads on the SMs at a time
    const auto microseconds = [&](int32_t number) {
      const double all = double(blocks) * (mean_steps + number * kOtherSteps) / kSlots;
      return std::max(kStepMicroseconds * (double(steps) / number + kOtherSteps), kCrowdedStepMicroseconds * all);
    };
    int32_t number = 1;
    while (2 * number <= std::min<int64_t>(kMostShares, steps) &&
           microseconds(2 * number) < kLeastGain * microseconds(number))
      number *= 2;
    return number;
  }

  // Whether each block of threads has so few steps that the other kernel would take longer. That one divides few blocks better.
  bool has_few_steps(int32_t number) const {
    constexpr int64_t kMostSteps = 32, kManyBlocks = 256;
    return ceil_div(steps, number) <= (blocks * number >= kManyBlocks ? kMostSteps : kMostSteps / 2);
  }
};

// Whether the blocks of keys of a head sum dq in a chain. That spares sums in global memory, which pays where L2 does not
// hold them, and adds in a fixed order. Blocks of a cluster begin together but do not end together: with eight of them, or with
// query heads that share keys, SMs wait for more than is spared. With heads of 32 a tile of dq is half as large but takes as
// long to be handed on (H100, 64 x 8 heads, 256 keys: 87 us without a chain, 100 us with one).
bool is_chained(const fdm_problem &p, const KeyWork &keys) {
  constexpr int64_t kMostChainedBlocks = 4;
  const int64_t sum_bytes = p.batch * p.heads * p.queries * keys.slot_dim * int64_t(sizeof(float));
  const bool spares_time = keys.slot_dim > 32 && 4 * sum_bytes >= 3 * kL2Bytes;
  return !keys.listed && group_size(p) == 1 && ceil_div(p.keys, keys.block_keys) <= kMostChainedBlocks &&
         (p.flags & FDM_DETERMINISTIC || spares_time);
}

// Chooses the kernel of small blocks where blocks of keys have few steps. It adds to dq three times as often as the other,
// which is faster with more steps, and where it has hardly two blocks for a segment, unless one small block does (seen on an
// H100 and an H200). It knows no lists but those of segments, which have few steps at any length, and no schedule.
void choose_small_blocks(const fdm_problem &p, KeyWork &keys) {
  constexpr int64_t kMostKeys = 2048;
  if (FDM_TILE_ARCH != 90 || keys.slot_dim > kSmallBlock.most_head_dim || is_varlen(p)) return;
  KeyWork small = keys;
  small.small = true;
  small.block_keys = kSmallBlock.keys;
  small.tile_rows = kSmallBlock.rows;
  small.listed = keys.listed && !takes_consecutive_keys(p);
  const int64_t rows = std::min(p.queries, small.listed ? segment_rows(p, small) : p.queries);
  const int64_t kept = keys_of_segment(p, rows);
  if (small.listed ? kept > small.block_keys && kept < 2 * keys.block_keys : p.keys > kMostKeys) return;
  if (rows == 0) return;
  const SmallBlockWork work(p, small, rows);
  small.chained = is_chained(p, small);
  if (!small.chained) small.shares = work.shares();
  if (work.has_few_steps(small.shares)) keys = small;
}

// Sizes of the blocks of keys, and how they go through the rows.
KeyWork choose_blocks(const fdm_problem &p, bool fused) {
  KeyWork keys{};
  keys.shares = 1;
  keys.slot_dim = with_head_dim(p.head_dim, InstantiatedHeadDims{}, [&](auto dim) {
    constexpr DkdvTileChoice tile = dkdv_tile(FDM_TILE_ARCH, decltype(dim)::value);
    constexpr FusedTileChoice fused_choice = fused_tile(FDM_TILE_ARCH, decltype(dim)::value);
    keys.block_keys = fused ? fused_choice.keys : tile.keys;
    keys.tile_rows = fused ? fused_choice.rows : tile.rows;
    return int32_t(decltype(dim)::value);
  });
  keys.listed = takes_listed_keys(p);
  keys.heads = int32_t(p.batch * p.kv_heads);
  if (fused) choose_small_blocks(p, keys);
  if (fused) keys.heads_inside = heads_inside(p, keys);
  return keys;
}

// Whether one kernel may compute all gradients. Only a chain of blocks adds to dq in a fixed order.
bool may_fuse(const fdm_problem &p) {
  return can_fuse(p) && (!(p.flags & FDM_DETERMINISTIC) || choose_blocks(p, true).chained);
}

// How many heads of keys are gone through together: enough for all SMs, but else no more than L2 has room for Q, dO and
// the sums of dQ of, until all blocks of their keys are done.
int32_t heads_together(const fdm_problem &p, const KeyWork &keys) {
  if (is_varlen(p)) return keys.heads;
  constexpr int64_t kRowBytes = 2 + 2 + 4, kKeyBytes = 2 + 2;
  const int64_t bytes = (p.queries * group_size(p) * kRowBytes + p.keys * kKeyBytes) * keys.slot_dim;
  const int64_t enough = ceil_div(2 * kWantedItems, std::max<int64_t>(1, keys.blocks));
  const int64_t groups = ceil_div(keys.heads, std::max(enough, kL2Bytes / std::max<int64_t>(1, bytes)));
  return int32_t(ceil_div(keys.heads, std::max<int64_t>(1, groups)));
}

// Fills in what depends on the problem and on whether one kernel computes all gradients; `bytes` becomes the size of the
// workspace.
BackwardParams lay_out(const fdm_problem &p, bool fused, void *workspace, int64_t *bytes) {
  BackwardParams params{};
  params.p = p;
  params.group = int32_t(group_size(p));
  KeyWork &keys = params.keys;
  keys = choose_blocks(p, fused);
  keys.buckets = int32_t(ceil_div(p.keys, kBucketKeys));
  keys.blocks = int32_t(keys.listed ? keys.buckets * ceil_div(std::min<int64_t>(p.keys, kBucketKeys), keys.block_keys)
                                    : ceil_div(p.keys, keys.block_keys));
  params.bias_heads = sums_bias_of_keys(p) && p.bias.shape[1] == p.heads ? int32_t(group_size(p)) : 1;

  auto *base = static_cast<char *>(workspace);
  int64_t used = 0;
  const int64_t batches = is_varlen(p) ? 1 : p.batch;
  params.statistics = take<RowStatistics>(base, &used, batches * p.heads * total_rows(p));
  if (present(p.sink)) params.sink_shares = take<float>(base, &used, p.heads * batches * total_rows(p));
  if (fused && !keys.chained) {
    QuerySums &sums = params.query_sums;
    sums.tile_rows = keys.tile_rows;
    sums.head_rows = query_sum_rows(p, sums.tile_rows);
    sums.dim = keys.slot_dim;
    sums.data = take<float>(base, &used, query_sum_count(p, sums));
  }
  if (sums_bias_of_keys(p)) {
    const int64_t heads = p.kv_heads * params.bias_heads, all_keys = list_keys(p);
    float *sums = take<float>(base, &used, batches * heads * all_keys);
    params.bias_sums = {sums, {batches, heads, 1, all_keys}, {heads * all_keys, all_keys, 0, 1}, FDM_FLOAT32, 0};
  }
  if (const int64_t rows = fused ? segment_rows(p, keys) : 0) {
    lay_out_segments(p, rows, base, &used, keys);
    keys.together = heads_together(p, keys);
    *bytes = used;
    return params;
  }
  keys.together = heads_together(p, keys);
  if (keys.listed) {
    const int64_t lists = list_tensor(p).shape[0] * list_tensor(p).shape[1];
    keys.ordered = take<KeyRows>(base, &used, lists * list_keys(p));
    keys.ranges = take<RowRange>(base, &used, lists * list_sequences(p) * keys.blocks);
  }
  const int64_t blocks = int64_t(keys.blocks) * keys.heads;
  // No part is shorter than two thirds of kLeastSteps, so few steps need no slots.
  const int64_t steps = group_size(p) * (p.queries / keys.tile_rows + 1);
  const int64_t parts = keys.small ? 1 : (2 * steps + kLeastSteps) / (2 * kLeastSteps);
  if (is_varlen(p) || (p.keys > kMostUnscheduledKeys && !is_in_order(p, keys, blocks))) {
    // The schedule makes do with the slots that there are.
    keys.slot_count = int32_t(parts > 1 ? std::min(kWantedItems, blocks * parts) : 0);
    // The last block of a sequence may be a part of one, as may that of a bucket.
    const int64_t partial = p.batch + (keys.listed ? list_keys(p) / kBucketKeys + 1 : 0);
    const int64_t existing = is_varlen(p) ? p.kv_heads * (list_keys(p) / keys.block_keys + partial) : blocks;
    keys.max_items = int32_t(std::min<int64_t>(INT32_MAX, std::min(existing, blocks) + keys.slot_count));
    keys.items = take<KeyItem>(base, &used, keys.max_items);
    keys.item_count = take<int32_t>(base, &used, 1);
  } else {
    keys.parts = int32_t(std::max<int64_t>(1, std::min(parts, kWantedItems / std::max<int64_t>(1, blocks))));
    keys.max_items = int32_t(std::min<int64_t>(INT32_MAX, blocks * keys.parts));
    keys.slot_count = keys.parts > 1 ? keys.max_items : 0;
  }
  keys.slot_floats = int64_t(keys.block_keys) * (2 * keys.slot_dim + params.bias_heads);
  keys.slots = take<float>(base, &used, keys.slot_count * keys.slot_floats);
  *bytes = used;
  return params;
}

// Runs steps in order until one fails.
template <class... Steps> cudaError_t run_all(const Steps &...steps) {
  cudaError_t error = cudaSuccess;
  (void)((error = steps(), error == cudaSuccess) && ...);
  return error;
}

cudaError_t run_key_gradients(const BackwardParams &params, cudaStream_t stream) {
  return run_all(
      [&] {
        return with_kernel_types(params.p, [&](auto element, auto dim) {
          return launch_dkdv<typename decltype(element)::Type, decltype(dim)::value>(params, stream);
        });
      },
      [&] { return params.query_sums.data ? launch_query_sums(params, stream) : cudaSuccess; },
      [&] { return params.keys.slot_count > 0 ? launch_key_sum(params, stream) : cudaSuccess; },
      [&] { return params.keys.segments.most_sums > 0 ? launch_key_segment_sums(params, stream) : cudaSuccess; },
      [&] { return params.reduces_bias ? launch_bias_reduce(params, stream) : cudaSuccess; });
}

} // namespace

int64_t backward_workspace_bytes(const fdm_problem &p) {
  if (is_dense(p)) return dense_backward_workspace_bytes(p);
  int64_t bytes, fused_bytes = 0;
  lay_out(p, false, nullptr, &bytes);
  if (may_fuse(p)) lay_out(p, true, nullptr, &fused_bytes);
  return std::max(bytes, fused_bytes);
}

cudaError_t run_backward(const fdm_problem &p, const fdm_backward_args &args, const void *plan, void *workspace) {
  const bool wants_bias_sums = present(args.dbias) && sums_bias_of_keys(p);
  const bool row_bias = present(args.dbias) && !wants_bias_sums;
  const bool key_gradients = present(args.dk) || present(args.dv) || wants_bias_sums;
  const bool aligned =
      rows_are_aligned(p.q, p.head_dim) && rows_are_aligned(p.k, p.head_dim) && rows_are_aligned(p.v, p.head_dim);
  const bool dout_aligned = rows_are_aligned(args.dout, p.head_dim);
  const bool fused = aligned && dout_aligned && present(args.dq) && key_gradients && may_fuse(p);
  int64_t bytes;
  BackwardParams params = lay_out(p, fused, workspace, &bytes);
  params.a = args;
  params.plan = plan_of(p, plan);
  params.aligned = aligned;
  params.dout_aligned = dout_aligned;
  params.order = tile_order(p);
  params.wants_bias_sums = wants_bias_sums;
  if (wants_bias_sums) {
    params.reduces_bias = !std::equal(args.dbias.shape, args.dbias.shape + 4, params.bias_sums.shape);
    if (!params.reduces_bias) params.bias_sums = args.dbias;
  }
  params.beside_dq = present(args.dq) && !fused;
  const auto stream = static_cast<cudaStream_t>(p.context.stream);

  const bool nothing = p.batch == 0 || p.heads == 0 || p.queries == 0 || p.keys == 0;
  if (nothing)
    return run_all([&] { return launch_fill_zero(args.dq, stream); }, [&] { return launch_fill_zero(args.dk, stream); },
                   [&] { return launch_fill_zero(args.dv, stream); },
                   [&] { return launch_fill_zero(args.dbias, stream); },
                   [&] { return launch_fill_zero(args.dsink, stream); });
  if (is_dense(p)) return run_dense_backward(p, args, workspace);
  if (int64_t(params.keys.blocks) * params.keys.heads + kWantedItems > INT32_MAX) return cudaErrorInvalidConfiguration;
  // Keys that are in no list, and rows and keys that belong to no sequence, are written by no other kernel.
  params.clears_keys = is_varlen(p) || params.keys.listed;
  const bool scheduled = key_gradients && params.keys.parts == 0;
  if (scheduled && fused && FDM_TILE_ARCH == 90)
    if (cudaError_t error = sm_count(&params.keys.sms)) return error;
  // The kernel that computes all gradients visits no pair of a row and a key that a mask is known to drop.
  const bool leaves_pairs = is_causal(p) || mask_kind(p) != FDM_MASK_NONE;

  return run_all([&] { return is_varlen(p) ? launch_fill_zero(args.dq, stream) : cudaSuccess; },
                 [&] {
                   return row_bias && (is_varlen(p) || (fused && leaves_pairs)) ? launch_fill_zero(args.dbias, stream)
                                                                                : cudaSuccess;
                 },
                 [&] { return launch_prepare(params, key_gradients, stream); },
                 [&] { return scheduled ? launch_key_schedule(params, stream) : cudaSuccess; },
                 [&] {
                   if (!present(args.dq) || fused) return cudaSuccess;
                   return with_kernel_types(p, [&](auto element, auto dim) {
                     return launch_dq<typename decltype(element)::Type, decltype(dim)::value>(params, stream);
                   });
                 },
                 [&] { return key_gradients ? run_key_gradients(params, stream) : cudaSuccess; },
                 [&] {
                   if (!row_bias || fused) return cudaSuccess;
                   return with_kernel_types(p, [&](auto element, auto dim) {
                     return launch_row_bias<typename decltype(element)::Type, decltype(dim)::value>(params, stream);
                   });
                 },
                 [&] { return present(args.dsink) ? launch_sink_reduce(params, stream) : cudaSuccess; });
}

} // namespace fdm::cuda
