// SPDX-License-Identifier: BSD-3-Clause
// The partial results of split-KV forward kernels in global memory, and the kernel that merges them.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "../route/workspaces.h"

namespace fdm::cuda {

struct Partials {
  float *out;       // [split][batch][head][query][D], not normalized
  float *max, *sum; // [split][batch][head][query], to base 2
};

inline Partials partials_at(void *memory, const fdm_problem &p, int64_t splits) {
  const int64_t rows = splits * partial_rows(p);
  float *const out = static_cast<float *>(memory);
  return {out, out + rows * p.head_dim, out + rows * (p.head_dim + 1)};
}

cudaError_t launch_combine(const fdm_problem &p, const fdm_forward_args &args, const ForwardRoute &route,
                           const Partials &partials, cudaStream_t stream);

} // namespace fdm::cuda
