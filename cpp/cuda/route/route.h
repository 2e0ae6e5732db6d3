// SPDX-License-Identifier: BSD-3-Clause
// The route of a call: which kernels compute it, in which order, how each divides its work, and what they leave in the
// workspace. It follows from the problem, from how its tensors lie, and from facts of their device. Everything here is
// plain C++ without CUDA: the sizes of a workspace, plans and launches all read the same route, and so do tests without
// a GPU.
#pragma once

#include <cstdint>

#include "../plan/plan.cuh"
#include "facts.h"
#include "helper_work.h"
#include "pair_bias_work.h"

namespace fdm::cuda {

// What a route launches, in order.
struct Launches {
  static constexpr int kRoom = 16;
  const char *kernel[kRoom];
  int count = 0;

  void add(const char *name) { kernel[count++] = name; }
  void add(const Launches &more) {
    for (int n = 0; n < more.count; ++n) add(more.kernel[n]);
  }
};

// The order in which kernels go through the row tiles of a batch: so many sequences and heads of queries, those of
// whole groups, are gone through together, so that tiles which are under way at a time read keys that L2 has room for.
struct TileOrder {
  int32_t sequences, heads;
};

// The query rows of a block of the decode kernel: the queries of all heads of a tile.
constexpr int kDecodeRows = 16;
// The direct decode kernel: heads of a block at most, keys of a warp at a time, and warps of a block at most.
constexpr int kDirectRows = 8, kDirectKeys = 32, kDirectWarps = 8;

// What a float64 bias takes (host/relative_bias.h): a RelativeBias for each sequence, head and tile, and numbers of
// each row that are relative to it.
struct RelativeParts {
  Part biases, lse, dlse;
  int64_t reference_blocks, conversion_blocks; // of threads: one for each RelativeBias; and for numbers of rows
};

enum class ForwardKernel : uint8_t {
  none,             // there are no rows
  general,          // forward.cuh with the rare cases: rows that are not aligned, a bias per query
  usual,            // forward.cuh
  crowded,          // forward.cuh with three thread blocks on an SM
  decode,           // decode.cuh
  direct,           // direct_decode.cuh
  persistent,       // sm90/forward.cuh
  boxes,            // the same with boxes of consecutive keys (sm90/forward_boxes.cuh)
  small_tiles,      // sm90/small_tiles.cuh
  small_boxes,      // sm90/small_boxes.cuh
  pair_bias,        // pair_bias/forward.cuh
  pair_bias_sm90,   // pair_bias/sm90/forward.cuh
  pair_bias_windows // the same with TaskParts::sources
};

// One query that reads keys directly.
struct DirectWork {
  int32_t rows;              // heads of a block; the last one of a group may have fewer
  int32_t blocks_of_kv_head; // without splits
  int32_t parts;             // clusters that share the keys of a block; combine.cu merges their results
  int32_t most_splits; // blocks of a cluster, of which all have to run at the same time: the driver may know of fewer
  int32_t most_warps;  // of a block with so many splits

  // The warps of a block whose keys so many splits share.
  int32_t warps(const RouteTable &table, int64_t keys, int64_t blocks, int64_t splits, int64_t sms) const;
};

struct ForwardRoute {
  ForwardKernel kernel;
  int32_t head_dim, value_dim; // of the instantiation
  int32_t tile_rows, tile_columns;
  int32_t heads_per_tile; // 1, or the heads of a group
  int32_t tiles;          // of the longest sequence
  int32_t splits;         // parts of the columns
  bool merges_in_cluster; // the splits of a decoding call are a cluster
  bool finds_keys;        // decode.cuh lists the keys of the mask that it keeps: there is no plan
  int64_t blocks;         // of threads; of a cluster one alone
  TileOrder order;
  DirectWork direct;
  PairBiasFacts pair_bias_facts;
  PairBiasForwardWork pair_bias;
  FillWork unused_rows; // of `out`, that no packed sequence has
  CombineWork combine;
  Part partials; // results of splits or parts
  Part tickets;  // a counter of tiles, from which thread blocks take them
  Part live;     // tiles that a mask leaves
  RelativeParts relative;
  int64_t workspace_bytes;
  Launches launches;

