// SPDX-License-Identifier: BSD-3-Clause
// The kernels that are compiled once for each SIMD level, and the choice among them.
#pragma once

#include <cstdint>

#include "columns.h"

namespace fdm::cpu {

// Keys that are gathered and multiplied at a time. 128 keys of D = 64 in float32 are 32 KB: the first-level cache.
constexpr int64_t kBlockKeys = 128;
// Rows (of all heads of a group together) whose scores are held at a time: 64 x 128 floats are 32 KB.
constexpr int64_t kBlockRows = 64;
// Floats of the widest vector. Head dimensions are padded with zeros to a multiple of it.
constexpr int64_t kMaxLanes = 16;

static inline int64_t padded_head_dim(const fdm_problem &p) { return round_up(p.head_dim, kMaxLanes); }

// One tile of query rows for query heads [head, head + heads), which share a KV head and a list of columns.
struct TileTask {
  Sequence sequence;
  int64_t sequence_index;
  int64_t head, heads;
  int64_t first_row, rows;
};

// Where a backward task adds its gradients of keys, values and bias, of all keys of one sequence, and of sinks. What is
// summed over all rows for a bias mostly cancels, so it is summed in float64.
struct KeyGradients {
  float *dk, *dv; // K rows of padded_head_dim floats, dk without the scale; null if not wanted
  double *dbias;  // for each head of the task's bias rows: K sums; null if not wanted
  double *dsink;  // for each head of the task: a sum; null if not wanted
  // The gradient of a bias per query, or of that of what queries list; null if not wanted. The heads of the task's bias
  // rows lie `row_bias_head` floats apart. Each has a row for each row of the tile, `row_bias_stride` floats apart,
  // with a float for each key or place of a list.
  float *row_bias;
  int64_t row_bias_stride, row_bias_head;
};

struct Kernels {
  const char *name;
  void (*forward_tile)(const fdm_problem &, const fdm_forward_args &, const void *plan, const TileTask &,
                       void *scratch);
  void (*backward_tile)(const fdm_problem &, const fdm_backward_args &, const void *plan, const TileTask &,
                        const KeyGradients &, void *scratch);
  // Adds to the rows of a bias alone, for a task of one head.
  void (*bias_gradient_tile)(const fdm_problem &, const fdm_backward_args &, const void *plan, const TileTask &,
                             const KeyGradients &, void *scratch);
  // Adds the probabilities of the tile's rows to those of their keys: for each head of the task a row of `stride` sums.
  void (*key_mass_tile)(const fdm_problem &, const fdm_tensor &lse, const void *plan, const TileTask &, float *mass,
                        int64_t stride, void *scratch);
  // Copies rows of a tensor that follow each other in its second dimension, from `offset` on, each of `dim` elements.
  void (*load_rows)(const fdm_tensor &, int64_t offset, int64_t count, int64_t dim, float *rows);
};

// Bytes of scratch that each thread needs for a pass, for tiles of at most `heads` heads.
int64_t tile_scratch_bytes(const fdm_problem &p, bool backward);

namespace baseline {
const Kernels &kernels();
}
#if defined(__x86_64__)
namespace avx2 {
const Kernels &kernels();
}
namespace avx512 {
const Kernels &kernels();
}
#endif

// The widest level that this processor has, or the one that FLASH_DMATTN_CPU_SIMD names.
const Kernels &best_kernels();

} // namespace fdm::cpu
