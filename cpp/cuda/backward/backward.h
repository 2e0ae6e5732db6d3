// SPDX-License-Identifier: BSD-3-Clause
// The parameters of the backward kernels. These kernels run in this order:
//   1. prepare.cu              orders kept keys (key_order.cuh, key_segments.cuh); computes the statistics of each row;
//      key_schedule.cu         divides key blocks into parts;
//   2. dq.cuh                  dQ: a row tile for each thread block, which loops over the tile's columns;
//   3. dkdv.cuh                dK, dV and the gradient of a bias per key: a key block for each thread block, which
//                              loops over the rows;
//      key_sum.cu              sums the parts;
//      all_gradients.cuh, sm90/fused.cuh, sm90/small_blocks.cuh
//                              compute all of 2 and 3 in one kernel. Key blocks add to float32 sums of dQ, and of
//                              keys that several segments of rows keep, in no fixed order. round_sums.cu rounds these
//                              sums. For few keys, sm90/query_chain.cuh sums dQ in a fixed order instead;
//   4. row_bias.cuh            the gradient of a bias per query;
//      reduce.cu               the gradients of a bias per key that is shared, and of the sinks.
// Only the float32 sums of 3 are added in no fixed order. FDM_DETERMINISTIC excludes them, and equal inputs then give
// equal bits.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "../plan/plan.cuh"
#include "../route/key_parts.h"
#include "../route/route.h"

namespace fdm::cuda {

// Segments of rows. See key_segments.cuh.
struct KeySegments : SegmentWork {
  // [list][segment]: the number of keys that the segment keeps. If it exceeds the room in the segment's blocks, the
  // blocks of all segments of the list (of a packed sequence) have the list's kept keys in key order.
  int32_t *kept_count;
  SegmentBlock *order; // [list][segment][blocks]: the longest first
  // The float32 sums of keys that several segments keep. round_sums.cu rounds them. Heads are counted over sequences,
  // except packed ones.
  float *sums;        // [head][max_sums][dk, dv][D of the instantiation]
  float *bias_sums;   // [head][max_sums]
  int32_t *sum_keys;  // [list][max_sums]
  int32_t *sum_count; // [list][sequence of the batch, or 1]
};

// The work of the key-stationary kernels.
struct KeyWork : KeyDivision {
  KeyRows *ordered; // [list][list_keys], a sequence from its k_begin on; with segments [list][segment][blocks' keys]
  KeySegments segments;
  RowRange *ranges; // [list][sequence][blocks]: rows that keep any key of the block
  KeyItem *items;   // the schedule
  int32_t *item_count;
  // [stored part]: dk and dv, [block_keys][D of the instantiation] each, then the bias sums, [bias_heads][block_keys]
  float *part_sums;
};

// The float32 sums of dq to which all key blocks add. See query_sums.cuh.
struct QuerySums : QuerySumWork {
  float *data; // null: a dq kernel computes dq, or a chain of key blocks sums it
};

struct BackwardParams {
  fdm_problem p;
  fdm_backward_args a;
  Plan plan;
  int32_t group;             // query heads of a KV head
  fdm_tensor absolute_lse;   // float64 bias: the lse that is not relative to the references; else absent
  RowStatistics *statistics; // [batch, or 1 for varlen][head][row]
  float *sink_shares;        // [head][batch, or 1 for varlen][row]: the terms of the sink gradients
  KeyWork keys;
  QuerySums query_sums;
  // The sums of the gradient of a bias per key: [batch, or 1 for varlen][kv head][bias_heads][1][key]. If several share
  // an element of the bias, these are float32 sums for reduce.cu. Otherwise this is dbias itself.
  fdm_tensor bias_sums;
  bool reduces_bias;
  int32_t bias_heads; // bias heads of a KV head: 1, or the query heads of a group
  bool wants_bias_sums;
  bool only_mass;   // the key mass pass: bias_sums are sums of P, and no gradient is computed
  bool clears_keys; // prepare.cu clears rows of dk and dv that no gradient kernel writes
  bool follows_dq;  // the dq kernel is launched right before the key-stationary kernel
  TileOrder order;  // the tile order of a persistent kernel
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

// Computes the key mass: for each key, the sum of P over the rows.
cudaError_t run_key_mass(const fdm_problem &p, const fdm_key_mass_args &args, const DeviceFacts &device,
                         const void *plan, void *workspace);

cudaError_t run_backward(const fdm_problem &p, const fdm_backward_args &args, const DeviceFacts &device,
                         const void *plan, void *workspace);

} // namespace fdm::cuda
