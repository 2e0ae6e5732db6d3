// SPDX-License-Identifier: BSD-3-Clause
// The backward pass: what the host hands to its kernels.
//
// Unless dq is summed as below, nothing is added by two blocks of threads, so equal inputs give equal bits:
//   1. prepare.cu              blocks of keys that are kept by similar rows (key_order.cuh, key_segments.cuh);
//                              statistics of each row;
//      key_schedule.cu         the division of many blocks of keys into parts;
//   2. dq.cuh                  dq, a tile of rows at a time, over the tile's columns;
//   3. dkdv.cuh                dk, dv and the bias gradient of each key, a block of keys at a time, over its rows;
//      key_sum.cu              sums the parts;
//      all_gradients.cuh, sm90/fused.cuh, sm90/small_blocks.cuh
//                              all of these at once, where equal bits are not asked for: blocks of keys add to float32
//                              sums of dq, and of keys that several segments of rows keep, in no fixed order, which
//                              round_sums.cu rounds. sm90/query_chain.cuh adds to dq in a fixed order, for few keys;
//   4. row_bias.cuh            a bias with a row for each query;
//      reduce.cu               a bias that is the same for every query: sums over what shares it; the sink of each head.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "../plan/plan.cuh"
#include "../tile/tile_order.cuh"