  bool is_pair_bias() const { return kernel >= ForwardKernel::pair_bias; }
  bool takes_narrow_values() const {
    return kernel == ForwardKernel::none || kernel == ForwardKernel::persistent || kernel == ForwardKernel::boxes;
  }
  bool copies_boxes() const { return kernel == ForwardKernel::boxes || kernel == ForwardKernel::small_boxes; }
};

// `splits` is what a call asks for; 0: the route chooses.
ForwardRoute forward_route(const fdm_problem &p, const DeviceFacts &device, const Alignment &lies, int64_t splits);
// Room for any route of the problem on any device of so many SMs or fewer.
int64_t forward_workspace(const fdm_problem &p, const DeviceFacts &device);

// Whether a forward pass whose plan nothing else would use needs none. Its thread blocks then read the mask.
bool needs_no_plan(const fdm_problem &p, const DeviceFacts &device);

// Which key blocks go through the row tiles from the last one on, and through the heads of a group for each; the others
// go through heads, and the row tiles from the first one on for each: `few`, those of lists that keep at most half of
// the keys.
enum class HeadsInside : uint8_t { none, few, all };

// Thread blocks of a cluster that share the steps of a small key block: step_shares.cuh has room for the sums of so
// many.
constexpr int kShareRoom = 4;
constexpr int kBucketKeys = 2048;

// Segments of rows, where a selection tells how many keys a segment can keep. See key_segments.cuh.
struct SegmentWork {
  int32_t rows;   // of a segment; 0: there are no segments
  int32_t count;  // segments of a list, over all packed sequences: numbers for them, as NumberedPart tells
  int32_t blocks; // key blocks of a segment
  // So many blocks of each segment come first, segment by segment, so that Q and dO of a segment are in the L2 cache
  // while its blocks are computed; then the others, the longest first.
  int32_t leading;
  int32_t most_sums;
  int32_t row_sums; // of packed sequences: sums for each `rows` rows; 0: one for each key
};

// How the key-stationary kernels divide their work.
struct KeyDivision {
  // If true, blocks take kept keys in an order of their own; if not, consecutive keys.
  bool listed;
  bool small;   // the kernel of sm90/small_blocks.cuh takes them, whose sizes kSmallBlock has
  bool chained; // the blocks of a head are a cluster, in which dq is summed as sm90/query_chain.cuh tells
  HeadsInside heads_inside;
  int32_t block_keys, tile_rows;
  int32_t shares; // small: thread blocks of a cluster that share the steps of a block, as sm90/step_shares.cuh tells
  // `blocks` counts the blocks of one KV head. A block of all heads has the number block * heads + head, where heads
  // are counted over sequences too (not over packed ones with segments, which count them), and are those of a group of
  // so many that are gone through together: see HeadsTogether.
  int32_t blocks, heads, together;
  int32_t buckets; // listed: buckets of kBucketKeys kept keys of a list and sequence
  // Above 0: every block has so many parts, and there is no schedule.
  int32_t parts;
  int32_t max_items;
  int32_t sms; // that have a thread block each, if the schedule is to know them; else 0
  int32_t stored_parts;
  int64_t part_floats;
  int32_t sum_dim;
};

// The float32 sums of dq to which key blocks add. See query_sums.cuh.
struct QuerySumWork {
  int64_t head_rows; // rows of a head, those that no sequence has included
  int32_t tile_rows; // a sequence begins at a multiple of these
  int32_t dim;       // D of the instantiation
};

enum class QueryKernel : uint8_t {
  none,
  general, // dq.cuh with the rare cases
  usual,   // dq.cuh
  wgmma    // sm90/dq.cuh
};
enum class KeyKernel : uint8_t {
  none,
  general, // dkdv.cuh with the rare cases
  usual,   // dkdv.cuh
  wgmma,   // sm90/dkdv.cuh
  // These compute all gradients.
  all,      // all_gradients.cuh
  fused,    // sm90/fused.cuh
  row_bias, // the same with a bias that has a row for each query
  row_mask, // the same with a mask that has a row for each query
  shared,   // sm90/small_blocks.cuh: thread blocks of a cluster share the steps of a key block
  chained,  // sm90/small_blocks.cuh: the key blocks of a head sum dq in a chain
  mass      // sm90/key_mass.cuh, of the pass that sums the probabilities of keys
};

// Which gradients of keys a launch of KeyKernel computes, where kernels may have some of them alone: dk with the sums
// of the bias gradient, dv, both at once, or one after the other.
enum class KeyLaunches : uint8_t { both, keys, values, each };

// The gradients that a call wants.
struct Wanted {
  bool dq, dk, dv, dbias, dsink;
};

inline Wanted wanted_of(const fdm_backward_args &args) {
  return {present(args.dq), present(args.dk), present(args.dv), present(args.dbias), present(args.dsink)};
}

struct BackwardRoute {
  bool nothing;      // there are no rows or keys: the gradients are zeros
  bool is_pair_bias; // pair bias kernels compute the gradients: see `pair_bias`
  bool too_large;
  int32_t head_dim, value_dim; // of the instantiation
  QueryKernel dq;
  KeyKernel keys;
  KeyLaunches key_launches;
  int64_t row_bias_blocks; // of threads of row_bias.cuh, which computes the gradient of the bias; 0: it does not
  bool wants_bias_sums,
      reduces_bias;             // the bias is the same for every query; its gradient is summed over what shares it
  bool clears_dq, clears_dbias; // rows that no sequence has, or pairs that no kernel visits
  bool clears_keys;             // some rows of dk and dv are written by no kernel that computes them
  bool wants_dkdv;              // gradients of keys or values
  bool wants_keys;              // or of a bias of keys
  bool scheduled;               // the device divides the key blocks into parts
  bool general;                 // rows are not aligned, or a bias has a row for each query
  bool inputs_aligned, dout_aligned;
  int32_t bias_heads; // bias heads of a KV head: 1, or the query heads of a group
  int64_t blocks;     // of threads of the kernel of dq
  KeyDivision division;
  SegmentWork segments;
  QuerySumWork query_sums;
  TileOrder order;
  PreparationWork preparation;
  StatisticsDivision statistics_division;
  PartSumGrid key_sum;
  int64_t query_sum_blocks, segment_sum_blocks; // of threads that round those sums
  ReductionWork bias_reduction, sink_reduction;
  // [batch, or 1 for varlen][head][row] of statistics, and of what each row adds to the gradient of its sink
  Part statistics, sink_shares;
  Part query_sum_data, bias_sums;
  Part ordered, ranges, items, item_count, part_sums;
  Part segment_order, segment_kept, segment_sums, segment_bias_sums, segment_keys, segment_counts;
  RelativeParts relative;
  PairBiasBackwardRoute pair_bias;
  // Above 0: the rest is of one of so many calls, as members.h makes them, whose dk and dv are summed. Each has a plan
  // of its own.
  int32_t members;
  Part member_plan, member_plan_work, member_keys, member_values;
  int64_t member_sum_blocks; // of threads for each of dk and dv
  int64_t workspace_bytes;
  Launches launches;

