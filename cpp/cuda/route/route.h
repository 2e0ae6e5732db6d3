// SPDX-License-Identifier: BSD-3-Clause
// The route of a call: the kernels that compute it, their order, the division of their work, and the layout of the
// workspace. A route depends on the problem, the alignment of its tensors, and facts about the device. Everything
// here is plain C++ without CUDA. Workspace sizes, plans and launches all read the same route, and so do tests
// without a GPU.
#pragma once

#include <cstdint>

#include "../plan/plan.cuh"
#include "facts.h"
#include "helper_work.h"
#include "pair_bias_work.h"

namespace fdm::cuda {

// The kernels of a route, in launch order.
struct Launches {
  static constexpr int kRoom = 16;
  const char *kernel[kRoom];
  int count = 0;

  void add(const char *name) { kernel[count++] = name; }
  void add(const Launches &more) {
    for (int n = 0; n < more.count; ++n) add(more.kernel[n]);
  }
};

// Divides numbers below 2^31 by a number that the host knows, with one multiplication (Granlund and Montgomery,
// "Division by invariant integers using multiplication", 1994).
struct Divisor {
  uint32_t multiplier = 0; // ceil(2^shift / divisor)
  int32_t shift = 0;

  Divisor() = default;
  // 0 counts as 1.
  explicit Divisor(int64_t number) {
    const int64_t divisor = min64(max64(number, 1), int64_t(1) << 31);
    int bits = 0; // ceil(log2(divisor))
    while (int64_t(1) << bits < divisor) ++bits;
    shift = 31 + bits;
    multiplier = uint32_t(((uint64_t(1) << shift) + uint64_t(divisor) - 1) / uint64_t(divisor));
  }
};

FDM_INLINE uint32_t divide(uint32_t number, const Divisor &divisor) {
  return uint32_t(uint64_t(number) * divisor.multiplier >> divisor.shift);
}

// The order of the row tiles of a batch. The tiles of this many sequences and query heads (whole GQA groups) are
// interleaved, so that the keys that concurrent tiles read fit L2.
struct TileOrder {
  int32_t sequences, heads;
  // Divisors of tile numbers: the tiles of all sequences of `heads` heads; `heads`; the tiles of a head of `sequences`
  // sequences of a dense batch; `sequences`.
  Divisor pass_tiles, heads_divisor, interleaved_tiles, sequences_divisor;

  TileOrder() = default;
  TileOrder(const fdm_problem &p, int64_t sequence_count, int64_t head_count)
      : sequences(int32_t(sequence_count)), heads(int32_t(head_count)), pass_tiles(sequence_tiles(p) * heads),
        heads_divisor(heads), interleaved_tiles(ceil_div(p.queries, kTileRows) * sequences),
        sequences_divisor(sequences) {}
};

// Query rows of a thread block of the decode kernel: the queries of all heads of a tile.
constexpr int kDecodeRows = 16;
// Direct decode kernel: maximum heads of a block, keys of a warp per turn, and maximum warps of a block.
constexpr int kDirectRows = 8, kDirectKeys = 32, kDirectWarps = 8;

// The workspace of a float64 bias (host/relative_bias.h): a RelativeBias for each sequence, head and row tile, and
// lse and dlse of each row relative to it.
struct RelativeParts {
  Part biases, lse, dlse;
  int64_t reference_blocks, conversion_blocks; // thread blocks: one for each RelativeBias; for the conversion of rows
};

enum class ForwardKernel : uint8_t {
  none,                 // no rows
  general,              // forward.cuh for rare cases: unaligned rows, a per-query bias
  usual,                // forward.cuh
  crowded,              // forward.cuh with three thread blocks per SM
  decode,               // decode.cuh
  direct,               // direct_decode.cuh
  persistent,           // sm90/forward.cuh
  boxes,                // the same with TMA boxes of consecutive keys (sm90/forward_boxes.cuh)
  small_tiles,          // sm90/small_tiles.cuh
  small_boxes,          // sm90/small_boxes.cuh
  pair_bias,            // pair_bias/forward.cuh
  pair_bias_sm90,       // pair_bias/sm90/forward.cuh
  pair_bias_small_tiles // the same with TaskParts::sources
};

// The division of the direct decode kernel, in which one query reads the keys without a list.
struct DirectWork {
  int32_t heads_per_block;    // of a thread block; the last block of a group may have fewer
  int32_t blocks_per_kv_head; // without splits
  int32_t clusters_per_block; // clusters that share the keys of a block; combine.cu merges their results
  // blocks of a cluster, which must all be resident at once; the driver may allow fewer
  int32_t max_splits;
  int32_t max_warps; // of a block with max_splits

