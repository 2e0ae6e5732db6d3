// SPDX-License-Identifier: BSD-3-Clause
//
// A validated selection of the keys with the largest bias.
#pragma once

#include "broadcast.h"
#include "library.h"
#include "record.h"
#include "varlen.h"

namespace fdm {

// Holds addresses into its source tensors but no references: the caller keeps them alive.
class Selection {
public:
  Selection(const fdm_pack &pack, const SelectionRecord &record, const Execution &execution);

  // The selection of booleans, in the form of pack.h.
  const fdm_selection &as_fdm_selection() const { return selection_; }

  // The workspace of either method below.
  int64_t workspace_bytes() const { return workspace_bytes(selection_); }

  // Both return false without effect if the workspace allocation fails.
  bool write_intervals(const TensorField &start, const TensorField &end, Workspace &&workspace) const;
  bool write_keep(const TensorField &keep, Workspace &&workspace) const;

private:
  void read_sizes(const SelectionRecord &record);
  void read_sequences(const SelectionRecord &record);
  void read_scores(const SelectionRecord &record, const TensorView &bias);
  int64_t workspace_bytes(const fdm_selection &selection) const;
  void require_result_shape(const fdm_tensor &result, const char *name) const;
  bool select(fdm_selection selection, Workspace &workspace) const;
  bool has_elements() const;

  const fdm_pack &pack_;
  fdm_selection selection_;
  Extents extents_;
  Device device_;
  int64_t result_shape_[4]; // the broadcast shape of bias and mask
};

} // namespace fdm
