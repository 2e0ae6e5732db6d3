// SPDX-License-Identifier: BSD-3-Clause
// The route of the backward pass: the kernels, the division of key blocks, and the layout of the workspace.
#include <algorithm>

#include "../tile/sm90/tile_sizes.cuh"
#include "../tile/tile_sizes.cuh"
#include "key_parts.h"
#include "members.h"
#include "orders.h"
#include "route.h"
#include "workspaces.h"

namespace fdm::cuda {
namespace {

// Whether the keys of a block come from the lists of a plan. Query heads of a group with separate lists share no key
// blocks.
bool takes_planned_keys(const fdm_problem &p) {
  return is_interval_plan(mask_kind(p)) && group_shares_interval_plan(p) && !plans_runs(p);
}

bool sums_bias_of_keys(const fdm_problem &p) { return present(p.bias) && !is_per_query(p.bias); }

// Whether the kernel that computes all gradients supports the form of a per-query bias. A key block serves the query
// heads of a group, and it must write the complete bias gradient. Heads may have separate per-query masks: the kernel
// tests each pair and makes K finite.
bool is_fusible_per_query_bias(const fdm_problem &p) {
  const fdm_tensor &bias = p.bias;
  return p.softcap <= 0 && !is_varlen(p) && group_shares_interval_plan(p) && bias.shape[0] == p.batch &&
         bias.shape[3] == p.keys && (bias.shape[1] == p.heads || bias.shape[1] == p.kv_heads);
}

// Whether one kernel can compute all gradients, if all are requested. K of a block then serves all query heads of a
// group, so they must keep the same keys: a non-finite key must not reach a head that drops it.
bool can_fuse(const fdm_problem &p, const DeviceFacts &device) {
  const BuiltFor &built = *device.built;
  if (has_narrow_values(p) && (p.softcap > 0 || mask_kind(p) == FDM_MASK_ROWS)) return false;
  if (has_query_rows(p.bias))
    return is_fusible_per_query_bias(p) && fuses_row_bias(built.tile_arch, built.all.serving(p.head_dim));
  const auto has_heads = [&](const fdm_tensor &t) { return t.shape[1] == p.heads; };
  // Heads may have separate per-query masks: the kernel tests each pair and makes K finite.
  if (mask_kind(p) == FDM_MASK_ROWS)
    return p.softcap <= 0 && fuses_row_mask(built.tile_arch, built.all.serving(p.head_dim)) &&
           (group_size(p) == 1 || !has_heads(p.bias));
  return group_size(p) == 1 || !(has_heads(p.bias) || has_heads(p.mask) || has_heads(p.start));
}

// Whether each packed sequence has as many keys as queries. The host knows only that cu_seqlens are the same. Equal
// lengths ensure that the segments of a sequence have blocks for all of its keys, even if a list exceeds max_kept.
bool packs_equal_lengths(const fdm_problem &p) {
  return p.cu_seqlens_q.data == p.cu_seqlens_k.data && p.cu_seqlens_q.stride[0] == p.cu_seqlens_k.stride[0] &&
         !present(p.block_table) && p.q.shape[1] == p.k.shape[1] && p.queries == p.keys;
}

// The segments of a list; for packed sequences, an upper bound of their numbers.
int64_t segment_count(const fdm_problem &p, int64_t rows) {
  return is_varlen(p) ? total_rows(p) / rows + p.batch : ceil_div(p.queries, rows);
}

// Key blocks of a segment of `rows` rows. All segments together have blocks for all keys of a list, in case the list
// exceeds max_kept.
int64_t segment_blocks(const fdm_problem &p, const KeyDivision &keys, int64_t rows) {
  const int64_t room = p.max_kept < p.keys ? std::min(p.keys, p.max_kept + rows - 1) : p.keys;
  const int64_t all = ceil_div(p.keys, keys.block_keys);
  return std::max(ceil_div(room, keys.block_keys), ceil_div(all, ceil_div(p.queries, rows)));
}

// The number of key sums of a head, for keys that several segments keep: the keys that rows at segment borders keep,
// or at most one sum per key.
int64_t max_segment_sums(const fdm_problem &p, int64_t rows) {
  const int64_t borders = is_varlen(p) ? total_rows(p) / rows : ceil_div(p.queries, rows) - 1;
  return std::min(total_keys(p), std::min(p.max_kept, p.keys) * borders);
}

// The approximate number of keys that the rows of a segment keep together, after a selection with random biases: row
// i sees one key more than row i - 1, and keeps it with probability max_kept / i.
int64_t keys_of_segment(const fdm_problem &p, int64_t rows) {
  return kept_bound(p) + 2 * kept_bound(p) * rows / std::max<int64_t>(1, p.keys);
}

// An estimate of the work of small key blocks: half of the steps are beyond a causal limit or dropped.
struct SmallBlockWork {
  const RouteTable &table;
  int64_t blocks, steps; // steps: of the block with the most
  double mean_steps;

