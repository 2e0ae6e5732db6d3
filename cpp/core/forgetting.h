// SPDX-License-Identifier: BSD-3-Clause
//
// Validated forget gates, of which a pack makes the bias and the intervals of keys, or their gradient.
#pragma once

#include "checks.h"
#include "library.h"
#include "varlen.h"

namespace fdm {

// Holds addresses into the tensors it was made from and no references: the caller keeps them alive.
class Forgetting {
public:
  // Gates (B, H, N) or packed (H, total), with cu_seqlens then; padding (B, N). Gates below `least` count as it.
  Forgetting(const fdm_pack &pack, const TensorField &log_forget, const TensorField &padding,
             const TensorField &cu_seqlens, double least, const Execution &execution);

  // The same for both.
  int64_t workspace_bytes() const;

  // These return false, with nothing done, where the workspace has no memory.

  // bias (B, H, 1, N), packed (H, 1, total); start and end of the shape of the gates, or None and None.
  bool forget(const TensorField &bias, const TensorField &start, const TensorField &end, double prune,
              Workspace &&workspace) const;
  // dbias as bias, dlog_forget as the gates.
  bool forget_backward(const TensorField &dbias, const TensorField &dlog_forget, Workspace &&workspace) const;

private:
  // A tensor with an element for each gate; a bias has a dimension of 1 before the last one.
  fdm_tensor read_like(const TensorField &field, const char *name, DtypeSet allowed, bool is_bias) const;
  template <class Entry> bool run(Entry entry, const char *name, fdm_forgetting forgetting, Workspace &workspace) const;

  const fdm_pack &pack_;
  fdm_forgetting forgetting_;
  Device device_;
  bool varlen_;
};

} // namespace fdm
