// SPDX-License-Identifier: BSD-3-Clause
// A float64 bias per key. Kernels compute in float32, where a large bias would lose what matters of it, so the biases
// of a row tile are taken relative to the largest that its rows keep (RelativeBias), and so is its lse. A call finds
// these references first, and its kernels read a table of them in place of the bias. What is float32 there, lse and its
// gradient, is converted before and after.
#pragma once

#include <cuda_runtime_api.h>

#include "../plan/plan.cuh"
#include "../route/route.h"

namespace fdm::cuda {

// Of a problem with a float64 bias. Its plan has been made.
class RelativeProblem {
public:
  // `whole` is the problem as it was given.
  RelativeProblem(const fdm_problem &whole, const RelativeParts &parts, void *workspace);

  // The problem as kernels compute it, and its lse and the gradient of that in the workspace.
  const fdm_problem &problem() const { return relative_; }
  const fdm_tensor &lse() const { return lse_; }
  const fdm_tensor &dlse() const { return dlse_; }

  // Fills the table.
  cudaError_t launch_references(const Plan &plan, cudaStream_t stream) const;
  // Writes lse from what is relative, for the rows of all sequences.
  cudaError_t launch_widen(const fdm_tensor &lse, cudaStream_t stream) const;
  // Writes what is relative from lse and its gradient, if there is one.
  cudaError_t launch_narrow(const fdm_tensor &lse, const fdm_tensor &dlse, cudaStream_t stream) const;

private:
  RelativeParts parts_;
  fdm_problem whole_, relative_;
  fdm_tensor lse_, dlse_;
};

} // namespace fdm::cuda