  SmallBlockWork(const fdm_problem &p, const RouteTable &constants, const KeyDivision &keys, int64_t rows)
      : table(constants) {
    const int64_t of_rows = keys.takes_planned_keys ? std::min(p.keys, keys_of_segment(p, rows)) : p.keys;
    blocks = ceil_div(of_rows, keys.block_keys) * ceil_div(p.queries, rows) * keys.heads;
    steps = ceil_div(rows, keys.tile_rows) * group_size(p);
    const bool is_partial = is_causal(p) || mask_kind(p) != FDM_MASK_NONE;
    mean_steps = double(is_partial ? steps + group_size(p) : 2 * steps) / 2;
  }

  // The number of thread blocks that share the steps of each key block. The longest block may take longer than all of
  // them keep the SMs busy, but the prologue and epilogue of each thread block take the time of some steps. A step
  // takes longer with other blocks on the SM.
  int32_t shares() const {
    const double step_time = double(table.small_step_time) / 10,
                 crowded_time = double(table.small_crowded_step_time) / 10;
    const double others = double(table.small_other_steps), gain = double(table.small_share_gain) / 10;
    const auto microseconds = [&](int32_t number) {
      const double all = double(blocks) * (mean_steps + number * others) / double(table.small_slots);
      return std::max(step_time * (double(steps) / number + others), crowded_time * all);
    };
    int32_t number = 1;
    while (2 * number <= std::min<int64_t>(kShareRoom, steps) && microseconds(2 * number) < gain * microseconds(number))
      number *= 2;
    return number;
  }

  // Whether the thread blocks have few enough steps: with more, the other kernel is faster. That kernel divides few
  // blocks better, so the limit is lower for few blocks.
  bool has_few_steps(int32_t number) const {
    return ceil_div(steps, number) <=
           (blocks * number >= table.small_many_blocks ? table.small_steps : table.small_steps / 2);
  }
};

struct KeyChoice {
  const fdm_problem &p;
  const DeviceFacts &device;
  const RouteTable &table;
  bool fused; // one kernel computes all gradients
  KeyDivision keys{};
  int64_t rows_of_segment = 0;

  KeyChoice(const fdm_problem &problem, const DeviceFacts &facts, bool all, int head_dim)
      : p(problem), device(facts), table(*facts.table), fused(all) {
    const int arch = facts.built->tile_arch;
    const DkdvTileChoice tile = dkdv_tile(arch, head_dim);
    const FusedTileChoice fused_choice = fused_tile(arch, head_dim, facts.value_instantiation(p, head_dim));
    keys.block_keys = fused ? fused_choice.keys : tile.keys;
    keys.tile_rows = fused ? fused_choice.rows : tile.rows;
    keys.sum_dim = head_dim;
    keys.shares = 1;
    keys.takes_planned_keys = takes_planned_keys(p);
    keys.heads = int32_t(p.batch * p.kv_heads);
    if (!fused) return;
    choose_small_blocks();
    keys.heads_inside = heads_inside();
    rows_of_segment = segment_rows(keys);
  }

  // The rows of a segment, or 0 if key blocks cover all rows. With fewer rows, the kernel computes fewer dropped
  // pairs, but each key block has a prologue, and it adds to the sums of keys that continue in the next segment. The
  // best number of rows is the number of keys that a query keeps. Key sums for many short segments would also take
  // memory.
  int64_t segment_rows(const KeyDivision &division) const {
    if (!division.takes_planned_keys || mask_kind(p) != FDM_MASK_INTERVALS || p.max_kept <= 0) return 0;
    if (p.queries == 0 || p.heads == 0 || (is_varlen(p) && !packs_equal_lengths(p))) return 0;
    const int64_t window = std::min(p.max_kept, table.segment_window);
    const int64_t steps = table.segment_steps * division.tile_rows / group_size(p);
    const int64_t wanted = std::max({window, steps, p.queries / table.segments});
    int64_t rows = table.segment_min_rows;
    while (rows < wanted && rows < table.segment_max_rows) rows *= 2;
    // Fewer key blocks would leave SMs idle.
    const int64_t kept = std::min(p.max_kept, p.keys), heads = is_varlen(p) ? p.kv_heads : division.heads;
    const auto blocks = [&] { return segment_count(p, rows) * (kept / division.block_keys + 2) * heads; };
    while (rows > table.segment_min_rows && blocks() < table.target_parts) rows /= 2;
    const int64_t blocks_of_segment = segment_blocks(p, division, rows);
    const bool is_used =
        !is_varlen(p) || p.batch * blocks_of_segment * division.block_keys <= table.segment_room * total_rows(p);
    return blocks_of_segment <= table.segment_blocks && is_used ? rows : 0;
  }

