// SPDX-License-Identifier: BSD-3-Clause
// The numbering of the kernels' thread blocks: each part of the work has one number, for any problem size, device and
// grouping of heads and sequences. Prints a line for each numbering, which tests/test_numbering.py reads. Calls reach
// most groups only at sizes that are too slow for an emulator.
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <map>
#include <random>
#include <tuple>
#include <utility>
#include <vector>

#include "cuda/backward/key_places.cuh"
#include "cuda/backward/sm90/query_chain.cuh"
#include "cuda/forward/decode.cuh"
#include "cuda/forward/direct_decode.h"
#include "cuda/forward/forward.cuh"
#include "cuda/host/facts.h"
#include "cuda/host/fill.cu"
#include "cuda/lists/list_tile.cuh"
#include "cuda/pair_bias/dbias_tiles.cuh"
#include "cuda/pair_bias/sm90/forward_tasks.cuh"
#include "cuda/pair_bias/sm90/fused_tasks.cuh"
#include "cuda/tile/sm90/tile_scheduler.cuh"

namespace fdm::cuda {
namespace {

std::mt19937 random_numbers(20261127);
int64_t draw(int64_t least, int64_t most) {
  return std::uniform_int_distribution<int64_t>(least, most)(random_numbers);
}

// A part of the work and its count. Lane 0 of a warp counts.
using Part = std::tuple<int64_t, int64_t, int64_t>;
std::map<Part, int> found;
void count(int64_t a, int64_t b = 0, int64_t c = 0) {
  if (threadIdx.x % 32 == 0) ++found[{a, b, c}];
}
constexpr Part kNone{-1, -1, -1}; // marks any other error

// The number of parts, and their set.
struct Work {
  int64_t parts;
  std::function<bool(int64_t a, int64_t b, int64_t c)> has;
};
bool within(int64_t n, int64_t past) { return n >= 0 && n < past; }
// The parts with a < x, b < y and c < z.
Work each_of(int64_t x, int64_t y = 1, int64_t z = 1) {
  return {x * y * z, [=](int64_t a, int64_t b, int64_t c) { return within(a, x) && within(b, y) && within(c, z); }};
}
// The memory of tensors that no kernel reads.
int32_t nothing = 0;

template <class... Parameters, class... Arguments>
void launch_blocks(void (*kernel)(Parameters...), dim3 grid, unsigned threads, const Arguments &...arguments) {
  cudaLaunchConfig_t config{};
  config.gridDim = grid;
  config.blockDim = dim3(threads);
  config.dynamicSmemBytes = 1024;
  if (cudaLaunchKernelEx(&config, kernel, arguments...)) found[kNone] = 1;
}

// Tries configurations until one is wrong. `run` returns the expected work and counts the found parts.
void check(const char *name, int configurations, Work (*run)()) {
  for (int n = 0; n < configurations; ++n) {
    found.clear();
    const Work work = run();
    int64_t once = 0, wrong = 0;
    for (const auto &[part, times] : found) {
      const bool right = times == 1 && part != kNone && std::apply(work.has, part);
      ++(right ? once : wrong);
    }
    if (once == work.parts && wrong == 0) continue;
    std::printf("%s: of %d parts %d have one number, and %d numbers are wrong, in configuration %d\n", name,
                int(work.parts), int(once), int(wrong), n);
    return;
  }
  std::printf("%s: each part has one number\n", name);
}

// A random divisor of n.
int64_t divisor(int64_t n) {
  int64_t d;
  do d = draw(1, n);
  while (n % d != 0);
  return d;
}

fdm_problem draw_problem() {
  fdm_problem p{};
  p.kv_heads = draw(1, 9);
  p.heads = p.kv_heads * draw(1, 4);
  p.batch = draw(1, 12);
  p.queries = draw(1, 900);
  // Often the last row of a tile sees one key of another key tile, or just misses it.
  p.keys = draw(0, 1) ? draw(1, 900) : std::max<int64_t>(1, p.queries + 128 * draw(-3, 3) + draw(-1, 2));
  p.flags = draw(0, 1) ? FDM_CAUSAL : 0;
  p.head_dim = 64;
  return p;
}

// Packed sequences; some have no rows.
struct Packing {
  std::vector<int32_t> bounds{0};

