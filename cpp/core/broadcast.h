// SPDX-License-Identifier: BSD-3-Clause
//
// The accepted shapes of masks, biases and intervals, and their 4-D forms in pack.h.
#pragma once

#include "../indexing.h"
#include "checks.h"

namespace fdm {

// The sizes that all tensors of a problem share.
struct Extents {
  static constexpr int64_t unknown = -1; // on a GPU, reading sums of sequence lengths would synchronize

  int64_t batch, heads, kv_heads;
  int64_t queries, keys;             // for varlen, of the longest sequence
  int64_t total_queries, total_keys; // varlen: of the packed dimensions; else queries and keys
  bool is_varlen;
};

// A mask, a bias, or an output tensor of their form.
//   4-D (batch|1, heads|kv_heads|1, queries|1, keys|1); 3-D and 2-D without the queries, and without the heads
//   varlen: 3-D (heads|kv_heads|1, 1, total_k) or (heads|kv_heads|1, total_q, max_seqlen_k)
fdm_tensor map_scores(const TensorView &view, const char *name, const Extents &extents);

// (batch|1, heads|kv_heads|1, keys); varlen (heads|kv_heads|1, total_k)
fdm_tensor map_intervals(const TensorView &view, const char *name, const Extents &extents);

// (batch, heads, queries); varlen (heads, total_q)
fdm_tensor map_lse(const TensorView &view, const char *name, const Extents &extents);

// The size of a part of a buffer, padded so that the next part begins at a multiple of 256 bytes, as CUDA allocations
// do.
constexpr int64_t padded(int64_t bytes) { return (bytes + 255) / 256 * 256; }

// An lse of this form in separate memory, and its bytes.
int64_t lse_bytes(const Extents &extents, int32_t dtype);
fdm_tensor contiguous_lse(void *data, const Extents &extents, int32_t dtype);

bool is_empty(const fdm_tensor &tensor);
bool same_shape(const fdm_tensor &a, const fdm_tensor &b);
inline Sizes shape_of(const fdm_tensor &tensor) { return {tensor.shape, 4}; }

} // namespace fdm