  // With heads inside, all key blocks visit the rows together, from the last tile on. The sums of dQ to which they
  // add, and Q and dO, then belong to a few tiles at a time and stay in L2, which holds a fraction of those of all
  // heads. Measured on an H100 without a mask, with 8192 tokens: a head dimension of 256, whose blocks of 64 keys add
  // the most, took 15 % less time, 64 took 1 to 3 % less, and 128 took 5 % more. With a key mask, which leaves few
  // blocks, a head dimension of 128 took 19 to 38 % less with up to half of the keys. With all keys it took the same
  // if a schedule keeps blocks of the same heads together. A head dimension of 192 with narrow values has blocks of
  // 128 keys and took 0 to 2 % more (H200). The small blocks have an order of their own.
  HeadsInside heads_inside() const {
    if (has_query_rows(p.bias)) return HeadsInside::all; // the bias gradient is summed over heads that share it
    if (!device.has_wgmma() || keys.small) return HeadsInside::none;
    const bool usual = keys.block_keys < 128 || keys.sum_dim <= table.heads_inside_max_head_dim;
    if (mask_kind(p) == FDM_MASK_KEYS && keys.takes_planned_keys) {
      const bool scheduled = !is_varlen(p) && p.keys > table.unscheduled_keys;
      return usual || scheduled ? HeadsInside::all : HeadsInside::few;
    }
    return usual && mask_kind(p) == FDM_MASK_NONE ? HeadsInside::all : HeadsInside::none;
  }

  // Whether the small key blocks take consecutive keys although the mask has key lists. A selection of many of so few
  // keys leaves nearly every block one key that is kept to the end. Ordering the keys would save few steps and take
  // as long.
  bool takes_consecutive_keys() const {
    return mask_kind(p) == FDM_MASK_INTERVALS && p.keys <= table.consecutive_keys &&
           p.max_kept >= ceil_div(p.keys, table.consecutive_share);
  }

  // Whether the key blocks of a head sum dQ in a chain. A chain needs no sums in global memory, which saves time if
  // L2 does not hold them, and it adds in a fixed order. Blocks of a cluster begin together but do not end together:
  // with many blocks, or with GQA, the waits of SMs cost more than the chain saves.
  bool is_chained(const KeyDivision &small) const {
    const int64_t sum_bytes = p.batch * p.heads * p.queries * small.sum_dim * int64_t(sizeof(float));
    const bool spares_time =
        small.sum_dim > table.chain_head_dim && 4 * sum_bytes >= table.chain_quarters * table.l2_bytes;
    return !small.takes_planned_keys && group_size(p) == 1 &&
           ceil_div(p.keys, small.block_keys) <= table.chain_blocks && (p.flags & FDM_DETERMINISTIC || spares_time);
  }

  // Chooses the kernel of small blocks if key blocks have few steps. It adds to dQ twice as often as the other
  // kernel. The other kernel is faster with more steps, and where it needs hardly two blocks for a segment, unless
  // one small block suffices (measured on an H100 and an H200). The small kernel supports no lists except those of
  // segments, which have few steps at any length, no schedule and no softcap.
  void choose_small_blocks() {
    if (!device.has_wgmma() || keys.sum_dim > kSmallBlock.max_head_dim || is_varlen(p) || p.softcap > 0) return;
    if (has_relative_bias(p)) return;          // all of its steps have the same biases
    if (mask_kind(p) == FDM_MASK_ROWS) return; // it tests only ranges of rows
    if (plans_runs(p)) return;                 // its blocks visit all rows
    KeyDivision small = keys;
    small.small = true;
    small.block_keys = kSmallBlock.keys;
    small.tile_rows = kSmallBlock.rows;
    small.takes_planned_keys = keys.takes_planned_keys && !takes_consecutive_keys();
    const int64_t rows = std::min(p.queries, small.takes_planned_keys ? segment_rows(small) : p.queries);
    const int64_t kept = keys_of_segment(p, rows);
    if (small.takes_planned_keys ? kept > small.block_keys && kept < 2 * keys.block_keys : p.keys > table.small_keys)
      return;
    if (rows == 0) return;
    const SmallBlockWork work(p, table, small, rows);
    small.chained = is_chained(small);
    if (!small.chained) small.shares = work.shares();
    if (work.has_few_steps(small.shares)) keys = small;
  }

