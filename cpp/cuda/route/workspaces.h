// SPDX-License-Identifier: BSD-3-Clause
// The layout of workspaces.
#pragma once

#include "route.h"

namespace fdm::cuda {

struct WorkspaceParts {
  int64_t bytes = 0;

  Part take_bytes(int64_t size) {
    const Part part{bytes, size};
    bytes += size;
    return part;
  }
  template <class T> Part take(int64_t count) { return take_bytes(align_256(count * int64_t(sizeof(T)))); }
};

// Rows of partial results of a split; see forward/combine.h.
FDM_INLINE int64_t partial_rows(const fdm_problem &p) { return p.batch * p.heads * p.queries; }

// One split writes its results to the output and needs no partials.
inline int64_t partials_bytes(const fdm_problem &p, int64_t splits) {
  return splits == 1 ? 0 : splits * partial_rows(p) * (p.head_dim + 2) * int64_t(sizeof(float));
}

// Whether the bias needs RelativeParts.
inline bool has_relative_bias(const fdm_problem &p) { return p.bias.dtype == FDM_FLOAT64; }

constexpr int64_t kRelativeBiasBytes = 16;
// The tiles of each sequence and head.
FDM_INLINE int64_t relative_bias_tiles(const fdm_problem &p) { return ceil_div(p.queries, kTileRows); }

// `backward`: dlse has a part too.
inline RelativeParts take_relative_parts(WorkspaceParts *parts, const fdm_problem &p, bool backward) {
  RelativeParts relative{};
  if (!has_relative_bias(p)) return relative;
  const int64_t rows = (is_varlen(p) ? 1 : p.batch) * p.heads * total_rows(p);
  relative.reference_blocks = p.batch * p.heads * relative_bias_tiles(p);
  relative.conversion_blocks = ceil_div(rows, kRelativeThreads);
  relative.biases = parts->take_bytes(align_256(relative.reference_blocks * kRelativeBiasBytes));
  relative.lse = parts->take<float>(rows);
  if (backward) relative.dlse = parts->take<float>(rows);
  return relative;
}

// pair_bias_route.cpp: the functions of route.h for the pair bias kernels.
void choose_pair_bias_forward(ForwardRoute *route, const fdm_problem &p, const DeviceFacts &device,
                              const Alignment &alignment, int64_t splits);
int64_t pair_bias_forward_workspace(const fdm_problem &p, const DeviceFacts &device, const Alignment &alignment);
void choose_pair_bias_backward(BackwardRoute *route, const fdm_problem &p, const DeviceFacts &device,
                               const Alignment &alignment, const RequestedGradients &wanted);
int64_t pair_bias_backward_workspace(const fdm_problem &p, const DeviceFacts &device, const Alignment &alignment);

} // namespace fdm::cuda
