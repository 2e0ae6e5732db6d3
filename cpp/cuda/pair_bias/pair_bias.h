// SPDX-License-Identifier: BSD-3-Clause
// Kernels for a pair bias, which has a value for each pair of a query and a key (triangle attention, evoformer). The
// keys of a block are consecutive, and nothing is gathered.
//
// Such a bias is as large as the scores, so a plan could save little of what must be read anyway. K, V and the bias come
// as tiles, and the mask is tested there: one bit for each key of a key mask; a row mask, or intervals, makes
// -inf of the bias in shared memory. So there is no plan.
//
// Query heads and sequences that share an element of the bias are its sources. A thread block works on several of
// them side by side (its slots), which read the same tile of bias and mask:
//   1. forward.cuh   out and lse, a row tile at a time;
//   2. dq.cuh        dq, a row tile at a time; and the gradient of the bias where it has one source;
//   3. dkdv.cuh      dk and dv, a key tile at a time;
//   4. dbias.cuh     the gradient of the bias where it has several sources: a tile of it stays in registers while its
//                    sources go by. The steps of all tiles are divided evenly over the thread blocks, so a tile may
//                    have several parts, which dbias_sum.cu adds in a fixed order.
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

// The live tiles: those of which a row mask keeps a pair (live_tiles.cu). Bit k % 32 of word k / 32 of a row tile tells
// of its tile k of keys. Without such bits all of them are live.
struct LiveTiles {
  uint32_t *words; // [plane][row tile][words_of(keys)]; null: none
  int32_t row_tiles, row_words;

  __host__ __device__ const uint32_t *row(int plane, int row_tile) const {
    return words ? words + (int64_t(plane) * row_tiles + row_tile) * row_words : nullptr;
  }
  // `row` is that of a row tile.
  __host__ __device__ static bool is_live(const uint32_t *row, int key_tile) {
    return !row || row[key_tile / 32] >> key_tile % 32 & 1;
  }
};

struct PairBiasForward : PairBiasForwardWork {
  PairBiasCall call;
  fdm_forward_args a;
  LiveTiles live;   // what a row mask leaves
  bool out_aligned; // as rows_are_aligned says
  Partials partials;
};

struct DbiasWork : DbiasDivision {
  float *parts; // [2 * blocks][tile_rows * tile_keys]: of a block's first and last tile, where these are divided
};

// The float32 sums of dq, dk or dv of the sequences of a launch of sm90/fused.cuh, in two halves (gradient_sums.cuh),
// each of which lies as the gradient does.
struct GradientSums {
  char *first, *second;     // null: not wanted
  char *spare;              // the second halves of the sequences from `before_spare` on
  int64_t batch, row, head; // strides in bytes
  int64_t rows;             // of a head
  int32_t before_spare;
};

struct FusedWork : FusedDivision {
  GradientSums dq, dk, dv;
  float *dbias; // null: not wanted, or each tile has one thread block, which writes it
};

// `slots`, `tiles` and `groups` are those of dq, as in the forward pass; of dkdv, of key tiles and groups of sequences.
struct PairBiasBackward : PairBiasTiles {
  PairBiasCall call;
  fdm_backward_args a;
  float *deltas; // of RowStatistics, for sequences from `first_delta` on
  int32_t first_delta, delta_batches;
  int64_t delta_batch, delta_head, delta_row; // strides
  bool dout_aligned;
  bool dbias_pairs;  // two neighbours of a row of dbias can be stored at once
  bool writes_dbias; // dq writes the gradient of the bias
  DbiasWork dbias;
  // Null if the fused kernel does not run. Not 0 once a kernel has found a case that the fused kernel cannot compute: a
  // row whose lse is so large that P needs care (deltas.cu), or sums that are not finite (fused_sums.cu), since P of a
  // dropped pair is 0, but 0 times NaN or Inf is NaN. The kernels of fixed order compute nothing while it is 0.
  uint32_t *non_finite;
  LiveTiles live; // of the fused kernel
  FusedWork fused;
};

// The parameters of a launch of the forward pass.
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
// `with_dbias`: the sums of dbias are complete.
cudaError_t launch_fused_sums(const PairBiasBackward &work, bool with_dbias, cudaStream_t stream);
// Deltas are made before the fused kernel, or again where it overwrote them and the kernels of fixed order need them.
enum class MakeDeltas { first, again };
cudaError_t launch_deltas(const PairBiasBackward &work, const StatisticsDivision &rows, MakeDeltas when,
                          cudaStream_t stream);
cudaError_t launch_live_tiles(const PairBiasCall &call, const LiveTiles &live, cudaStream_t stream);
cudaError_t launch_pair_bias_dbias_sum(const PairBiasBackward &work, const PartSumGrid &grid, cudaStream_t stream);

cudaError_t run_pair_bias_forward(const fdm_problem &p, const fdm_forward_args &args, const ForwardRoute &route,
                                  const Alignment &lies, void *workspace);
cudaError_t run_pair_bias_backward(const fdm_problem &p, const fdm_backward_args &args,
                                   const PairBiasBackwardRoute &route, const Alignment &lies, void *workspace);

} // namespace fdm::cuda