  // The warps of a block, with `splits` blocks per cluster.
  int32_t warps(const RouteTable &table, int64_t keys, int64_t blocks, int64_t splits, int64_t sms) const;
};

struct ForwardRoute {
  ForwardKernel kernel;
  bool too_large;              // kernels number the tiles of all heads by 31 bits
  int32_t head_dim, value_dim; // of the instantiation
  int32_t tile_rows, tile_columns;
  int32_t heads_per_tile; // 1, or the group size
  int32_t tiles;          // of the longest sequence
  int32_t splits;         // split-KV parts
  bool merges_in_cluster; // the splits of a decode call form a cluster
  bool small_blocks;      // decode.cuh: thread blocks of fewer warps, of which several share an SM
  bool finds_keys;        // decode.cuh reads the mask and lists the kept keys; there is no plan
  int64_t blocks;         // thread blocks; for a cluster, only one is counted
  TileOrder order;
  DirectWork direct;
  PairBiasFacts pair_bias_facts;
  PairBiasForwardWork pair_bias;
  FillWork unused_rows; // rows of `out` outside all packed sequences
  CombineWork combine;
  Part partials; // partial results of splits or parts
  Part tickets;  // the ticket counter of the tile scheduler
  Part live;     // bitmap of tiles with kept pairs
  RelativeParts relative;
  int64_t workspace_bytes;
  Launches launches;

