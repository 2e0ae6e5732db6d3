// SPDX-License-Identifier: BSD-3-Clause
// A float64 per-key bias. Kernels compute in float32, which cannot resolve differences of large biases. Therefore the
// biases and lse of a row tile are relative to the largest bias that its rows keep (RelativeBias). A call first finds
// these references, and its kernels read a table of them in place of the bias. lse and dlse are float32 in kernels,
// and are converted before and after.
#pragma once

#include <cuda_runtime_api.h>

#include "../plan/plan.cuh"
#include "../route/route.h"

namespace fdm::cuda {

// A problem with a float64 bias. Its plan is complete.
class RelativeProblem {
public:
  // `absolute` is the problem as the caller gave it.
  RelativeProblem(const fdm_problem &absolute, const RelativeParts &parts, void *workspace);

  // The problem as kernels compute it, and its relative lse and dlse in the workspace.
  const fdm_problem &problem() const { return relative_; }
  const fdm_tensor &lse() const { return lse_; }
  const fdm_tensor &dlse() const { return dlse_; }

  // Fills the table of references.
  cudaError_t launch_references(const Plan &plan, cudaStream_t stream) const;
  // Computes lse from the relative lse, for the rows of all sequences.
  cudaError_t launch_absolute_lse(const fdm_tensor &lse, cudaStream_t stream) const;
  // Computes the relative lse and dlse from lse and, if present, dlse.
  cudaError_t launch_relative_lse(const fdm_tensor &lse, const fdm_tensor &dlse, cudaStream_t stream) const;

private:
  RelativeParts parts_;
  fdm_problem absolute_, relative_;
  fdm_tensor lse_, dlse_;
};

} // namespace fdm::cuda