  // Whether the launch order balances key blocks without a schedule. If most rows see the first keys, their blocks
  // are the longest and come first. With nearly two blocks per SM, the short blocks then keep all SMs busy to the
  // end. A schedule would not be worth its launch and its sums.
  bool is_in_order(int64_t blocks) const {
    return !keys.takes_planned_keys && !plans_runs(p) && is_causal(p) && p.queries >= p.keys &&
           keys.sum_dim > table.max_scheduled_head_dim &&
           3 * blocks >= table.min_unscheduled_thirds * table.target_parts;
  }
};

// The head dimension of the backward instantiations. On sm_90, kernels with a softcap have separate instantiations.
int backward_head_dim(const fdm_problem &p, const DeviceFacts &device, bool is_general) {
  return device.instantiation(p, is_general || (device.has_wgmma() && p.softcap > 0));
}

// Whether one kernel may compute all gradients. Only a chain of blocks adds to dQ in a fixed order.
bool may_fuse(const fdm_problem &p, const DeviceFacts &device) {
  return can_fuse(p, device) && (!(p.flags & FDM_DETERMINISTIC) ||
                                 KeyChoice(p, device, true, backward_head_dim(p, device, false)).keys.chained);
}

// Lays out segments of `rows` rows and their key blocks.
void lay_out_segments(const fdm_problem &p, int64_t rows, WorkspaceParts &parts, BackwardRoute *route) {
  KeyDivision &keys = route->division;
  SegmentWork &segments = route->segments;
  const int64_t lists = mask_tensor(p).shape[0] * mask_tensor(p).shape[1], size = keys.block_keys;
  const int64_t count = segment_count(p, rows);
  if (is_varlen(p)) keys.heads = int32_t(p.kv_heads);
  segments.rows = int32_t(rows);
  segments.count = int32_t(count);
  segments.blocks = int32_t(segment_blocks(p, keys, rows));
  keys.blocks = int32_t(count * segments.blocks);
  segments.leading = int32_t(std::min<int64_t>(p.max_kept / size, segments.blocks));
  route->ordered = parts.take<KeyRows>(lists * keys.blocks * size);
  route->segment_order = parts.take<SegmentBlock>(lists * keys.blocks);
  route->segment_kept = parts.take<int32_t>(lists * count);
  segments.max_sums = int32_t(max_segment_sums(p, rows));
  if (is_varlen(p) && segments.max_sums < total_keys(p)) segments.row_sums = int32_t(std::min(p.max_kept, p.keys));
  route->segment_sums = parts.take<float>(int64_t(keys.heads) * segments.max_sums * 2 * keys.sum_dim);
  route->segment_bias_sums = parts.take<float>(int64_t(keys.heads) * segments.max_sums);
  route->segment_keys = parts.take<int32_t>(lists * segments.max_sums);
  route->segment_counts = parts.take<int32_t>(lists * list_sequences(p));
  keys.parts = 1;
  keys.max_items = int32_t(std::min<int64_t>(INT32_MAX, int64_t(keys.blocks) * keys.heads));
}

// Divides key blocks into parts, on the host or by a schedule on the device.
void divide_blocks(const fdm_problem &p, const KeyChoice &choice, WorkspaceParts &parts, BackwardRoute *route) {
  const RouteTable &table = choice.table;
  KeyDivision &keys = route->division;
  if (keys.takes_planned_keys) {
    const int64_t lists = mask_tensor(p).shape[0] * mask_tensor(p).shape[1];
    route->ordered = parts.take<KeyRows>(lists * total_keys(p));
    route->ranges = parts.take<RowRange>(lists * list_sequences(p) * keys.blocks);
  }
  const int64_t blocks = int64_t(keys.blocks) * keys.heads;
  // No part is shorter than two thirds of part_steps, so with few steps no parts are stored.
  const int64_t steps = group_size(p) * (p.queries / keys.tile_rows + 1);
  const int64_t max_parts = keys.small ? 1 : (2 * steps + table.part_steps) / (2 * table.part_steps);
  if (is_varlen(p) || (p.keys > table.unscheduled_keys && !choice.is_in_order(blocks))) {
    // The schedule makes at most as many parts as can be stored.
    keys.stored_parts = int32_t(max_parts > 1 ? std::min(table.target_parts, blocks * max_parts) : 0);
    // The last block of a sequence may be partial, and so may the last block of a bucket.
    const int64_t partial = p.batch + (keys.takes_planned_keys ? total_keys(p) / kBucketKeys + 1 : 0);
    const int64_t existing = is_varlen(p) ? p.kv_heads * (total_keys(p) / keys.block_keys + partial) : blocks;
    keys.max_items = int32_t(std::min<int64_t>(INT32_MAX, std::min(existing, blocks) + keys.stored_parts));
    route->items = parts.take<KeyItem>(keys.max_items);
    route->item_count = parts.take<int32_t>(1);
  } else {
    keys.parts = int32_t(std::max<int64_t>(1, std::min(max_parts, table.target_parts / std::max<int64_t>(1, blocks))));
    keys.max_items = int32_t(std::min<int64_t>(INT32_MAX, blocks * keys.parts));
    keys.stored_parts = keys.parts > 1 ? keys.max_items : 0;
  }
  keys.part_floats = int64_t(keys.block_keys) * (2 * keys.sum_dim + route->bias_heads);
  route->part_sums = parts.take<float>(keys.stored_parts * keys.part_floats);
}

// The number of KV heads that are processed together until all blocks of their keys are done: enough to fill all SMs,
// and otherwise at most as many as fit L2 with Q, dO and the sums of dQ.
int32_t heads_per_wave(const fdm_problem &p, const RouteTable &table, const KeyDivision &keys) {
  if (is_varlen(p)) return keys.heads;
  constexpr int64_t kRowBytes = 2 + 2 + 4, kKeyBytes = 2 + 2;
  const int64_t bytes = (p.queries * group_size(p) * kRowBytes + p.keys * kKeyBytes) * keys.sum_dim;
  const int64_t enough = ceil_div(2 * table.target_parts, std::max<int64_t>(1, keys.blocks));
  const int64_t groups = ceil_div(keys.heads, std::max(enough, table.l2_bytes / std::max<int64_t>(1, bytes)));
  return int32_t(ceil_div(keys.heads, std::max<int64_t>(1, groups)));
}

// Bias heads of a KV head.
int32_t own_bias_heads(const fdm_problem &p) {
  return sums_bias_of_keys(p) && p.bias.shape[1] == p.heads ? int32_t(group_size(p)) : 1;
}

// Fills in the fields that depend on the problem, on whether one kernel computes all gradients, and on the number of
// bias sums.
void lay_out(const fdm_problem &p, const KeyChoice &choice, int32_t bias_heads, BackwardRoute *route) {
  KeyDivision &keys = route->division;
  keys = choice.keys;
  keys.buckets = int32_t(ceil_div(p.keys, kBucketKeys));
  keys.blocks =
      int32_t(keys.takes_planned_keys ? keys.buckets * ceil_div(std::min<int64_t>(p.keys, kBucketKeys), keys.block_keys)
                                      : ceil_div(p.keys, keys.block_keys));
  route->bias_heads = bias_heads;

  WorkspaceParts parts;
  const int64_t batches = is_varlen(p) ? 1 : p.batch;
  route->relative = take_relative_parts(&parts, p, true);
  route->statistics = parts.take<RowStatistics>(batches * p.heads * total_rows(p));
  if (present(p.sink)) route->sink_shares = parts.take<float>(p.heads * batches * total_rows(p));
  if (choice.fused && !keys.chained) {
    QuerySumWork &sums = route->query_sums;
    sums.tile_rows = keys.tile_rows;
    sums.head_rows = query_sum_rows(p, sums.tile_rows);
    sums.dim = keys.sum_dim;
    route->query_sum_data = parts.take<float>(batches * p.heads * sums.head_rows * sums.dim);
  }
  if (sums_bias_of_keys(p))
    route->bias_sums = parts.take<float>(batches * p.kv_heads * route->bias_heads * total_keys(p));
  if (choice.rows_of_segment > 0)
    lay_out_segments(p, choice.rows_of_segment, parts, route);
  else
    divide_blocks(p, choice, parts, route);
  keys.heads_per_wave = heads_per_wave(p, choice.table, keys);
  route->workspace_bytes = parts.bytes;
  route->too_large = int64_t(keys.blocks) * keys.heads + choice.table.target_parts > INT32_MAX ||
                     sequence_tiles(p) * p.heads > INT32_MAX;
  route->order = tile_order(p, choice.table);
}

int64_t workspace_of(const fdm_problem &p, const KeyChoice &choice, int32_t bias_heads) {
  BackwardRoute route{};
  lay_out(p, choice, bias_heads, &route);
  return route.workspace_bytes;
}
// The same with a separate kernel for each gradient.
int64_t unfused_workspace(const fdm_problem &p, const DeviceFacts &device, int head_dim, int32_t bias_heads) {
  return workspace_of(p, KeyChoice(p, device, false, head_dim), bias_heads);
}

KeyKernel key_kernel(const fdm_problem &p, const DeviceFacts &device, const BackwardRoute &route, bool fused) {
  if (!route.wants_key_gradients) return KeyKernel::none;
  if (fused) {
    if (!device.has_wgmma()) return KeyKernel::all;
    if (route.division.small) return route.division.chained ? KeyKernel::chained : KeyKernel::shared;
    if (has_query_rows(p.bias)) return KeyKernel::per_query_bias;
    return mask_kind(p) == FDM_MASK_ROWS ? KeyKernel::per_query_mask : KeyKernel::fused;
  }
  if (route.general) return KeyKernel::general;
  return device.has_wgmma() && route.head_dim <= kMaxDkdvHeadDimSm90 ? KeyKernel::wgmma : KeyKernel::usual;
}

QueryKernel query_kernel(const DeviceFacts &device, const BackwardRoute &route, bool wanted) {
  if (!wanted) return QueryKernel::none;
  if (route.general) return QueryKernel::general;
  return device.has_wgmma() && route.head_dim <= kMaxDqHeadDimSm90 ? QueryKernel::wgmma : QueryKernel::usual;
}

const char *name_of(QueryKernel kernel) { return kernel == QueryKernel::wgmma ? "dq_kernel_sm90" : "dq_kernel"; }
const char *name_of(KeyKernel kernel) {
  switch (kernel) {
  case KeyKernel::wgmma:
    return "dkdv_kernel_sm90";
  case KeyKernel::all:
    return "all_gradients_kernel";
  case KeyKernel::fused:
  case KeyKernel::per_query_bias:
  case KeyKernel::per_query_mask:
    return "fused_kernel";
  case KeyKernel::shared:
  case KeyKernel::chained:
    return "small_blocks_kernel";
  case KeyKernel::mass:
    return "key_mass_kernel_sm90";
  default:
    return "dkdv_kernel";
  }
}

// The gradients that are computed together. A kernel for both skips the products of a gradient that is not requested.
KeyLaunches key_launches(const BackwardRoute &route, int arch, const RequestedGradients &wanted) {
  const bool keys = wanted.dk || route.wants_bias_sums;
  if (route.key_kernel != KeyKernel::general && route.key_kernel != KeyKernel::usual) return KeyLaunches::both;
  if (dkdv_tile(arch, route.head_dim).both_gradients) return KeyLaunches::both;
  return !keys ? KeyLaunches::dv : wanted.dv ? KeyLaunches::separate : KeyLaunches::dk;
}

// Divides the work of the kernels before and after the mainloops.
void divide_helpers(const fdm_problem &p, const RouteTable &table, const Alignment &alignment, BackwardRoute *route) {
  const KeyDivision &keys = route->division;
  const int64_t sums = (is_varlen(p) ? 1 : p.batch) * p.kv_heads * route->bias_heads * total_keys(p);
  route->statistics_division = statistics_division(p, table);
  if (route->wants_key_gradients) {
    PreparationWork &work = route->preparation;
    const int64_t lists =
        keys.takes_planned_keys ? mask_tensor(p).shape[0] * mask_tensor(p).shape[1] * list_sequences(p) : 0;
    work.order = route->segments.rows > 0 ? int64_t(keys.heads) * route->segments.count : lists * keys.buckets;
    work.vectors = alignment.dk_dv;
    const int64_t units = p.k.shape[0] * p.kv_heads * ceil_div(p.k.shape[1], kUnitKeys);
    const bool clears = route->clears_key_gradients && route->wants_dkdv;
    const int64_t of_keys = clears ? ceil_div(units, kStatisticsThreads / 32) : 0;
    const int64_t of_sums = route->wants_bias_sums ? ceil_div(sums, table.clear_sums * kStatisticsThreads) : 0;
    work.clearing = std::max(of_keys, of_sums);
  }
  if (keys.stored_parts > 0) {
    const bool many = keys.max_items >= table.sum_many_items;
    route->key_sum = {std::min<int64_t>(keys.max_items, table.sum_columns),
                      many ? table.sum_divisions : table.sum_divisions_of_few};
  }
  if (route->query_sum_data.exists()) {
    const int64_t rows = (is_varlen(p) ? 1 : p.batch) * p.heads * route->query_sums.head_rows;
    route->query_sum_blocks = rounding_blocks(rows / kBandRows);
  }
  if (route->segments.max_sums > 0)
    route->segment_sum_blocks = rounding_blocks(keys.heads * key_sum_bands(p, route->segments.max_sums));
  if (route->reduces_bias)
    route->bias_reduction = reduction_work(p.bias.shape[0] * p.bias.shape[1] * p.bias.shape[3], p.bias.shape[3] == 1);
  route->sink_reduction = reduction_work(p.heads, true);
}

void list_launches(BackwardRoute *route, const RequestedGradients &wanted) {
  Launches &launches = route->launches;
  if (route->clears_dq) launches.add("fill");
  if (route->clears_dbias) launches.add("fill");
  if (route->relative.biases.exists()) {
    launches.add("find_relative_biases");
    launches.add("convert_rows");
  }
  launches.add("prepare_backward");
  if (route->scheduled) launches.add("schedule_keys");
  if (route->query_kernel != QueryKernel::none) launches.add(name_of(route->query_kernel));
  if (route->key_kernel != KeyKernel::none) {
    launches.add(name_of(route->key_kernel));
    if (route->key_launches == KeyLaunches::separate) launches.add(name_of(route->key_kernel));
    if (route->query_sum_data.exists()) launches.add("round_sums");
    if (route->division.stored_parts > 0) launches.add("sum_parts");
    if (route->segments.max_sums > 0) launches.add("round_sums");
    if (route->reduces_bias) launches.add("reduce");
  }
  if (route->row_bias_blocks > 0) launches.add("row_bias_kernel");
  if (wanted.dsink) launches.add("reduce");
}

// Whether the gradients are computed for one group member after the other. A single call for all members would
// compute dQ separately from dK and dV, and would visit all rows for each key. If members share a bias, its gradient
// would need sums over members.
bool is_divided_by_members(const fdm_problem &p, const RouteTable &table, int64_t sms, bool wants_dbias) {
  const bool shares_bias = present(p.bias) && p.bias.shape[1] != p.heads;
  if (!has_members(p) || (shares_bias && wants_dbias)) return false;
  return double(is_varlen(p) ? 1 : p.batch) * double(p.kv_heads) * double(total_rows(p)) * double(p.keys) >=
         double(table.member_pairs * sms);
}

BackwardRoute member_route(const fdm_problem &p, const DeviceFacts &device, const Alignment &alignment,
                           const RequestedGradients &wanted) {
  const fdm_problem member = member_of(p, 0);
  BackwardRoute route = backward_route(member, device, alignment, wanted);
  const PlanRoute plan = plan_route(member, device);
  const Launches member_launches = route.launches;
  WorkspaceParts parts{route.workspace_bytes};
  route.members = int32_t(group_size(p));
  route.member_plan = parts.take_bytes(align_256(plan.plan_bytes));
  route.member_plan_work = parts.take_bytes(align_256(plan.workspace_bytes));
  const int64_t elements = route.members * member_elements(p);
  if (wanted.dk) route.member_keys = parts.take<uint16_t>(elements);
  if (wanted.dv) route.member_values = parts.take<uint16_t>(elements);
  route.member_sum_blocks = ceil_div(member_elements(p) / 8, kMemberThreads);
  route.workspace_bytes = parts.bytes;
  route.launches = plan.launches;
  route.launches.add(member_launches);
  if (wanted.dk || wanted.dv) route.launches.add("sum_members");
  return route;
}

} // namespace

BackwardRoute backward_route(const fdm_problem &p, const DeviceFacts &device, const Alignment &alignment,
                             const RequestedGradients &wanted) {
  BackwardRoute route{};
  route.nothing = p.batch == 0 || p.heads == 0 || p.queries == 0 || p.keys == 0;
  if (route.nothing) {
    for (bool each : {wanted.dq, wanted.dk, wanted.dv, wanted.dbias, wanted.dsink})
      if (each) route.launches.add("fill");
    return route;
  }
  if (is_pair_bias(p, device)) {
    route.is_pair_bias = true;
    choose_pair_bias_backward(&route, p, device, alignment, wanted);
    return route;
  }
  if (is_divided_by_members(p, *device.table, device.sms, wanted.dbias))
    return member_route(p, device, alignment, wanted);
  route.wants_bias_sums = wanted.dbias && sums_bias_of_keys(p);
  route.wants_dkdv = wanted.dk || wanted.dv;
  route.wants_key_gradients = route.wants_dkdv || route.wants_bias_sums;
  route.general = has_query_rows(p.bias);
  const bool fused = wanted.dq && route.wants_key_gradients && may_fuse(p, device);
  route.head_dim = backward_head_dim(p, device, route.general && !fused);
  route.value_dim = device.value_instantiation(p, route.head_dim);
  lay_out(p, KeyChoice(p, device, fused, route.head_dim), own_bias_heads(p), &route);
  KeyDivision &keys = route.division;
  route.key_kernel = key_kernel(p, device, route, fused);
  route.query_kernel = query_kernel(device, route, wanted.dq && !fused);
  const RowTileChoice tile = route.query_kernel == QueryKernel::general
                                 ? general_dq_tile(device.built->tile_arch, route.head_dim)
                                 : dq_tile(device.built->tile_arch, route.head_dim);
  const int64_t rows = route.query_kernel == QueryKernel::wgmma ? kTileRows : tile.rows;
  if (route.query_kernel != QueryKernel::none) route.blocks = p.batch * p.heads * ceil_div(p.queries, rows);
  if (route.query_kernel == QueryKernel::wgmma) route.blocks = std::min<int64_t>(route.blocks, device.sms);
  if (wanted.dbias && !route.wants_bias_sums && !fused) {
    const int64_t bias_rows = 16 * row_bias_tile(device.built->tile_arch, route.head_dim).warps;
    const int64_t batches = is_varlen(p) ? p.batch : p.bias.shape[0];
    route.row_bias_blocks = p.bias.shape[1] * ceil_div(p.queries, bias_rows) * batches;
  }
  if (route.wants_bias_sums) {
    const int64_t sums[4] = {is_varlen(p) ? 1 : p.batch, p.kv_heads * route.bias_heads, 1, total_keys(p)};
    route.reduces_bias = has_relative_bias(p) || !std::equal(p.bias.shape, p.bias.shape + 4, sums);
  }
  route.clears_dq = is_varlen(p) && wanted.dq;
  // The kernel that computes all gradients skips pairs that the mask is known to drop.
  const bool leaves_pairs = is_causal(p) || mask_kind(p) != FDM_MASK_NONE;
  route.clears_dbias = wanted.dbias && !route.wants_bias_sums && (is_varlen(p) || (fused && leaves_pairs));
  // No other kernel writes keys that are in no list, or rows and keys outside all sequences.
  route.clears_key_gradients = is_varlen(p) || keys.takes_planned_keys;
  route.scheduled = route.wants_key_gradients && keys.parts == 0;
  if (route.scheduled && fused && device.has_wgmma()) keys.sms = device.sms;
  route.key_launches = key_launches(route, device.built->tile_arch, wanted);
  divide_helpers(p, *device.table, alignment, &route);
  list_launches(&route, wanted);
  return route;
}

int64_t backward_workspace(const fdm_problem &p, const DeviceFacts &device) {
  if (is_pair_bias(p, device)) return pair_bias_backward_workspace(p, device, input_alignment(p));
  const int head_dim = backward_head_dim(p, device, has_query_rows(p.bias));
  int64_t bytes = unfused_workspace(p, device, head_dim, own_bias_heads(p));
  if (may_fuse(p, device)) {
    const KeyChoice fused(p, device, true, backward_head_dim(p, device, false));
    bytes = std::max(bytes, workspace_of(p, fused, own_bias_heads(p)));
  }
  if (is_divided_by_members(p, *device.table, 1, false)) { // a device may have few SMs
    const fdm_problem member = member_of(p, 0);
    const PlanRoute plan = plan_route(member, device);
    WorkspaceParts parts{backward_workspace(member, device)};
    for (const int64_t size : {plan.plan_bytes, plan.workspace_bytes}) parts.take_bytes(align_256(size));
    for (int gradients = 0; gradients < 2; ++gradients) parts.take<uint16_t>(group_size(p) * member_elements(p));
    bytes = std::max(bytes, parts.bytes);
  }
  return bytes;
}

BackwardRoute key_mass_route(const fdm_problem &p, const DeviceFacts &device, const Alignment &alignment) {
  BackwardRoute route{};
  route.nothing = p.batch == 0 || p.heads == 0 || p.queries == 0 || p.keys == 0;
  if (route.nothing) {
    route.launches.add("fill");
    return route;
  }
  route.wants_bias_sums = route.wants_key_gradients = true;
  route.head_dim = device.instantiation(p, false);
  lay_out(p, KeyChoice(p, device, false, route.head_dim), int32_t(group_size(p)), &route);
  route.key_kernel = key_kernel(p, device, route, false);
  if (route.key_kernel == KeyKernel::wgmma) {
    route.key_kernel = KeyKernel::mass;
    route.division.tile_rows = kMassTile.rows;
  }
  route.scheduled = route.division.parts == 0;
  route.key_launches = key_launches(route, device.built->tile_arch, {});
  divide_helpers(p, *device.table, alignment, &route);
  list_launches(&route, {});
  return route;
}

int64_t key_mass_workspace(const fdm_problem &p, const DeviceFacts &device) {
  return unfused_workspace(p, device, device.instantiation(p, false), int32_t(group_size(p)));
}

} // namespace fdm::cuda
