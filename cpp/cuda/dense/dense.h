// SPDX-License-Identifier: BSD-3-Clause
// Dense blocks, for problems with a bias for each query: the keys of a block are consecutive, and nothing is gathered.
//
// Such a bias is as large as the scores, so a plan could save little of what must be read anyway. K, V and the bias come
// as tiles, and the mask is tested there: one bit for each key of a mask of keys; a mask of rows, or intervals, makes
// -inf of the bias in shared memory. So there is no plan.
//
// Query heads and sequences that share an element of the bias are its sources. A block of threads works on several of
// them side by side (its slots), which read the same tile of bias and mask:
//   1. forward.cuh   out and lse, a tile of rows at a time;
//   2. dq.cuh        dq, a tile of rows at a time; and the gradient of the bias where it has one source;
//   3. dkdv.cuh      dk and dv, a tile of keys at a time;
//   4. dbias.cuh     the gradient of the bias where it has several sources: a tile of it stays in registers while its
//                    sources go by. The steps of all tiles are divided evenly over the blocks of threads, so a tile may
//                    have several parts, which dbias_sum.cu adds in a fixed order.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "../../pack.h"

namespace fdm::cuda {

// Keys of a block.
constexpr int kDenseKeys = 64;

// What all dense kernels are told.
struct DenseCall {
  fdm_problem p;
  int32_t batches, heads;        // sequences and query heads that share an element of the bias
  bool shares_mask;              // the sources of a bias have the mask in common, as far as it has rows
  bool bias_chunks, mask_chunks; // rows can be copied 16 bytes at a time
  bool aligned;                  // what rows_are_aligned says of q, k and v
};

struct DenseForward {
  DenseCall call;
  fdm_forward_args a;
  int32_t slots, tiles, groups; // tiles of rows; groups of `slots` sources
  int32_t splits;
  float *partial_out, *partial_max, *partial_sum; // as in ForwardParams
};

// How the tiles of the bias gradient and their steps are divided over blocks of threads. A step is the work of a tile on
// one group of sources.
struct DbiasWork {
  int32_t slots, tile_rows, tile_keys, row_tiles, key_tiles;
  int32_t stages; // of copies: 1 or 2
  int32_t groups; // steps of a tile
  int64_t tiles;  // of a unit, those without a visible key left out, but one of each row of tiles
  int64_t steps;  // of all tiles
  int32_t blocks; // of threads
  bool whole;     // no tile is divided
  float *parts;   // [2 * blocks][tile_rows * tile_keys]: of a block's first and last tile, where these are divided
};

struct DenseBackward {
  DenseCall call;
  fdm_backward_args a;
  float *deltas; // [batch][head][row]: delta of RowStatistics
  bool dout_aligned;
  bool dbias_pairs;             // two neighbours of a row of dbias can be stored at once
  int32_t slots, tiles, groups; // of dq: as in the forward pass; of dkdv: tiles of keys, and groups of sequences
  bool writes_dbias;            // dq writes the gradient of the bias
  DbiasWork dbias;
};

template <class Element, int kHeadDim> cudaError_t launch_dense_forward(const DenseForward &work, cudaStream_t stream);
template <class Element, int kHeadDim> cudaError_t launch_dense_dq(const DenseBackward &work, cudaStream_t stream);
template <class Element, int kHeadDim> cudaError_t launch_dense_dkdv(const DenseBackward &work, cudaStream_t stream);
template <class Element, int kHeadDim> cudaError_t launch_dense_dbias(const DenseBackward &work, cudaStream_t stream);
cudaError_t launch_deltas(const DenseBackward &work, cudaStream_t stream);
cudaError_t launch_dense_dbias_sum(const DenseBackward &work, cudaStream_t stream);

// Is a problem served by these kernels?
bool is_dense(const fdm_problem &p);

int64_t dense_forward_workspace_bytes(const fdm_problem &p);
cudaError_t run_dense_forward(const fdm_problem &p, const fdm_forward_args &args, void *workspace);
int64_t dense_backward_workspace_bytes(const fdm_problem &p);
cudaError_t run_dense_backward(const fdm_problem &p, const fdm_backward_args &args, void *workspace);

} // namespace fdm::cuda
