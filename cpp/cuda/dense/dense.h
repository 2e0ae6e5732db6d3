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

#include "../../indexing.h"
#include "../forward/combine.h"

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

// Rows and keys of a tile of the kernels for sm_90.
constexpr int kWideTile = 128;
// Windows are problems with at most so many rows and keys, and columns.
constexpr int kWindow = 64, kWindowHeadDim = 32;

// Tiles of kWideTile keys that a row of a tile of so many rows sees.
FDM_INLINE int32_t visible_key_tiles(const fdm_problem &p, int64_t row_tile, int tile_rows = kWideTile) {
  if (!is_causal(p)) return int32_t(ceil_div(p.keys, kWideTile));
  const int64_t last_row = min64((row_tile + 1) * tile_rows, p.queries) - 1;
  return int32_t(ceil_div(clamp64(last_row + p.keys - p.queries + 1, 0, p.keys), kWideTile));
}

// Which tiles a mask of rows leaves something of (live_tiles.cu): bit k % 32 of word k / 32 of a tile of rows tells of its
// tile k of keys. Without such bits all of them are live.
struct LiveTiles {
  uint32_t *words; // [unit][tile of rows][words_of(keys)]; null: none
  int32_t row_tiles, row_words;

  __host__ __device__ const uint32_t *row(int unit, int row_tile) const {
    return words ? words + (int64_t(unit) * row_tiles + row_tile) * row_words : nullptr;
  }
  // `row` is that of a tile of rows.
  __host__ __device__ static bool is_live(const uint32_t *row, int key_tile) {
    return !row || row[key_tile / 32] >> key_tile % 32 & 1;
  }
};

struct DenseForward {
  DenseCall call;
  fdm_forward_args a;
  int32_t slots, tiles, groups; // tiles of rows; groups of `slots` sources
  int32_t splits;
  // Of the kernel for sm_90. `pairs`: a task has half a tile of rows of two query heads that share K and V. `blocks` of
  // threads have equal shares of the `steps` of all groups where there are splits, and else whole tiles of rows.
  bool pairs;
  bool halves;           // a task has half a tile of rows, and each consumer warpgroup half of the keys of a block
  int32_t blocks, steps; // steps: of a group
  LiveTiles live;        // what a mask of rows leaves
  bool out_aligned;      // as rows_are_aligned says
  bool windows;          // a consumer warpgroup has a source, and a head of the bias `groups` blocks of threads
  Partials partials;
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

// Sources of a block of threads in their forward pass, where a bias has so many: as the registers of their sums allow.
constexpr int wide_sources(int head_dim) { return head_dim <= 64 ? 2 : 1; }
// Whether shared memory has room for the mask's rows of one source. It has none beside 128 columns and a float32 bias.
constexpr bool has_room_for_mask(int head_dim, bool wide_bias) { return head_dim <= 64 || !wide_bias; }

// The float32 sums of dq, dk or dv of the sequences of a launch of sm90/fused.cuh, in two halves (gradient_sums.cuh), each
// of which lies as the gradient does.
struct GradientSums {
  char *first, *second;     // null: not wanted
  char *spare;              // the second halves of the sequences from `before_spare` on
  int64_t batch, row, head; // strides in bytes
  int64_t rows;             // of a head
  int32_t before_spare;
};

// How sm90/fused.cuh divides its work: a launch has the sources of some of the batch, and `splits` tasks for each tile of
// kWideTile rows and keys. Where `splits` is 0, each block of threads has as many steps as any other, which follow each
// other; a step is the work of a tile on a source.
constexpr int kWideTileQuads = kWideTile * kWideTile / 4;

struct FusedWork {
  bool windows;  // a consumer warpgroup has all rows and keys of a source
  bool clusters; // a cluster has the tiles of a unit, and `splits` tasks for each unit
  int32_t row_tiles, key_tiles, splits;
  int32_t first_batch, batches;
  int32_t first_unit, units;     // a unit is a head of the bias, and an element of its batch
  int64_t first_source, sources; // of each unit
  GradientSums dq, dk, dv;
  float *dbias; // null: not wanted, or each tile has one block of threads, which writes it
  // Another launch follows: what it adds to is cleared once sums are rounded. In the gradients, its sums lie before those of
  // sequence `past_cleared`, counted from the first of this launch; else `past_cleared` is 0.
  bool clears;
  int32_t past_cleared;

  __host__ __device__ int64_t tiles() const { return int64_t(units) * row_tiles * key_tiles; }
};

struct DenseBackward {
  DenseCall call;
  fdm_backward_args a;
  float *deltas; // of RowStatistics, for sequences from `first_delta` on
  int32_t first_delta, delta_batches;
  int64_t delta_batch, delta_head, delta_row; // strides
  bool dout_aligned;
  bool dbias_pairs;             // two neighbours of a row of dbias can be stored at once
  int32_t slots, tiles, groups; // of dq: as in the forward pass; of dkdv: tiles of keys, and groups of sequences
  bool writes_dbias;            // dq writes the gradient of the bias
  DbiasWork dbias;
  // Not 0 once something is found that the fused kernel cannot deal with, and null where that is not tried: a row whose lse
  // is so large that P must be computed with care (deltas.cu), or sums that are not finite (fused_sums.cu), since a pair
  // that is dropped has P = 0, but 0 times NaN or Inf is NaN. The kernels of fixed order do nothing if nothing was found.
  uint32_t *odd;
  LiveTiles live; // of the fused kernel
  FusedWork fused;
};

template <class Element, int kHeadDim> cudaError_t launch_dense_forward(const DenseForward &work, cudaStream_t stream);
template <class Element, int kHeadDim> cudaError_t launch_dense_dq(const DenseBackward &work, cudaStream_t stream);
template <class Element, int kHeadDim> cudaError_t launch_dense_dkdv(const DenseBackward &work, cudaStream_t stream);
template <class Element, int kHeadDim> cudaError_t launch_dense_dbias(const DenseBackward &work, cudaStream_t stream);
template <class Element, int kHeadDim>
cudaError_t launch_dense_wide_forward(const DenseForward &work, cudaStream_t stream);
template <class Element, int kHeadDim> cudaError_t launch_dense_fused(const DenseBackward &work, cudaStream_t stream);
// `with_dbias`: the sums of dbias are complete.
cudaError_t launch_fused_sums(const DenseBackward &work, bool with_dbias, cudaStream_t stream);
// `again`: what the fused kernel overwrote, if the kernels of fixed order need it.
cudaError_t launch_deltas(const DenseBackward &work, bool again, cudaStream_t stream);
cudaError_t launch_live_tiles(const DenseCall &call, const LiveTiles &live, cudaStream_t stream);
cudaError_t launch_dense_dbias_sum(const DenseBackward &work, cudaStream_t stream);

// Whether these kernels serve a problem.
bool is_dense(const fdm_problem &p);

int64_t dense_forward_workspace_bytes(const fdm_problem &p);
cudaError_t run_dense_forward(const fdm_problem &p, const fdm_forward_args &args, void *workspace);
int64_t dense_backward_workspace_bytes(const fdm_problem &p);
cudaError_t run_dense_backward(const fdm_problem &p, const fdm_backward_args &args, void *workspace);

} // namespace fdm::cuda