  bool is_pair_bias() const { return kernel >= ForwardKernel::pair_bias; }
  bool takes_narrow_values() const {
    return kernel == ForwardKernel::none || kernel == ForwardKernel::persistent || kernel == ForwardKernel::boxes;
  }
  bool copies_boxes() const { return kernel == ForwardKernel::boxes || kernel == ForwardKernel::small_boxes; }
};

// `splits` is the caller's choice; 0: the route chooses.
ForwardRoute forward_route(const fdm_problem &p, const DeviceFacts &device, const Alignment &alignment, int64_t splits);
// The workspace for any route of the problem on any device with at most as many SMs.
int64_t forward_workspace(const fdm_problem &p, const DeviceFacts &device);

// Whether a forward pass that alone would use its plan needs none. Its thread blocks then read the mask.
bool needs_no_plan(const fdm_problem &p, const DeviceFacts &device);

// The loop order of a key block. With heads inside, it visits the row tiles from last to first and, for each, the
// heads of the group. Otherwise it visits the heads and, for each, the row tiles from first to last. few: heads are
// inside for blocks of lists that keep at most half of the keys.
enum class HeadsInside : uint8_t { none, few, all };

// Maximum thread blocks of a cluster that share the steps of a small key block: step_shares.cuh has room for this
// many sums.
constexpr int kShareRoom = 4;
constexpr int kBucketKeys = 2048;

// Segments of rows, for selections that bound the number of keys of a segment (max_kept). See key_segments.cuh.
struct SegmentWork {
  int32_t rows;   // of a segment; 0: no segments
  int32_t count;  // segments of a list, over all packed sequences, numbered as in NumberedPart
  int32_t blocks; // key blocks of a segment
  // The first `leading` blocks of each segment are launched first, segment by segment, so that Q and dO of a segment
  // stay in L2. The other blocks follow, longest first.
  int32_t leading;
  int32_t max_sums;
  int32_t row_sums; // packed sequences: key sums for each `rows` rows; 0: one for each key
};

// How the key-stationary kernels divide their work.
struct KeyDivision {
  // true: blocks take the kept keys of the plan in an order of their own; false: consecutive keys
  bool takes_planned_keys;
  bool small;   // sm90/small_blocks.cuh computes them, with the sizes of kSmallBlock
  bool chained; // the blocks of a head form a cluster that sums dQ as in sm90/query_chain.cuh
  HeadsInside heads_inside;
  int32_t block_keys, tile_rows;
  int32_t shares; // small: thread blocks of a cluster that share the steps of a block (sm90/step_shares.cuh)
  // `blocks` counts the blocks of one KV head. The block number over all heads is block * heads + head. `heads`
  // counts over sequences too, except for packed sequences with segments, where segments count over sequences. Heads
  // are processed in groups of `heads_per_wave` heads (HeadGroup), and the number above applies within a group.
  int32_t blocks, heads, heads_per_wave;
  int32_t buckets; // takes_planned_keys: buckets of kBucketKeys kept keys of a list and sequence
  // Above 0: every block has this many parts, and there is no schedule.
  int32_t parts;
  int32_t max_items;
  int32_t sms; // SMs with one thread block each, if the schedule needs the number; else 0
  int32_t stored_parts;
  int64_t part_floats;
  int32_t sum_dim;
};

// The float32 sums of dQ to which key blocks add. See query_sums.cuh.
struct QuerySumWork {
  int64_t head_rows; // rows of a head, including rows outside all sequences
  int32_t tile_rows; // a sequence begins at a multiple of tile_rows
  int32_t dim;       // head dimension of the instantiation
};

enum class QueryKernel : uint8_t {
  none,
  general, // dq.cuh with a bias per query
  usual,   // dq.cuh
  wgmma    // sm90/dq.cuh
};
enum class KeyKernel : uint8_t {
  none,
  general, // dkdv.cuh with a bias per query
  usual,   // dkdv.cuh
  wgmma,   // sm90/dkdv.cuh
  // The kernels below compute all gradients.
  all,            // all_gradients.cuh
  fused,          // sm90/fused.cuh
  per_query_bias, // the same with a per-query bias
  per_query_mask, // the same with a per-query mask
  shared,         // sm90/small_blocks.cuh: thread blocks of a cluster share the steps of a key block
  chained,        // sm90/small_blocks.cuh: the key blocks of a head sum dQ in a chain
  mass            // sm90/key_mass.cuh, for the key mass pass
};

// The gradients that a launch of KeyKernel computes, for kernels that can compute a subset: dK and dV together; dK
// with the sums of the bias gradient; dV; or each in its own launch.
enum class KeyLaunches : uint8_t { both, dk, dv, separate };

// The gradients that a call requests.
struct RequestedGradients {
  bool dq, dk, dv, dbias, dsink;
};

inline RequestedGradients requested_gradients(const fdm_backward_args &args) {
  return {present(args.dq), present(args.dk), present(args.dv), present(args.dbias), present(args.dsink)};
}

struct BackwardRoute {
  bool nothing;                // no rows or no keys: the gradients are zeros
  bool is_pair_bias;           // pair bias kernels compute the gradients; see `pair_bias`
  bool too_large;              // kernels number thread blocks, and the tiles of all heads, by 31 bits
  int32_t head_dim, value_dim; // of the instantiation
  QueryKernel query_kernel;
  KeyKernel key_kernel;
  KeyLaunches key_launches;
  int64_t row_bias_blocks; // thread blocks of row_bias.cuh, which computes the bias gradient; 0: not launched
  // The gradient of a bias that is the same for every query; and its sum over broadcast dimensions.
  bool wants_bias_sums, reduces_bias;
  bool clears_dq, clears_dbias; // rows outside all sequences; pairs that no kernel visits
  bool clears_key_gradients;    // the kernels that compute dK and dV leave some rows unwritten
  bool wants_dkdv;              // dK or dV
  bool wants_key_gradients;     // dK, dV or the gradient of a per-key bias
  bool scheduled;               // a kernel divides the key blocks into parts
  bool general;                 // a per-query bias
  int32_t bias_heads;           // bias heads of a KV head: 1, or the group size
  int64_t blocks;               // thread blocks of the dQ kernel
  KeyDivision division;
  SegmentWork segments;
  QuerySumWork query_sums;
  TileOrder order;
  PreparationWork preparation;
  StatisticsDivision statistics_division;
  PartSumGrid key_sum;
  int64_t query_sum_blocks, segment_sum_blocks; // thread blocks that round those sums
  ReductionWork bias_reduction, sink_reduction;
  // [batch, or 1 for varlen][head][row]: row statistics, and the contribution of each row to the sink gradient
  Part statistics, sink_shares;
  Part query_sum_data, bias_sums;
  Part ordered, ranges, items, item_count, part_sums;
  Part segment_order, segment_kept, segment_sums, segment_bias_sums, segment_keys, segment_counts;
  RelativeParts relative;
  PairBiasBackwardRoute pair_bias;
  // Above 0: the fields above describe one of this many member calls (members.h), whose dK and dV are summed. Each
  // member call has its own plan.
  int32_t members;
  Part member_plan, member_plan_work, member_keys, member_values;
  int64_t member_sum_blocks; // thread blocks for each of dK and dV
  int64_t workspace_bytes;
  Launches launches;

