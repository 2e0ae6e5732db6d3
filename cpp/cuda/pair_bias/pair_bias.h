// SPDX-License-Identifier: BSD-3-Clause
// Kernels for a pair bias, which has a value for each pair of a query and a key (triangle attention, evoformer). The
// keys of a key block are consecutive; nothing is gathered.
//
// These kernels use no plan: the bias is as large as the scores, so a plan saves little of what must be read anyway.
// K, V and the bias are loaded as tiles, and the mask is tested there. A key mask is one bit per key. A row mask or
// intervals set the bias in shared memory to -inf.
//
// The sources of a bias element are the pairs of a sequence and a query head that share it. A thread block works on
// several sources side by side (its slots), which read the same tile of bias and mask:
//   1. forward.cuh   out and lse, by row tiles;
//   2. dq.cuh        dq, by row tiles; also dbias if an element has one source;
//   3. dkdv.cuh      dk and dv, by key tiles;
//   4. dbias.cuh     dbias if an element has several sources: a tile of dbias stays in registers while the block
//                    loops over the sources. The steps of all tiles are divided evenly over the thread blocks. A tile
//                    may thus have several parts, which dbias_sum.cu adds in a fixed order.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "../forward/combine.h"
#include "../route/route.h"
#include "tile_sizes.cuh"

namespace fdm::cuda {

// The parameters of all pair bias kernels.
struct PairBiasCall : PairBiasFacts {
  fdm_problem p;
};

// The live tiles: those with a pair that the row mask keeps (live_tiles.cu). Bit k % 32 of word k / 32 of a row tile
// stands for key tile k. Without these words all tiles are live.
struct LiveTiles {
  uint32_t *words; // [plane][row_tiles][row_words]; null: all tiles are live
  int32_t row_tiles, row_words;

  __host__ __device__ const uint32_t *row(int plane, int row_tile) const {
    return words ? words + (int64_t(plane) * row_tiles + row_tile) * row_words : nullptr;
  }
  // `row`: the words of a row tile.
  __host__ __device__ static bool is_live(const uint32_t *row, int key_tile) {
    return !row || row[key_tile / 32] >> key_tile % 32 & 1;
  }
};

struct PairBiasForward : PairBiasForwardWork {
  PairBiasCall call;
  fdm_forward_args a;
  LiveTiles live;   // tiles that a row mask keeps
  bool out_aligned; // from rows_are_aligned
  Partials partials;
};

struct DbiasWork : DbiasDivision {
  float *parts; // [2 * blocks][tile_rows * tile_keys]: a block's first and last tile, if other blocks share them
};

// The float32 sums of dq, dk or dv for the sequences of a launch of sm90/fused.cuh. They have two halves
// (gradient_sums.cuh), each laid out like the gradient.
struct GradientSums {
  char *first, *second;     // null: not wanted
  char *spare;              // the second halves from sequence `before_spare` on
  int64_t batch, row, head; // strides in bytes
  int64_t rows;             // per head
  int32_t before_spare;
};

struct FusedWork : FusedDivision {
  GradientSums dq, dk, dv;
  float *dbias; // null: not wanted, or each tile has one thread block, which writes dbias itself
};

// `slots`, `tiles` and `groups`: row tiles and groups of sources for dq; key tiles and groups of sequences for dkdv.
struct PairBiasBackward : PairBiasTiles {
  PairBiasCall call;
  fdm_backward_args a;
  float *deltas; // of RowStatistics, from sequence `first_delta` on
  int32_t first_delta, delta_batches;
  int64_t delta_batch, delta_head, delta_row; // strides
  bool dbias_pairs;                           // two adjacent elements of a row of dbias can be stored at once
  bool writes_dbias;                          // dq writes dbias
  DbiasWork dbias;
  // Null if the fused kernel does not run. A kernel sets it to 1 if it finds a case that the fused kernel cannot
  // compute: a row with a large lse, whose P must be cut off at 1, or with a lse of NaN or +inf, or with a non-finite
  // delta (deltas.cu); or non-finite sums (fused_sums.cu), because P of a dropped pair is 0, but 0 times NaN or inf is
  // NaN. While it is 0, the kernels of fixed order compute nothing.
  uint32_t *non_finite;
  LiveTiles live; // of the fused kernel
  FusedWork fused;
};

struct PairBiasForwardLaunch {
  const ForwardRoute &route;
  const PairBiasForward &work;
};

template <class Element, int kHeadDim>
cudaError_t launch_pair_bias_forward(const PairBiasForwardLaunch &launch, cudaStream_t stream);
template <class Element, int kHeadDim>
cudaError_t launch_pair_bias_forward_sm90(const PairBiasForwardLaunch &launch, cudaStream_t stream);
template <class Element, int kHeadDim>
cudaError_t launch_pair_bias_dq(const PairBiasBackward &work, cudaStream_t stream);
template <class Element, int kHeadDim>
cudaError_t launch_pair_bias_dkdv(const PairBiasBackward &work, cudaStream_t stream);
template <class Element, int kHeadDim>
cudaError_t launch_pair_bias_dbias(const PairBiasBackward &work, cudaStream_t stream);
template <class Element, int kHeadDim>
cudaError_t launch_pair_bias_fused(const PairBiasBackward &work, cudaStream_t stream);
// `with_dbias`: the sums of dbias are complete and are rounded too.
cudaError_t launch_fused_sums(const PairBiasBackward &work, bool with_dbias, cudaStream_t stream);
// `first`: before the fused kernel. `again`: after it, if it overwrote deltas that the kernels of fixed order need.
enum class MakeDeltas { first, again };
cudaError_t launch_deltas(const PairBiasBackward &work, const StatisticsDivision &rows, MakeDeltas when,
                          cudaStream_t stream);
cudaError_t launch_live_tiles(const PairBiasCall &call, const LiveTiles &live, cudaStream_t stream);
cudaError_t launch_pair_bias_dbias_sum(const PairBiasBackward &work, const PartSumGrid &grid, cudaStream_t stream);

cudaError_t run_pair_bias_forward(const fdm_problem &p, const fdm_forward_args &args, const ForwardRoute &route,
                                  const Alignment &alignment, void *workspace);
cudaError_t run_pair_bias_backward(const fdm_problem &p, const fdm_backward_args &args,
                                   const PairBiasBackwardRoute &route, const Alignment &alignment, void *workspace);

} // namespace fdm::cuda