namespace fdm::cuda {

struct RowStatistics;
struct RowRange;

// A key that is kept, and the rows that keep it: start <= row < end.
struct alignas(16) KeyRows {
  int32_t key, start, end;
  int32_t sum; // the row of KeySegments::sums to which its gradients are added; -1: they are written
};

// A block of keys of a segment: the rows that keep any of them, which of the segment's blocks in `ordered` it is, and its
// keys. There is none where past < first.
struct alignas(16) SegmentBlock {
  int32_t first, past, position, keys;
};

// Segments of rows, where a selection tells how many keys a segment can keep. See key_segments.cuh.
struct KeySegments {
  int32_t rows;   // of a segment; 0: there are no segments
  int32_t count;  // segments of a list, over all packed sequences: numbers for them, as NumberedPart tells
  int32_t blocks; // blocks of keys of a segment
  // So many blocks of each segment come first, segment by segment, so that Q and dO of a segment are in the L2 cache
  // while its blocks are computed; then the others, the longest first.
  int32_t leading;
  // [list][segment]: keys that the segment keeps. If they are more than fit its blocks, in any segment of a list (of a packed
  // sequence), the blocks of all its segments have the kept keys of the list in key order.
  int32_t *live;
  SegmentBlock *order; // [list][segment][blocks]: the longest first
  // Keys that several segments keep have float32 sums, which round_sums.cu rounds. Heads are counted over sequences unless
  // these are packed.
  float *sums;      // [head][most_sums][dk, dv][D of the instantiation]
  float *bias_sums; // [head][most_sums]
  int32_t most_sums;
  int32_t row_sums;   // of packed sequences: sums for each `rows` rows; 0: one for each key
  int32_t *sum_keys;  // [list][most_sums]
  int32_t *sum_count; // [list][sequence of the batch, or 1]
};

// A block of keys of one key/value head, or one of the parts into which its rows and query heads are divided.
struct KeyItem {
  int32_t block; // see KeyWork::blocks
  int32_t part, parts;
  int32_t slot; // the slot of the first part's partial sums; only if parts > 1
};

// Which blocks of keys go through the tiles of rows from the last one on, and through the heads of a group for each; the others
// go through heads, and the tiles of rows from the first one on for each: `few`, those of lists that keep at most half of the
// keys.
enum class HeadsInside : uint8_t { none, few, all };

// The work of the key-stationary kernel.
struct KeyWork {
  // If true, blocks take kept keys in the order of `ordered`; if not, consecutive keys.
  bool listed;
  bool small;   // the kernel of sm90/small_blocks.cuh takes them, whose sizes kSmallBlock has
  bool chained; // the blocks of a head are a cluster, in which dq is summed as sm90/query_chain.cuh tells
  HeadsInside heads_inside;
  int32_t block_keys, tile_rows;
  int32_t
      shares; // small: blocks of threads of a cluster that share the steps of a block, as sm90/step_shares.cuh tells
  // `blocks` counts the blocks of one key/value head. A block of all heads has the number block * heads + head, where
  // heads are counted over sequences too (not over packed ones with segments, which count them), and are those of a group of
  // so many that are gone through together: see HeadsTogether.
  int32_t blocks, heads, together;
  int32_t buckets; // listed: buckets of kBucketKeys kept keys of a list and sequence
  // Above 0: every block has so many parts, and there is no schedule. Else `items` is the schedule.
  int32_t parts;
  int32_t max_items;
  int32_t sms;      // that have a block of threads each, if the schedule is to know them; else 0
  KeyRows *ordered; // [list][list_keys]: those of a sequence from its k_begin on; or [list][segment][its blocks' keys]
  KeySegments segments;
  RowRange *ranges; // [list][sequence][blocks]: rows that keep any key of the block
  KeyItem *items;
  int32_t *item_count;
  int32_t slot_count;
  float *slots; // each: dk, dv [block_keys][D of the instantiation], then [bias_heads][block_keys]
  int64_t slot_floats;
  int32_t slot_dim;
};

constexpr int kBucketKeys = 2048;
constexpr int kMostShares = 4; // of the steps of a small block
// kWantedItems is about how many parts the work of all blocks of keys is divided into: a few for each SM of the
// largest GPUs, which then end together. More parts would cost more partial sums, and memory for them. A part with
// fewer than kLeastSteps steps is not worth its own partial sums.
constexpr int64_t kWantedItems = 352, kLeastSteps = 16;

// The float32 sums of dq to which all blocks of keys add. See query_sums.cuh.
struct QuerySums {
  float *data;       // null: dq has a kernel of its own, or is summed in a chain of blocks
  int64_t head_rows; // rows of a head, those that no sequence has included
  int32_t tile_rows; // a sequence begins at a multiple of these
  int32_t dim;       // D of the instantiation
};

struct BackwardParams {
  fdm_problem p;
  fdm_backward_args a;
  Plan plan;
  int32_t group;             // query heads of a key/value head
  RowStatistics *statistics; // [batch, or 1 for varlen][head][row]
  float *sink_shares;        // [head][batch, or 1 for varlen][row]: what each row adds to the gradient of its sink
  KeyWork keys;
  QuerySums query_sums;
  // Of a bias without rows for queries: [batch, or 1 for varlen][kv head][bias_heads][1][key]. This is dbias itself, or
  // float32 sums for reduce.cu where several of them share an element of the bias.
  fdm_tensor bias_sums;
  bool reduces_bias;
  int32_t bias_heads; // bias heads of a key/value head: 1, or the query heads of a group
  bool wants_bias_sums;
  bool clears_keys;           // some rows of dk and dv are written by no kernel that computes them
  bool beside_dq;             // the key-stationary kernel is right behind dq
  bool aligned, dout_aligned; // what rows_are_aligned says of q, k and v, and of dout
  TileOrder order;            // of a persistent kernel
};

template <class Element, int kHeadDim> cudaError_t launch_dq(const BackwardParams &params, cudaStream_t stream);
template <class Element, int kHeadDim> cudaError_t launch_dkdv(const BackwardParams &params, cudaStream_t stream);
template <class Element, int kHeadDim> cudaError_t launch_row_bias(const BackwardParams &params, cudaStream_t stream);

// `key_gradients` says that gradients of keys, values or a bias of keys are wanted.
cudaError_t launch_prepare(const BackwardParams &params, bool key_gradients, cudaStream_t stream);
cudaError_t launch_key_schedule(const BackwardParams &params, cudaStream_t stream);
cudaError_t launch_key_sum(const BackwardParams &params, cudaStream_t stream);
cudaError_t launch_query_sums(const BackwardParams &params, cudaStream_t stream);
cudaError_t launch_key_segment_sums(const BackwardParams &params, cudaStream_t stream);
cudaError_t launch_bias_reduce(const BackwardParams &params, cudaStream_t stream);
cudaError_t launch_sink_reduce(const BackwardParams &params, cudaStream_t stream);

// The size does not depend on the current device.
int64_t backward_workspace_bytes(const fdm_problem &p);
cudaError_t run_backward(const fdm_problem &p, const fdm_backward_args &args, const void *plan, void *workspace);

} // namespace fdm::cuda