  bool takes_narrow_values() const {
    return nothing || (key_kernel == KeyKernel::fused && query_kernel == QueryKernel::none);
  }
};

BackwardRoute backward_route(const fdm_problem &p, const DeviceFacts &device, const Alignment &alignment,
                             const RequestedGradients &wanted);
int64_t backward_workspace(const fdm_problem &p, const DeviceFacts &device);

// The key mass pass: a backward pass that computes only the gradient of a per-key bias of each query head. A
// per-query bias is not supported.
BackwardRoute key_mass_route(const fdm_problem &p, const DeviceFacts &device, const Alignment &alignment);
int64_t key_mass_workspace(const fdm_problem &p, const DeviceFacts &device);

// Whether the pair bias kernels compute the problem. They need no plan.
bool is_pair_bias(const fdm_problem &p, const DeviceFacts &device);

// The kernels that convert a mask to a plan.
enum class PlanKernel : uint8_t {
  none,
  rows,   // row_plan.cu
  blocks, // block_plan.cu
  list,   // short_lists.cu: one or a few thread blocks for each list
  tiles,  // interval_plan.cu: a thread block for each tile and for each part of the keys
  chunks, // interval_plan.cu: three launches
  runs    // run_plan.cu: two launches
};
// The thread blocks that list the kept keys of a list, and the parts or chunks that each goes through.
struct PlanParts {
  int32_t blocks, steps;
};

struct PlanRoute {
  PlanKernel kernel;
  int32_t threads;        // of a thread block
  int32_t keys_of_thread; // list
  int32_t parts;          // rows, blocks, list: thread blocks per list
  PlanParts list_parts;   // tiles, chunks
  bool aligned;           // rows: the booleans of several keys are loaded at once
  int64_t blocks;         // of the last launch
  int64_t chunk_blocks;   // chunks, over all lists; runs: sections instead
  Part counts;            // chunks: the number of kept keys of each block
  int64_t plan_bytes, workspace_bytes;
  Launches launches;
};
PlanRoute plan_route(const fdm_problem &p, const DeviceFacts &device);
// The same with the size of the plan of these blocks, of which plan_route() gives a lower bound.
PlanRoute block_plan_route(const fdm_problem &p, const fdm_mask_blocks &blocks, const DeviceFacts &device);

// The kernels that select keys.
enum class SelectionKernel : uint8_t {
  none,      // no keys, and no plan to make
  keep,      // keep.cu: a row of booleans for each row of the bias, one thread block each
  parts,     // keep_parts.cu: the same with several thread blocks each
  intervals, // intervals.cu
  list       // short_lists.cu, which also makes the plan if requested
};
struct SelectionRoute {
  SelectionKernel kernel;
  int32_t threads, keys_of_thread, parts;        // list
  SelectionChunks chunks;                        // intervals
  KeepParts keep;                                // parts
  Part states, digits, part_digits, seen, lists; // for keep_parts.cu
  int64_t blocks;
  int64_t workspace_bytes; // parts
  Launches launches;
};
// `p` is the problem whose plan the same launch makes, or null. A selection without start, end and keep is a
// selection of booleans: callers allocate results only after the workspace query.
SelectionRoute selection_route(const fdm_selection &s, const fdm_problem *p, const DeviceFacts &device);

} // namespace fdm::cuda