  Packing(fdm_problem &p, int64_t sequences, int64_t longest) {
    p.batch = sequences;
    p.queries = 0;
    for (int64_t n = 0; n < sequences; ++n) {
      const int64_t length = draw(0, 3) ? draw(1, longest) : 0;
      bounds.push_back(bounds.back() + int32_t(length));
      p.queries = std::max(p.queries, length);
    }
    p.keys = p.queries;
    p.cu_seqlens_q = p.cu_seqlens_k = {bounds.data(), {sequences + 1, 1, 1, 1}, {1, 1, 1, 1}, FDM_INT32, 0};
    p.q.shape[1] = p.k.shape[1] = bounds.back();
  }
  int64_t sequences() const { return int64_t(bounds.size()) - 1; }
  int64_t parts_of(int64_t n, int64_t size) const { return ceil_div(bounds[n + 1] - bounds[n], size); }
  int64_t parts(int64_t size) const {
    int64_t all = 0;
    for (int64_t n = 0; n < sequences(); ++n) all += parts_of(n, size);
    return all;
  }
};

// The tiles of a persistent kernel in the order of a route.
void tile_kernel(fdm_problem p, TileOrder order) {
  for (uint32_t index = 0;; ++index) {
    const int64_t number = tile_of_round(index);
    if (number >= sequence_tiles(p) * p.heads) return;
    const HeadTile t = find_tile(p, order, uint32_t(number));
    if (t.has_rows()) count(t.sequence_index * p.heads + t.head, t.tile);
  }
}
Work tiles_of_batches() {
  const fdm_problem p = draw_problem();
  const TileOrder order(p, draw(1, p.batch), divisor(p.kv_heads) * group_size(p));
  launch_blocks(tile_kernel, dim3(draw(1, 9)), 32, p, order);
  return each_of(p.batch * p.heads, ceil_div(p.queries, kTileRows));
}
Work tiles_of_packed_sequences() {
  fdm_problem p = draw_problem();
  p.heads = p.kv_heads = draw(1, 3);
  const Packing packing(p, draw(1, draw(0, 1) ? 1500 : 40), 200);
  const TileOrder order(p, 1, divisor(p.kv_heads) * group_size(p));
  launch_blocks(tile_kernel, dim3(draw(1, 9)), 32, p, order);
  return {p.heads * packing.parts(kTileRows), [=](int64_t head, int64_t tile, int64_t) {
            return within(head, packing.sequences() * p.heads) &&
                   within(tile, packing.parts_of(head / p.heads, kTileRows));
          }};
}

// Key blocks of heads in groups.
void key_block_kernel(BackwardParams params, int64_t parts) {
  for (int64_t number = 0; number < parts; ++number) {
    const BlockOfHead own(params.keys, uint32_t(number));
    count(own.block, own.head);
  }
}
KeyWork draw_heads(int64_t heads, int64_t blocks) {
  KeyWork keys{};
  keys.heads = int32_t(heads);
  keys.blocks = int32_t(blocks);
  keys.heads_per_wave = int32_t(draw(1, heads));
  return keys;
}
Work blocks_of_keys() {
  BackwardParams params{};
  params.keys = draw_heads(draw(1, 60), draw(1, 9));
  const Work work = each_of(params.keys.blocks, params.keys.heads);
  launch_blocks(key_block_kernel, dim3(1), 32, params, work.parts);
  return work;
}

// Key blocks of row segments. `position` is the block's index in its segment.
void segment_kernel(BackwardParams params) {
  for (int32_t number = 0; number < params.keys.heads * params.keys.blocks; ++number) {
    const KeyBlockPlace place = place_in_segment(params, uint32_t(number));
    if (place.rows.past >= place.rows.first)
      count(place.sequence_index * params.p.kv_heads + place.kv_head, place.first_key / params.keys.block_keys,
            place.rows.position);
  }
}
// `segments_of(sequence)` returns the first segment of a sequence in its list, and its number of segments.
template <class SegmentsOf> Work count_segments(BackwardParams &params, const SegmentsOf &segments_of) {
  const fdm_problem &p = params.p;
  const KeySegments segments = params.keys.segments;
  const int64_t list_batch = p.start.shape[0], list_heads = p.start.shape[1];
  const int64_t numbers = list_batch * list_heads * segments.count;
  params.plan.lists_per_batch = int32_t(list_heads);
  std::vector<int32_t> live(numbers, 0);
  std::vector<SegmentBlock> order;
  for (int64_t n = 0; n < numbers * segments.blocks; ++n) order.push_back({0, 1, int32_t(n % segments.blocks), 64});
  params.keys.segments.kept_count = live.data();
  params.keys.segments.order = order.data();
  launch_blocks(segment_kernel, dim3(1), 32, params);
  int64_t existing = 0;
  for (int64_t n = 0; n < p.batch; ++n) existing += segments_of(n).second;
  return {existing * p.kv_heads * segments.blocks, [=](int64_t head, int64_t block, int64_t position) {
            const int64_t sequence = head / p.kv_heads, kv_head = head % p.kv_heads;
            if (!within(sequence, p.batch) || block % segments.blocks != position) return false;
            const int64_t list = (list_batch == 1 ? 0 : sequence) * list_heads + (list_heads == 1 ? 0 : kv_head);
            const auto [first, number] = segments_of(sequence);
            return within(block / segments.blocks - list * segments.count - first, number);
          }};
}
template <class SegmentsOf>
Work check_segments(fdm_problem &p, int64_t segments_of_list, int64_t heads, const SegmentsOf &segments_of) {
  BackwardParams params{};
  const int64_t list_heads = draw(0, 1) ? 1 : p.kv_heads, list_batch = is_varlen(p) || draw(0, 1) ? 1 : p.batch;
  p.start = p.end = {&nothing, {list_batch, list_heads, 1, p.keys}, {1, 1, 1, 1}, FDM_INT32, 0};
  params.p = p;
  KeySegments segments{};
  segments.rows = 256;
  segments.count = int32_t(segments_of_list);
  segments.blocks = int32_t(draw(1, 6));
  segments.leading = int32_t(draw(0, segments.blocks));
  params.keys = draw_heads(heads, segments.count * segments.blocks);
  params.keys.segments = segments;
  params.keys.block_keys = 64;
  return count_segments(params, segments_of);
}
Work blocks_of_segments() {
  fdm_problem p = draw_problem();
  const int64_t segments = ceil_div(p.queries, 256);
  return check_segments(p, segments, p.batch * p.kv_heads, [=](int64_t) { return std::pair{int64_t(0), segments}; });
}
Work blocks_of_packed_segments() {
  fdm_problem p = draw_problem();
  const Packing packing(p, draw(1, 40), 900);
  return check_segments(p, total_rows(p) / 256 + p.batch, p.kv_heads,
                        [=](int64_t n) { return std::pair{packing.bounds[n] / 256 + n, packing.parts_of(n, 256)}; });
}

// Heads of a query that a block decodes together, and clusters that share their keys.
void direct_decode_kernel(DirectDecodeParams params, int64_t blocks) {
  for (int64_t number = 0; number < blocks; ++number) {
    const DirectDecodePlace place(params, uint32_t(number));
    for (int r = 0; r < place.rows; ++r) {
      count(place.batch, place.head + r, place.part);
      if (place.kv_head != (place.head + r) / params.group) found[kNone] = 1;
    }
  }
}
Work check_direct_decode(const fdm_problem &p, const DirectWork &division, int64_t blocks) {
  DirectDecodeParams params{};
  params.heads = int32_t(p.heads);
  params.group = int32_t(group_size(p));
  params.heads_per_block = division.heads_per_block;
  params.blocks_of_kv_head = division.blocks_per_kv_head;
  params.blocks = int32_t(p.kv_heads) * params.blocks_of_kv_head;
  params.parts = division.clusters_per_block;
  launch_blocks(direct_decode_kernel, dim3(1), 32, params, blocks);
  return each_of(p.batch, p.heads, params.parts);
}
Work heads_of_a_query() {
  fdm_problem p{};
  p.kv_heads = draw(1, 5);
  const int64_t group = draw(1, 40);
  p.heads = p.kv_heads * group;
  DirectWork division{};
  division.heads_per_block = draw(0, 1) ? 1 : int32_t(ceil_div(group, ceil_div(group, kDirectRows)));
  division.blocks_per_kv_head = int32_t(ceil_div(group, division.heads_per_block));
  division.clusters_per_block = int32_t(draw(1, 4));
  p.batch = draw(1, 5);
  return check_direct_decode(p, division,
                             p.batch * p.kv_heads * division.blocks_per_kv_head * division.clusters_per_block);
}

// Row tiles of the general forward kernel with heads that share a tile, in splits.
void forward_place_kernel(ForwardParams params) {
  const ForwardPlace place(params);
  count(place.sequence_index * params.p.heads + place.head, place.tile, place.split);
}
// The work of row tiles whose heads share them, in splits.
Work split_tiles(const ForwardParams &params, int64_t tiles) {
  const int64_t heads = params.p.batch * params.p.heads, together = params.heads_per_tile, splits = params.splits;
  return {heads / together * tiles * splits, [=](int64_t head, int64_t tile, int64_t split) {
            return within(head, heads) && head % together == 0 && within(tile, tiles) && within(split, splits);
          }};
}
Work tiles_in_parts() {
  ForwardParams params{};
  fdm_problem &p = params.p;
  p.kv_heads = draw(1, 4);
  p.heads = p.kv_heads * draw(1, 3);
  p.batch = draw(1, 3);
  params.heads_per_tile = draw(0, 1) ? 1 : int32_t(group_size(p));
  params.splits = int32_t(draw(1, 3));
  params.tiles = int32_t(draw(1, 3));
  params.order = TileOrder(p, 1, divisor(p.kv_heads) * group_size(p));
  const Work work = split_tiles(params, params.tiles);
  launch_blocks(forward_place_kernel, dim3(work.parts), 32, params);
  return work;
}

// Key tiles of each row tile's sources, in equal shares of the work or in whole tiles. The splits of a tile are
// numbered from 0.
std::map<int64_t, std::vector<int>> splits_of;
template <class Config> void forward_kernel_sm90(PairBiasForward work) {
  PairBiasForwardWalkSm90<Config>::for_each(work, [&](const PairBiasForwardTaskSm90<Config> &task, int) {
    const int64_t tile = int64_t(task.plane) * work.groups * work.tiles +
                         task.first_source / Config::kTaskSources * work.tiles + task.first_row / Config::kRows;
    if (threadIdx.x == 0) splits_of[tile].push_back(task.split);
    for (int key = task.begin; key < task.end; ++key) count(tile, key);
  });
}
template <MaskRows kMaskRows, TaskParts kParts> Work check_forward_sm90() {
  using Config = PairBiasForwardConfigSm90<__half, 64, 1, BiasType::element, kMaskRows, kParts>;
  splits_of.clear();
  PairBiasForward work{};
  fdm_problem &p = work.call.p;
  p = draw_problem();
  p.queries = draw(1, 2000);
  p.keys = draw(1, 2000);
  p.bias.shape[0] = draw(1, 3);
  p.bias.shape[1] = draw(1, 3);
  work.groups = int32_t(draw(1, 5));
  work.tiles = int32_t(ceil_div(p.queries, Config::kRows));
  const int64_t groups = p.bias.shape[0] * p.bias.shape[1] * work.groups;
  int64_t steps = 0;
  for (int64_t tile = 0; tile < work.tiles; ++tile) steps += visible_key_tiles(p, tile, Config::kRows);
  const int64_t all = groups * (steps + work.tiles);
  work.steps = int32_t(steps + work.tiles);
  work.blocks = int32_t(draw(1, std::min<int64_t>(all, 40)));
  work.splits = Config::kSharesWork && draw(0, 2) ? 2 : 1;
  launch_blocks(forward_kernel_sm90<Config>, dim3(work.blocks), 32, work);
  if (int64_t(splits_of.size()) != groups * work.tiles) found[kNone] = 1;
  for (auto &[tile, splits] : splits_of) {
    std::sort(splits.begin(), splits.end());
    for (int n = 0; n < int(splits.size()); ++n)
      if (splits[n] != n) found[kNone] = 1;
  }
  return {groups * steps, [=](int64_t tile, int64_t key, int64_t) {
            return within(tile, groups * work.tiles) &&
                   within(key, visible_key_tiles(work.call.p, tile % work.tiles, Config::kRows));
          }};
}

// Sources of the fused kernel's tiles, in tasks for each tile or in equal shares of all steps.
template <bool kClusters> void fused_kernel(PairBiasBackward work) {
  const auto visit = [&](const PairBiasFusedTask &task) {
    const FusedWork &division = work.fused;
    const int64_t tile =
        (int64_t(task.plane) * division.row_tiles + task.row_tile) * division.key_tiles + task.key_tile;
    for (int64_t source = task.first; source < task.past; ++source) count(tile, source);
  };
  PairBiasFusedTask::for_each<kClusters>(work, visit);
}
template <bool kClusters> Work sources_of_tiles() {
  PairBiasBackward work{};
  FusedWork &division = work.fused;
  fdm_problem &p = work.call.p;
  p = draw_problem();
  division.row_tiles = int32_t(ceil_div(p.queries, kPairBiasTileSm90));
  division.key_tiles = int32_t(ceil_div(p.keys, kPairBiasTileSm90));
  division.planes = int32_t(draw(1, 4));
  division.sources = draw(1, 30);
  division.splits = int32_t(draw(kClusters, std::min<int64_t>(5, division.sources)));
  int64_t tiles = 0;
  for (int64_t row = 0; row < division.row_tiles; ++row)
    tiles += kClusters ? division.key_tiles : visible_key_tiles(p, row);
  const dim3 grid(draw(1, 9), kClusters ? division.row_tiles * division.key_tiles : 1);
  launch_blocks(fused_kernel<kClusters>, grid, 32, work);
  return {tiles * division.planes * division.sources, [=](int64_t tile, int64_t source, int64_t) {
            const FusedWork &own = work.fused;
            const int64_t row = tile / own.key_tiles, key = tile % own.key_tiles;
            return within(row, int64_t(own.planes) * own.row_tiles) && within(source, own.sources) &&
                   (kClusters || key < visible_key_tiles(work.call.p, row % own.row_tiles));
          }};
}

// Steps of the dbias tiles: the tiles of a block's steps, and its first step.
void dbias_kernel(PairBiasBackward work) {
  for (int64_t n = first_step(work.dbias, blockIdx.x); n < first_step(work.dbias, blockIdx.x + 1); ++n) {
    const DbiasTile tile(work, n / work.dbias.groups);
    count(tile.plane, tile.row_tile * int64_t(work.dbias.key_tiles) + tile.key_tile, n % work.dbias.groups);
  }
}
Work steps_of_dbias() {
  PairBiasBackward work{};
  fdm_problem &p = work.call.p;
  p = draw_problem();
  DbiasWork &division = work.dbias;
  division.tile_rows = int32_t(32 << draw(0, 2));
  division.tile_keys = int32_t(64 << draw(0, 1));
  division.row_tiles = int32_t(ceil_div(p.queries, division.tile_rows));
  division.key_tiles = int32_t(ceil_div(p.keys, division.tile_keys));
  division.groups = int32_t(draw(1, 7));
  for (int64_t tile = 0; tile < division.row_tiles; ++tile) division.tiles += live_key_tiles(p, division, tile);
  const int64_t planes = draw(1, 4);
  division.steps = planes * division.tiles * division.groups;
  division.blocks = int32_t(draw(1, std::min<int64_t>(division.steps, 40)));
  division.undivided = draw(0, 1);
  launch_blocks(dbias_kernel, dim3(division.blocks), 32, work);
  return {division.steps, [=](int64_t plane, int64_t tile, int64_t group) {
            const DbiasWork &own = work.dbias;
            const int64_t row = tile / own.key_tiles, key = tile % own.key_tiles;
            return within(plane, planes) && within(row, own.row_tiles) && within(group, own.groups) &&
                   within(key, live_key_tiles(work.call.p, own, row));
          }};
}

// Packed rows before the first sequence and from the last bound on. Exactly their results are cleared.
Work rows_of_no_sequence() {
  fdm_problem p = draw_problem();
  Packing packing(p, draw(1, 4), 60);
  const int64_t begin = draw(0, 1) * draw(0, 90);
  for (int32_t &bound : packing.bounds) bound += int32_t(begin);
  const int64_t end = packing.bounds.back(), rows = end + draw(0, 90), heads = p.heads, dim = draw(1, 40);
  p.q.shape[1] = rows;
  std::vector<uint16_t> out(rows * heads * dim, 1);
  std::vector<float> lse(heads * rows);
  fdm_forward_args args{};
  args.out = {out.data(), {1, rows, heads, dim}, {0, heads * dim, dim, 1}, FDM_FLOAT16, 0};
  args.lse = {lse.data(), {1, heads, rows, 1}, {0, rows, 1, 1}, FDM_FLOAT32, 0};
  const FillWork work = fill_work(args.out);
  if (launch_unused_rows(p, args, {work.vectors, std::min<int64_t>(work.blocks, draw(1, 9))}, nullptr))
    found[kNone] = 1;
  for (int64_t row = 0; row < rows; ++row)
    for (int64_t head = 0; head < heads; ++head) {
      const auto first = out.begin() + (row * heads + head) * dim;
      const int64_t zeros = std::count(first, first + dim, 0);
      if (const bool cleared = lse[head * rows + row] == -INFINITY; cleared || zeros > 0)
        ++found[cleared && zeros == dim ? Part{row, head, 0} : kNone];
    }
  return {(begin + rows - end) * heads, [=](int64_t row, int64_t head, int64_t) {
            return within(row, rows) && within(head, heads) && (row < begin || row >= end);
          }};
}

// Devices for drawn routes: all architectures, with few and many SMs.
DeviceFacts draw_device() {
  static BuiltFor built[3] = {built_for(), built_for(), built_for()};
  constexpr int kArchs[] = {80, 86, 90}, kSms[] = {1, 16, 78, 132, 133, 144, 256};
  const int64_t n = draw(0, 3) ? 2 : draw(0, 1);
  built[n].tile_arch = kArchs[n];
  return {&built[n], &route_table(kArchs[n]), kSms[draw(0, 6)]};
}
// Up to 10,000 sequences x heads, most often few, or one to six times the 132 SMs of an H100.
fdm_problem draw_large_problem() {
  fdm_problem p = draw_problem();
  const int64_t heads = draw(0, 2) == 0 ? draw(1, 10000) : draw(0, 1) ? draw(1, 60) : 132 * draw(1, 6) + draw(-1, 1);
  p.kv_heads = draw(1, std::min<int64_t>(heads, 16));
  p.heads = p.kv_heads * (draw(0, 1) ? 1 : draw(1, 8));
  p.batch = std::max<int64_t>(1, heads / p.heads);
  p.head_dim = 32 << draw(0, 3);
  p.queries = heads > 1000 ? draw(1, 300) : p.queries;
  p.keys = draw(0, 1) ? p.queries : (heads > 1000 ? draw(1, 600) : p.keys);
  static int64_t memory[2];
  const auto tensor = [&](int64_t rows, int64_t own_heads) {
    const int64_t row = own_heads * p.head_dim;
    return fdm_tensor{memory, {p.batch, rows, own_heads, p.head_dim}, {rows * row, row, p.head_dim, 1}, FDM_FLOAT16, 0};
  };
  p.q = tensor(p.queries, p.heads);
  p.k = p.v = tensor(p.keys, p.kv_heads);
  return p;
}
Alignment aligned(const fdm_problem &p) {
  Alignment lies = input_alignment(p);
  lies.inputs = true;
  return lies;
}

void block_tile_kernel(fdm_problem p, TileOrder order, int parts) {
  const HeadTile t = find_tile(p, order, blockIdx.x / parts);
  const int64_t part = t.tile * parts + parts - 1 - blockIdx.x % parts;
  if (t.has_rows() && part * (kTileRows / parts) < p.queries) count(t.sequence_index * p.heads + t.head, part);
}
void decode_place_kernel(ForwardParams params) {
  const DecodePlace place(params);
  count(place.sequence_index * params.p.heads + place.head, 0, blockIdx.y);
}
Work forward_routes() {
  fdm_problem p = draw_large_problem();
  if (draw(0, 2) == 0) p.queries = 1;
  const DeviceFacts device = draw_device();
  const ForwardRoute route = forward_route(p, device, aligned(p), draw(0, 5) ? 0 : draw(1, 20));
  ForwardParams params{};
  params.p = p;
  params.heads_per_tile = route.heads_per_tile;
  params.tiles = route.tiles;
  params.order = route.order;
  params.splits = route.splits;
  int64_t rows = route.tile_rows, tiles = ceil_div(p.queries * route.heads_per_tile, rows);
  const auto blocks = unsigned(route.blocks);
  if (route.kernel == ForwardKernel::boxes || route.kernel == ForwardKernel::persistent) {
    launch_blocks(tile_kernel, dim3(blocks), 32, p, route.order);
  } else if (route.kernel == ForwardKernel::small_tiles || route.kernel == ForwardKernel::small_boxes) {
    launch_blocks(block_tile_kernel, dim3(blocks), 32, p, route.order, int(kTileRows / rows));
  } else if (route.kernel == ForwardKernel::decode) {
    tiles = 1;
    launch_blocks(decode_place_kernel, dim3(blocks, route.splits), 32, params);
  } else if (route.kernel == ForwardKernel::direct) {
    return check_direct_decode(p, route.direct, route.blocks);
  } else {
    launch_blocks(forward_place_kernel, dim3(blocks), 32, params);
  }
  return split_tiles(params, tiles);
}

// The blocks of a chain have keys of one head. dQ of each tile begins once and ends once, and gets a part from each
// block that sees the tile.
void chain_kernel(BackwardParams params) {
  const fdm_problem &p = params.p;
  const ChainWalk walk(p, params.keys.tile_rows, params.keys.block_keys);
  const KeyBlockPlace place = small_block_of_head(params, blockIdx.x, blockIdx.y);
  const KeyBlockPlace first = small_block_of_head(params, blockIdx.x, 0);
  const int64_t head = place.sequence_index * p.kv_heads + place.kv_head;
  if (head != first.sequence_index * p.kv_heads + first.kv_head) found[kNone] = 1;
  if (!walk.has_steps()) return;
  for (int32_t tile = walk.first;; tile = walk.next_tile(tile)) {
    const uint32_t flags = walk.step_flags(tile, true);
    count(head, tile, place.block);
    if (flags & kDqBegins) count(head, tile, -2);
    if (flags & kDqEnds) count(head, tile, -3);
    if (tile == walk.last) break;
  }
}
Work check_chains(const BackwardParams &params) {
  const fdm_problem &p = params.p;
  const KeyWork &keys = params.keys;
  launch_blocks(chain_kernel, dim3(keys.heads, keys.blocks), 32, params);
  const int64_t tiles = ceil_div(p.queries, keys.tile_rows);
  const auto sees = [=](int64_t tile, int64_t block) {
    return !is_causal(p) || (tile + 1) * keys.tile_rows - 1 >= block * keys.block_keys - (p.keys - p.queries);
  };
  int64_t pairs = 2 * tiles; // for each head
  for (int64_t tile = 0; tile < tiles; ++tile)
    for (int64_t block = 0; block < keys.blocks; ++block) pairs += block == 0 || sees(tile, block);
  return {pairs * keys.heads, [=](int64_t head, int64_t tile, int64_t block) {
            return within(head, keys.heads) && within(tile, tiles) &&
                   (block == -2 || block == -3 || (within(block, keys.blocks) && (block == 0 || sees(tile, block))));
          }};
}
void small_block_kernel(BackwardParams params) {
  KeyBlockPlace place{};
  if (find_small_block(params, blockIdx.x, place))
    count(place.block, place.sequence_index * params.p.kv_heads + place.kv_head, blockIdx.y);
}
void key_item_kernel(BackwardParams params) {
  for (int32_t number = 0; number < params.keys.max_items; ++number) {
    const KeyItem item = key_item(params.keys, number);
    const KeyBlockPlace place = key_block_place(params, item.block);
    count(place.block, place.sequence_index * params.p.kv_heads + place.kv_head, item.part);
  }
}
Work backward_routes() {
  fdm_problem p = draw_large_problem();
  const bool kept = draw(0, 2) == 0;
  if (kept) {
    const int64_t batch = draw(0, 1) ? 1 : p.batch, heads = draw(0, 1) ? 1 : p.kv_heads;
    p.start = p.end = {&nothing, {batch, heads, 1, p.keys}, {heads * p.keys, p.keys, 0, 1}, FDM_INT32, 0};
    p.max_kept = draw(1, p.keys);
  }
  if (draw(0, 3) == 0) p.flags |= FDM_DETERMINISTIC;
  const BackwardRoute route = backward_route(p, draw_device(), aligned(p), {true, true, true, false, false});
  BackwardParams params{};
  params.p = p;
  params.group = int32_t(group_size(p));
  static_cast<KeyDivision &>(params.keys) = route.division;
  static_cast<SegmentWork &>(params.keys.segments) = route.segments;
  const KeyWork keys = params.keys;
  if (route.key_kernel == KeyKernel::chained) return check_chains(params);
  if (keys.segments.rows > 0) {
    const int64_t segments = keys.segments.count;
    return count_segments(params, [=](int64_t) { return std::pair{int64_t(0), segments}; });
  }
  if (keys.takes_planned_keys || route.scheduled) return {0, {}}; // the device determines the blocks
  const int64_t parts = route.key_kernel == KeyKernel::shared ? keys.shares : keys.parts;
  if (route.key_kernel == KeyKernel::shared)
    launch_blocks(small_block_kernel, dim3(keys.max_items, keys.shares), 32, params);
  else
    launch_blocks(key_item_kernel, dim3(1), 32, params);
  return each_of(ceil_div(p.keys, keys.block_keys), p.batch * p.kv_heads, parts);
}

// Bands of the sums of keys that several segments keep. There are warps for little more than these.
void sum_band_kernel(BackwardParams params, int64_t numbers) {
  for (int64_t number = 0; number < numbers; ++number) {
    const KeySumBand band(params, number);
    if (band.first < 0) continue;
    const ListSegments segments(params, band.s, band.sequence_index, 0);
    if (band.first < segments.past_sums - segments.first_sum)
      count(band.sequence_index, band.kv_head, band.first / kBandRows);
  }
}
template <bool kPacked> Work sums_of_segments() {
  fdm_problem p = draw_problem();
  static Packing *packing = nullptr;
  delete std::exchange(packing, kPacked ? new Packing(p, draw(1, 60), 3000) : nullptr);
  if (!kPacked) p.queries = p.keys = draw(1, 9000);
  if (p.queries == 0) return {0, {}};
  p.flags |= FDM_CAUSAL;
  p.max_kept = draw(1, draw(0, 1) ? 3000 : 200);
  static int32_t nothing = 0;
  const int64_t keys = kPacked ? p.k.shape[1] : p.keys;
  p.start = p.end = {&nothing, {1, 1, 1, keys}, {keys, keys, 0, 1}, FDM_INT32, 0};
  const BackwardRoute route = backward_route(p, draw_device(), aligned(p), {true, true, true, false, false});
  if (route.segments.max_sums <= 0) return {0, {}};
  BackwardParams params{};
  params.p = p;
  static_cast<KeyDivision &>(params.keys) = route.division;
  static_cast<SegmentWork &>(params.keys.segments) = route.segments;
  const int64_t numbers = route.segment_sum_blocks * (kRoundingThreads / 32), heads = route.division.heads;
  if (numbers > heads * (route.segments.max_sums / kBandRows + p.batch) + kRoundingThreads / 32) found[kNone] = 1;
  launch_blocks(sum_band_kernel, dim3(1), 32, params, numbers);
  const SegmentWork own = route.segments;
  const auto bands_of = [=](int64_t sequence) {
    if (!kPacked) return ceil_div(own.max_sums, kBandRows);
    const int64_t length = packing->bounds[sequence + 1] - packing->bounds[sequence];
    return ceil_div(own.row_sums == 0 ? length : length / own.rows * own.row_sums, kBandRows);
  };
  int64_t bands = 0;
  for (int64_t n = 0; n < p.batch; ++n) bands += bands_of(n);
  return {bands * p.kv_heads, [=](int64_t sequence, int64_t head, int64_t band) {
            return within(sequence, p.batch) && within(head, p.kv_heads) && within(band, bands_of(sequence));
          }};
}

// All launches of the fused kernel: each source of each tile with a visible key.
Work pair_bias_routes() {
  fdm_problem p = draw_large_problem();
  p.queries = std::max<int64_t>(17, p.queries);
  p.keys = std::max<int64_t>(100, draw(0, 1) ? p.keys : p.queries);
  p.head_dim = std::min<int64_t>(p.head_dim, 128);
  p.batch = std::min<int64_t>(p.batch, 300);
  static int64_t memory[2];
  const int64_t batch = draw(0, 1) ? 1 : p.batch, heads = draw(0, 1) ? p.heads : 1;
  p.bias = {memory,
            {batch, heads, p.queries, p.keys},
            {heads * p.queries * p.keys, p.queries * p.keys, p.keys, 1},
            FDM_FLOAT16,
            0};
  const BackwardRoute route = backward_route(p, draw_device(), aligned(p), {true, true, true, true, false});
  const FusedLaunches &launches = route.pair_bias.fused_launches;
  if (!route.is_pair_bias || !route.pair_bias.fused || launches.work.clusters || launches.work.small_tiles)
    return {0, {}};
  const int64_t bias_batch = p.bias.shape[0], group = p.heads / heads;
  int64_t batches = 0, parts = 0;
  for (int64_t first = 0; first < p.batch; first += batches) {
    PairBiasBackward work{};
    work.call.p = p;
    static_cast<FusedDivision &>(work.fused) = launches.launch(first, &batches);
    launch_blocks(fused_kernel<false>, dim3(work.fused.blocks), 32, work);
  }
  const FusedDivision own = launches.work;
  for (int64_t row = 0; row < own.row_tiles; ++row) parts += visible_key_tiles(p, row);
  const int64_t sources = (bias_batch == 1 ? p.batch : 1) * group;
  return {parts * bias_batch * heads * sources, [=](int64_t tile, int64_t source, int64_t) {
            const int64_t row = tile / own.key_tiles;
            return within(row, bias_batch * heads * own.row_tiles) && within(source, sources) &&
                   tile % own.key_tiles < visible_key_tiles(p, row % own.row_tiles);
          }};
}

// Each query head of each row, including rows of no sequence.
void list_kernel(const ListParams &params, int64_t tiles) {
  for (uint32_t index = 0;; ++index) {
    const int64_t number = tile_of_round(index);
    if (number >= tiles) return;
    ListTask task{};
    task.set(params.p, params.tiles, number);
    for (int32_t r = 0; r < task.heads; ++r)
      count(is_varlen(params.p) ? 0 : task.s.batch, task.s.q_begin + task.query, task.head + r);
  }
}
template <bool kPacked> Work routes_of_lists() {
  fdm_problem p = draw_problem();
  p.heads = p.kv_heads * draw(1, draw(0, 1) ? 9 : 300);
  p.head_dim = draw(1, 256);
  p.queries = draw(1, 40);
  static Packing *packing = nullptr;
  delete std::exchange(packing, kPacked ? new Packing(p, p.batch, 20) : nullptr);
  int64_t rows = p.queries;
  if (kPacked) {
    // Also rows before the first sequence and after the last.
    rows = packing->bounds.back() + draw(0, 3);
    if (rows == 0) return {0, {}};
    p.q.shape[1] = rows;
    p.k.shape[1] = INT32_MAX;
    packing->bounds[0] = draw(0, packing->bounds[1]);
  }
  const auto biases = [&](int64_t heads) {
    return fdm_tensor{&nothing, {1, heads, 1, 1}, {0, 0, 0, 0}, FDM_FLOAT32, 0};
  };
  p.indices = biases(1);
  if (draw(0, 1)) p.bias = biases(draw(0, 1) ? p.kv_heads : p.heads);
  if (draw(0, 1)) p.index_bias = biases(draw(0, 1) ? 1 : p.heads);
  const auto route_of = draw(0, 1) ? list_forward_route : list_backward_route;
  const ListRoute route = route_of(p, draw_device(), aligned(p));
  ListParams params{};
  params.p = p;
  params.tiles = route.tiles;
  launch_blocks(list_kernel, dim3(route.blocks), 32, params, route.count);
  return each_of(kPacked ? 1 : p.batch, rows, p.heads);
}

fdm_problem draw_long_lists() {
  fdm_problem p = draw_problem();
  p.heads = p.kv_heads * draw(1, 40);
  p.head_dim = draw(1, 256);
  p.keys = draw(1, 300'000);
  p.indices = {&nothing, {1, 1, p.queries, draw(1, 4096)}, {0, 0, 0, 1}, FDM_INT32, 0};
  return p;
}
// Each list tile sees each key in one pass, and its passes follow each other.
Work passes_of_lists() {
  const fdm_problem p = draw_long_lists();
  const ListRoute route = list_backward_route(p, draw_device(), aligned(p));
  int64_t past_key = 0;
  for (int64_t first = 0, n = 0; first < route.blocks; first += route.pass_blocks)
    for (int64_t part = 0; part < route.key_parts; ++part, ++n) {
      const ListPass pass = route.pass(n);
      const bool is_next = pass.first_key == (part == 0 ? 0 : past_key) && pass.is_first == (part == 0) &&
                           pass.is_last == (part == route.key_parts - 1);
      past_key = pass.past_key;
      if (is_next && (!pass.is_last || past_key == INT32_MAX)) ++found[{pass.first_tile, part, 0}];
    }
  const int64_t tiles = route.blocks, each = route.pass_blocks, parts = route.key_parts;
  return {tiles / each * parts, [=](int64_t tile, int64_t part, int64_t) {
            return tiles % each == 0 && within(tile, tiles) && tile % each == 0 && within(part, parts);
          }};
}

// The workspace of lists is sized before dout exists. It is large enough for a dout of any strides.
Work workspaces_of_lists() {
  const fdm_problem p = draw_long_lists();
  const DeviceFacts device = draw_device();
  Alignment results = aligned(p);
  results.dout_places = draw(0, 1);
  const int64_t used = list_backward_route(p, device, results).workspace_bytes;
  if (used <= list_backward_route(p, device, aligned(p)).workspace_bytes) ++found[{0, 0, 0}];
  return each_of(1);
}

} // namespace
} // namespace fdm::cuda

int main() {
  using namespace fdm::cuda;
  setenv("FDM_EMULATOR_THREADS", "1", 1); // thread blocks count one after the other
  constexpr int kFew = 20, kMany = 100;
  check("tiles of batches", kMany, tiles_of_batches);
  check("tiles of packed sequences", kFew, tiles_of_packed_sequences);
  check("blocks of keys", kMany, blocks_of_keys);
  check("blocks of segments", kMany, blocks_of_segments);
  check("blocks of packed segments", kFew, blocks_of_packed_segments);
  check("heads of a query", kMany, heads_of_a_query);
  check("tiles in parts", kMany, tiles_in_parts);
  check("pair bias forward for sm90, rows", kMany, check_forward_sm90<MaskRows::none, TaskParts::rows>);
  check("pair bias forward for sm90, mask", kMany, check_forward_sm90<MaskRows::each_query, TaskParts::rows>);
  check("pair bias forward for sm90, heads", kMany, check_forward_sm90<MaskRows::either, TaskParts::heads>);
  check("pair bias forward for sm90, keys", kMany, check_forward_sm90<MaskRows::either, TaskParts::keys>);
  check("sources of tiles", kMany, sources_of_tiles<false>);
  check("sources of clusters", kMany, sources_of_tiles<true>);
  check("steps of dbias", kMany, steps_of_dbias);
  check("rows of no sequence", kMany, rows_of_no_sequence);
  check("routes of forward", kMany / 2, forward_routes);
  check("routes of backward", kMany, backward_routes);
  check("sums of segments", kMany, sums_of_segments<false>);
  check("sums of packed segments", kMany, sums_of_segments<true>);
  check("routes of pair biases", kMany, pair_bias_routes);
  check("routes of lists", kFew, routes_of_lists<false>);
  check("routes of packed lists", kMany, routes_of_lists<true>);
  check("passes of lists", kMany, passes_of_lists);
  check("workspaces of lists", kMany, workspaces_of_lists);
}