  bool takes_narrow_values() const { return nothing || (keys == KeyKernel::fused && dq == QueryKernel::none); }
};

BackwardRoute backward_route(const fdm_problem &p, const DeviceFacts &device, const Alignment &lies,
                             const Wanted &wanted);
int64_t backward_workspace(const fdm_problem &p, const DeviceFacts &device);

// The pass that sums the probabilities of each key, as a backward pass that computes nothing but the gradient of a bias
// of each key and head. Not for a bias per query.
BackwardRoute key_mass_route(const fdm_problem &p, const DeviceFacts &device, const Alignment &lies);
int64_t key_mass_workspace(const fdm_problem &p, const DeviceFacts &device);

// Whether the pair bias kernels serve a problem; they need no plan.
bool is_pair_bias(const fdm_problem &p, const DeviceFacts &device);

// How a mask becomes a plan.
enum class PlanKernel : uint8_t {
  none,
  rows,   // row_plan.cu
  list,   // short_lists.cu: a thread block, or a few, for each list
  tiles,  // interval_plan.cu: a thread block for each tile and each part of the keys
  chunks, // interval_plan.cu: three launches
  runs    // run_plan.cu: two launches
};
struct PlanRoute {
  PlanKernel kernel;
  int32_t threads;              // of a block
  int32_t keys_of_thread;       // list
  int32_t parts;                // thread blocks. rows, list: for each list; tiles: for the kept keys of each
  bool aligned;                 // rows: the booleans of several keys are loaded at once
  int64_t blocks;               // of the last launch
  int64_t chunks, chunk_blocks; // chunks: of each list, and of all lists; runs: sections in their place
  Part counts;                  // chunks: kept keys of each
  int64_t plan_bytes, workspace_bytes;
  Launches launches;
};
PlanRoute plan_route(const fdm_problem &p, const DeviceFacts &device);

// How keys are selected.
enum class SelectionKernel : uint8_t {
  none,      // there are no keys, and no plan to make
  keep,      // keep.cu: a row of booleans for each row of the bias, by a thread block each
  parts,     // keep_parts.cu: the same, several blocks for each
  intervals, // intervals.cu
  list       // short_lists.cu, which makes the plan as well if one is wanted
};
struct SelectionRoute {
  SelectionKernel kernel;
  int32_t threads, keys_of_thread, parts;        // list
  SelectionChunks chunks;                        // intervals
  KeepParts keep;                                // parts
  Part states, digits, part_digits, seen, lists; // of keep_parts.cu
  int64_t blocks;
  int64_t workspace_bytes; // parts
  Launches launches;
};
// `p` is the problem whose plan is made in the same launch, or null. A selection without results, which callers have
// only once they know the workspace, is one of booleans.
SelectionRoute selection_route(const fdm_selection &s, const fdm_problem *p, const DeviceFacts &device);

} // namespace fdm::cuda
