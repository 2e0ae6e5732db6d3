// SPDX-License-Identifier: BSD-3-Clause
//
// A validated selection of the keys with the largest bias.
#pragma once

#include "broadcast.h"
#include "library.h"
#include "record.h"
#include "varlen.h"

namespace fdm {

// Holds addresses into the tensors it was made from and no references: the caller keeps them alive.
class Selection {
public:
  Selection(const fdm_pack &pack, const SelectionRecord &record, const Execution &execution);

  // The same for intervals and for keep.
  int64_t workspace_bytes() const { return workspace_bytes(selection_); }

  void intervals(nb::handle start, nb::handle end, nb::handle workspace) const;
  void keep(nb::handle keep, nb::handle workspace) const;

  // The same on the current stream of a tensor library, and in memory of its allocator. False, with nothing done, where
  // it does not offer both.
  bool intervals(const Exchange &exchange, nb::handle start, nb::handle end) const;
  bool keep(const Exchange &exchange, nb::handle keep) const;

private:
  void read_sizes(const SelectionRecord &record);
  void read_sequences(const SelectionRecord &record);
  void read_scores(const SelectionRecord &record, const TensorView &bias);
  int64_t workspace_bytes(const fdm_selection &selection) const;
  void require_result_shape(const fdm_tensor &result, const char *name) const;
  fdm_selection with_intervals(nb::handle start, nb::handle end) const;
  fdm_selection with_keep(nb::handle keep) const;
  void select(const fdm_selection &selection, nb::handle workspace) const;
  bool select(fdm_selection selection, const Exchange &exchange) const;
  void run(const fdm_selection &selection, fdm_buffer workspace) const;
  bool has_elements() const;

  const fdm_pack &pack_;
  fdm_selection selection_;
  Extents extents_;
  Device device_;
  int64_t result_shape_[4]; // the broadcast shape of bias and mask
};

} // namespace fdm
