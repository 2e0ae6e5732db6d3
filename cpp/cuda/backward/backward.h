// SPDX-License-Identifier: BSD-3-Clause
// The backward pass: the parameters of its kernels.
//
// Unless dq is summed as below, nothing is added by two thread blocks, so equal inputs give equal bits:
//   1. prepare.cu              key blocks that are kept by similar rows (key_order.cuh, key_segments.cuh);
//                              statistics of each row;
//      key_schedule.cu         the division of many key blocks into parts;
//   2. dq.cuh                  dq, a row tile at a time, over the tile's columns;
//   3. dkdv.cuh                dk, dv and the bias gradient of each key, a key block at a time, over its rows;
//      key_sum.cu              sums the parts;
//      all_gradients.cuh, sm90/fused.cuh, sm90/small_blocks.cuh
//                              all of these at once, where equal bits are not asked for: key blocks add to float32
//                              sums of dq, and of keys that several segments of rows keep, in no fixed order, which
//                              round_sums.cu rounds. sm90/query_chain.cuh adds to dq in a fixed order, for few keys;
//   4. row_bias.cuh            a bias per query;
//      reduce.cu               a bias per key: sums over what shares it; the sink of each head.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "../plan/plan.cuh"
#include "../route/key_parts.h"
#include "../route/route.h"

namespace fdm::cuda {

// Segments of rows. See key_segments.cuh.
struct KeySegments : SegmentWork {
  // [list][segment]: keys that the segment keeps. If they are more than fit its blocks, in any segment of a list (of a
  // packed sequence), the blocks of all its segments have the kept keys of the list in key order.
  int32_t *kept;
  SegmentBlock *order; // [list][segment][blocks]: the longest first
  // Keys that several segments keep have float32 sums, which round_sums.cu rounds. Heads are counted over sequences
  // unless these are packed.
  float *sums;        // [head][most_sums][dk, dv][D of the instantiation]
  float *bias_sums;   // [head][most_sums]
  int32_t *sum_keys;  // [list][most_sums]
  int32_t *sum_count; // [list][sequence of the batch, or 1]
};

// The work of the key-stationary kernels.
struct KeyWork : KeyDivision {
  KeyRows *ordered; // [list][list_keys]: those of a sequence from its k_begin on; or [list][segment][its blocks' keys]
  KeySegments segments;
  RowRange *ranges; // [list][sequence][blocks]: rows that keep any key of the block
  KeyItem *items;   // the schedule
  int32_t *item_count;
  float *part_sums; // of each stored part: dk, dv [block_keys][D of the instantiation], then [bias_heads][block_keys]
};

// The float32 sums of dq to which all key blocks add. See query_sums.cuh.
struct QuerySums : QuerySumWork {
  float *data; // null: dq has a kernel of its own, or is summed in a chain of blocks
};

struct BackwardParams {
  fdm_problem p;
  fdm_backward_args a;
  Plan plan;
  int32_t group;             // query heads of a KV head
  fdm_tensor whole_lse;      // of a float64 bias, to whose references lse and biases are relative; else absent
  RowStatistics *statistics; // [batch, or 1 for varlen][head][row]
  float *sink_shares;        // [head][batch, or 1 for varlen][row]: what each row adds to the gradient of its sink
  KeyWork keys;
  QuerySums query_sums;
  // Of a bias without rows for queries: [batch, or 1 for varlen][kv head][bias_heads][1][key]. This is dbias itself, or
  // float32 sums for reduce.cu where several of them share an element of the bias.
  fdm_tensor bias_sums;
  bool reduces_bias;
  int32_t bias_heads; // bias heads of a KV head: 1, or the query heads of a group
  bool wants_bias_sums;
  bool only_mass;             // the pass of the key mass: these are sums of P, and no gradient is computed
  bool clears_keys;           // some rows of dk and dv are written by no kernel that computes them
  bool beside_dq;             // the kernel of dq is launched right before the key-stationary one
  bool aligned, dout_aligned; // what rows_are_aligned says of q, k and v, and of dout
  TileOrder order;            // of a persistent kernel
};

// The parameters of a launch.
struct BackwardLaunch {
  const BackwardRoute &route;
  const BackwardParams &params;
};

template <class Element, int kHeadDim> cudaError_t launch_dq(const BackwardLaunch &work, cudaStream_t stream);
template <class Element, int kHeadDim> cudaError_t launch_dkdv(const BackwardLaunch &work, cudaStream_t stream);
template <class Element, int kHeadDim> cudaError_t launch_row_bias(const BackwardLaunch &work, cudaStream_t stream);

cudaError_t launch_prepare(const BackwardLaunch &work, cudaStream_t stream);
cudaError_t launch_key_schedule(const BackwardParams &params, cudaStream_t stream);
cudaError_t launch_key_sum(const BackwardLaunch &work, cudaStream_t stream);
cudaError_t launch_query_sums(const BackwardLaunch &work, cudaStream_t stream);
cudaError_t launch_key_segment_sums(const BackwardLaunch &work, cudaStream_t stream);
cudaError_t launch_bias_reduce(const BackwardLaunch &work, cudaStream_t stream);
cudaError_t launch_sink_reduce(const BackwardLaunch &work, cudaStream_t stream);
cudaError_t launch_member_sums(const fdm_problem &p, const fdm_backward_args &args, const BackwardRoute &route,
                               void *workspace, cudaStream_t stream);

// The attention that each key received.
cudaError_t run_key_mass(const fdm_problem &p, const fdm_key_mass_args &args, const DeviceFacts &device,
                         const void *plan, void *workspace);

cudaError_t run_backward(const fdm_problem &p, const fdm_backward_args &args, const DeviceFacts &device,
                         const void *plan, void *workspace);

} // namespace fdm::cuda
