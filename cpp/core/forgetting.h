// SPDX-License-Identifier: BSD-3-Clause
//
// Validated forget gates. A pack computes from them a per-key bias and intervals, or their gradient.
#pragma once

#include "checks.h"
#include "library.h"
#include "varlen.h"

namespace fdm {

// Holds addresses into its source tensors but no references: the caller keeps them alive.
class Forgetting {
public:
  // Gates (B, H, N), or packed (H, total) with cu_seqlens; padding (B, N). Gates below `least` count as `least`.
  Forgetting(const fdm_pack &pack, const TensorField &log_forget, const TensorField &padding,
             const TensorField &cu_seqlens, double least, const Execution &execution);

  // The workspace of either pass.
  int64_t workspace_bytes() const;

  // The methods below return false without effect if the workspace allocation fails.

  // bias (B, H, 1, N), packed (H, 1, total); start and end have the shape of the gates, or both are None.
  bool forget(const TensorField &bias, const TensorField &start, const TensorField &end, double prune,
              Workspace &&workspace) const;
  // dbias has the shape of bias, dlog_forget that of the gates.
  bool forget_backward(const TensorField &dbias, const TensorField &dlog_forget, Workspace &&workspace) const;

private:
  // A tensor with one element per gate; a bias has a dimension of 1 before the last.
  fdm_tensor read_like(const TensorField &field, const char *name, DtypeSet allowed, bool is_bias) const;
  template <class Entry> bool run(Entry entry, const char *name, fdm_forgetting forgetting, Workspace &workspace) const;

  const fdm_pack &pack_;
  fdm_forgetting forgetting_;
  Device device_;
  bool is_varlen_;
};

} // namespace fdm
