// SPDX-License-Identifier: BSD-3-Clause
// The routes of key selection and of plans.
#include "route.h"
#include "workspaces.h"

namespace fdm::cuda {
namespace {

// Whether the plan has columns for each tile.
bool lists_tiles(const fdm_problem &p) { return mask_kind(p) != FDM_MASK_KEYS; }

// One thread block makes a list. With few lists, several blocks make one list, and each of them lists some of the
// tiles.
int32_t list_parts(const RouteTable &table, int64_t lists, int64_t tiles) {
  return int32_t(clamp64(table.list_blocks / max64(1, lists), 1, max64(1, tiles / table.list_part_tiles)));
}
int64_t tiles_of_list(const fdm_problem &p) { return lists_tiles(p) ? ceil_div(p.queries, kTileRows) : 1; }

// Divides the parts of each list among thread blocks: a block for each part, unless that is more blocks than wanted.
PlanParts divide_parts(const RouteTable &table, int64_t lists, int64_t parts) {
  const int64_t wanted = clamp64(ceil_div(table.plan_part_blocks, max64(1, lists)), 1, max64(1, parts));
  const int64_t steps = max64(1, ceil_div(parts, wanted));
  return {int32_t(max64(1, ceil_div(parts, steps))), int32_t(steps)};
}

// Whether the booleans of several keys can be loaded at once.
bool mask_rows_are_aligned(const fdm_tensor &mask) {
  const auto multiple = [](int64_t stride) { return stride % kMaskBytes == 0; };
  return mask.shape[3] > 1 && mask.stride[3] == 1 && multiple(mask.stride[0]) && multiple(mask.stride[1]) &&
         multiple(mask.stride[2]) && reinterpret_cast<uintptr_t>(mask.data) % kMaskBytes == 0;
}

// Derives the shape of the boolean rows from bias and mask: the result may not exist yet.
fdm_selection with_kept_shape(fdm_selection s) {
  if (present(s.keep)) return s;
  for (int d = 0; d < 4; ++d) s.keep.shape[d] = max64(s.bias.shape[d], present(s.mask) ? s.mask.shape[d] : 1);
  return s;
}

void choose_keep(SelectionRoute *route, const fdm_selection &selection, const DeviceFacts &device) {
  const RouteTable &table = *device.table;
  const fdm_selection s = with_kept_shape(selection);
  const int64_t rows = s.keep.shape[3] > 0 ? selection_sequences(s, s.keep) * s.keep.shape[1] * kept_rows(s) : 0;
  if (rows == 0 || rows > table.keep_rows || s.keys < table.keep_keys) {
    route->kernel = SelectionKernel::keep;
    route->blocks = rows;
    route->launches.add("select_keep_rows");
    return;
  }
  const int bits = s.bias.dtype == FDM_FLOAT32 ? 32 : 16;
  route->kernel = SelectionKernel::parts;
  route->keep = keep_parts(s, rows, table.keep_blocks);
  route->blocks = rows * route->keep.count;
  WorkspaceParts parts;
  route->states = parts.take_bytes(align_256(rows * kRowStateBytes));
  route->digits = parts.take<uint32_t>(rows * keep_passes(bits) * kKeepDigits);
  route->part_digits = parts.take<uint32_t>(route->blocks * keep_last_digits(bits));
  if (counts_seen_keys(s)) route->seen = parts.take<uint32_t>(route->blocks);
  if (route->keep.list_capacity > 0)
    route->lists = parts.take<int32_t>(route->blocks * (kKeepThreads / 32) * (route->keep.list_capacity + 1));
  route->workspace_bytes = parts.bytes;
  route->launches.add("sample_keys");
  for (int pass = 0; pass < keep_passes(bits); ++pass) route->launches.add("count_keys");
  route->launches.add("write_kept_keys");
}

// The most parts of `part` elements that a run of `size` elements meets. Parts begin at multiples of `part`, and runs at
// multiples of `size`.
int64_t parts_of_run(int64_t size, int64_t part) {
  if (size % part == 0) return size / part;
  return part % size == 0 ? 1 : ceil_div(size - 1, part) + 1;
}

// The granules of the pool that the tiles of a plan of blocks take at most, for columns and for words.
int64_t pool_granules(const fdm_problem &p, const fdm_mask_blocks &blocks, const Plan &plan) {
  const int64_t rows = blocks.contents.shape[1], keys = blocks.contents.shape[2];
  const int64_t of_block = parts_of_run(rows, kTileRows) * parts_of_run(keys, kGranuleKeys);
  const int64_t tiles = plan.lists * ceil_div(p.queries, kTileRows), all = tiles * plan.tile_granules;
  const int64_t listed = min64(all, blocks.kept * of_block);
  int64_t stored = listed;
  if (rows % kTileRows == 0 && keys % kGranuleKeys == 0) { // the rows of a tile and a granule are in one block
    // The rows of a tile see different parts of the kTileRows - 1 keys after the last one that all of them see.
    const int64_t cut = is_causal(p) ? ceil_div(kTileRows - 2, kGranuleKeys) + 1 : 0;
    stored = min64(listed, blocks.partial * of_block + tiles * cut);
  }
  return ceil_div(listed * kGranuleKeys, kGranuleColumns) + tiles + stored;
}

} // namespace

PlanRoute block_plan_route(const fdm_problem &p, const fdm_mask_blocks &blocks, const DeviceFacts &device) {
  PlanRoute route = plan_route(p, device);
  const Plan plan = plan_of(p, nullptr);
  lay_out_plan(p, nullptr, &route.plan_bytes, pool_granules(p, blocks, plan));
  return route;
}

PlanRoute plan_route(const fdm_problem &p, const DeviceFacts &device) {
  const RouteTable &table = *device.table;
  PlanRoute route{};
  const fdm_mask_kind kind = mask_kind(p);
  if (kind == FDM_MASK_NONE || is_pair_bias(p, device)) return route;
  const Plan plan = lay_out_plan(p, nullptr, &route.plan_bytes);
  const int64_t lists = plan.lists * list_sequences(p);
  const bool runs = plans_runs(p);
  if (!runs && is_interval_plan(kind) && p.keys > table.plan_keys) {
    WorkspaceParts parts;
    route.counts = parts.take<int32_t>(lists * ceil_div(p.keys, kPlanChunkKeys));
    route.workspace_bytes = parts.bytes;
  }
  if (needs_no_plan(p, device)) return route;
  const int64_t tiles = lists_tiles(p) ? plan.lists * plan.tiles : 0; // tiles that the launch lists
  if (runs) {
    route.kernel = PlanKernel::runs;
    route.threads = kRunThreads;
    route.chunk_blocks = plan.lists * plan.list_sections;
    route.blocks = ceil_div(tiles, kRunThreads / 32);
    route.launches.add("find_spans");
    route.launches.add("find_runs");
  } else if (kind == FDM_MASK_ROWS) {
    const bool has_blocks = has_mask_blocks(p);
    route.kernel = has_blocks ? PlanKernel::blocks : PlanKernel::rows;
    route.aligned = !has_blocks && mask_rows_are_aligned(p.mask);
    route.parts = int32_t(ceil_div(p.queries, kTileRows));
    route.blocks = lists * route.parts;
    route.launches.add(has_blocks ? "list_block_columns" : "list_row_columns");
  } else if (p.keys <= table.list_plan_keys && p.queries <= table.list_rows) {
    route.kernel = PlanKernel::list;
    route.threads = p.keys <= 256 ? 128 : p.keys <= 512 ? 256 : 512;
    route.keys_of_thread = 2;
    route.parts = list_parts(table, lists, tiles_of_list(p));
    route.blocks = lists * route.parts;
    route.launches.add("short_lists");
  } else if (p.keys <= table.plan_keys) {
    // Enough threads to fill the GPU, but no more: each thread has fixed work besides its keys.
    route.kernel = PlanKernel::tiles;
    route.threads = tiles <= table.plan_tiles_512 ? 512 : tiles <= table.plan_tiles_256 ? 256 : 128;
    route.list_parts = divide_parts(table, lists, ceil_div(p.keys, kPartKeysPerThread * route.threads));
    route.blocks = lists * route.list_parts.blocks + tiles;
    route.launches.add("list_keys_and_tiles");
  } else {
    route.kernel = PlanKernel::chunks;
    route.threads = 512;
    route.list_parts = divide_parts(table, lists, ceil_div(p.keys, kPlanChunkKeys));
    route.chunk_blocks = lists * route.list_parts.blocks;
    route.blocks = tiles;
    route.launches.add("count_kept_keys");
    route.launches.add("compact_kept_keys");
    if (tiles > 0) route.launches.add("list_keys_and_tiles");
  }
  return route;
}

SelectionRoute selection_route(const fdm_selection &s, const fdm_problem *p, const DeviceFacts &device) {
  const RouteTable &table = *device.table;
  SelectionRoute route{};
  if (!present(s.start) && !p) {
    choose_keep(&route, s, device);
  } else if (s.keys == 0 && !p) {
    route.kernel = SelectionKernel::none;
  } else if (s.keys <= table.list_keys && s.queries <= table.list_rows && s.flags & FDM_CAUSAL) {
    // With two keys per thread rather than four, calls of up to 2048 keys took 4 to 9 us less (measured on an H200).
    const int64_t lists = s.start.shape[0] * s.start.shape[1] * (is_varlen(s) ? s.batch : 1);
    route.kernel = SelectionKernel::list;
    route.threads = s.keys <= 256 ? 128 : s.keys <= 512 ? 256 : s.keys <= 1024 ? 512 : 1024;
    route.keys_of_thread = s.keys <= 2048 ? 2 : 4;
    route.parts = list_parts(table, lists, p ? tiles_of_list(*p) : 1);
    route.blocks = lists * route.parts;
    route.launches.add("short_lists");
  } else {
    route.kernel = SelectionKernel::intervals;
    route.chunks = selection_chunks(s, table);
    if (s.keys > 0) route.blocks = s.start.shape[1] * (is_varlen(s) ? 1 : s.start.shape[0]) * route.chunks.count;
    route.launches.add("find_windows");
    route.launches.add("write_intervals");
  }
  return route;
}

} // namespace fdm::cuda
