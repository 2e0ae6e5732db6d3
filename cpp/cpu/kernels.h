// SPDX-License-Identifier: BSD-3-Clause
// The kernels, compiled once for each SIMD level, and the choice of the level.
#pragma once

#include <cstdint>

#include "columns.h"

namespace fdm::cpu {

// Keys that are gathered and multiplied at a time. 128 keys of D = 64 in float32 take 32 KB: the first-level cache.
constexpr int64_t kBlockKeys = 128;
// Rows (over all heads of a group) whose scores are held at a time: 64 x 128 floats take 32 KB.
constexpr int64_t kBlockRows = 64;
// Floats of the widest vector. Head dimensions are padded with zeros to a multiple of it.
constexpr int64_t kMaxLanes = 16;

static inline int64_t padded_head_dim(const fdm_problem &p) { return round_up(p.head_dim, kMaxLanes); }

// One tile of query rows for query heads [head, head + heads), which share a KV head and a column list.
struct TileTask {
  Sequence sequence;
  int64_t sequence_index;
  int64_t head, heads;
  int64_t first_row, rows;
};

// The destination of the gradients of a backward task: of keys, values and per-key bias for all keys of one sequence,
// and of sinks. The terms of a per-key bias gradient mostly cancel over the rows, so it is summed in float64.
struct KeyGradients {
  float *dk, *dv; // K rows of padded_head_dim floats, dk without the scale; null if not requested
  double *dbias;  // K sums for each bias head of the task; null if not requested
  double *dsink;  // one sum for each head of the task; null if not requested
  // The gradient of a per-query bias or of index_bias; null if not requested. Consecutive bias heads of the task are
  // `dbias_head_stride` floats apart. Each has a row for each row of the tile, `dbias_row_stride` floats apart, with a
  // float for each key or list position.
  float *per_query_dbias;
  int64_t dbias_row_stride, dbias_head_stride;
};

struct Kernels {
  const char *name;
  void (*forward_tile)(const fdm_problem &, const fdm_forward_args &, const void *plan, const TileTask &,
                       void *scratch);
  void (*backward_tile)(const fdm_problem &, const fdm_backward_args &, const void *plan, const TileTask &,
                        const KeyGradients &, void *scratch);
  // Adds only to the gradient of a per-query bias or of index_bias, for a task of one head.
  void (*per_query_dbias_tile)(const fdm_problem &, const fdm_backward_args &, const void *plan, const TileTask &,
                               const KeyGradients &, void *scratch);
  // Adds the probabilities of the tile's rows to the sums of their keys. Each head of the task has a row of sums; the
  // rows are `stride` floats apart.
  void (*key_mass_tile)(const fdm_problem &, const fdm_tensor &lse, const void *plan, const TileTask &, float *mass,
                        int64_t stride, void *scratch);
  // Copies `count` consecutive rows of `dim` elements, along dimension 1 from `offset` on.
  void (*load_rows)(const fdm_tensor &, int64_t offset, int64_t count, int64_t dim, float *rows);
};

// Bytes of scratch per thread for a pass.
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

// The widest level that this processor has, or the one named by FLASH_DMATTN_CPU_SIMD.
const Kernels &best_kernels();

} // namespace fdm::cpu
