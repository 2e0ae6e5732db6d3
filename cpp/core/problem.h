// SPDX-License-Identifier: BSD-3-Clause
//
// A validated attention problem, and the calls of a pack that work on it.
#pragma once

#include "broadcast.h"
#include "library.h"
#include "record.h"
#include "varlen.h"
#include "window.h"

namespace fdm {

struct BackwardArguments {
  nb::handle dout, dlse, out, lse;
  nb::dict gradients; // the tensors to write, by the names of the fields of AttentionRecord that they belong to
};

// Holds addresses into the tensors it was made from and no references: the caller keeps them alive.
class Problem {
public:
  Problem(const fdm_pack &pack, const AttentionRecord &record, const Execution &execution);

  int64_t plan_bytes() const { return plan_bytes_; }
  // The same, or 0 where the pack needs no plan for this call. Traced calls know too little to ask.
  int64_t needed_plan_bytes() const;
  int64_t workspace_bytes(fdm_pass pass) const;
  // How a call is computed, as the JSON text of fdm_pack.describe: with a backward pass for the gradients of these fields, if
  // there are any. Results are taken to be contiguous. Runs nothing.
  std::string describe(nb::tuple gradients) const;

  void plan(nb::handle plan, nb::handle workspace) const;
  void forward(nb::handle out, nb::handle lse, nb::handle plan, nb::handle workspace, int32_t splits) const;

  // forward, with a plan of its own where none is given, and an lse that nobody reads where that is None. What it needs
  // for these it takes from one scratch tensor, since allocations are a good part of a small call's time.
  int64_t attend_bytes(bool has_lse, bool has_plan) const { return scratch_of(has_lse, has_plan).bytes(); }
  void attend(nb::handle out, nb::handle lse, nb::handle plan, nb::handle scratch) const;
  // The same on the current stream of a tensor library, and in memory of its allocator. False, with nothing done, where
  // it does not offer both.
  bool attend(const Exchange &exchange, nb::handle out, nb::handle lse, nb::handle plan);
  // Of lse and of its gradient.
  int32_t lse_dtype() const { return problem_.bias.dtype == FDM_FLOAT64 ? FDM_FLOAT64 : FDM_FLOAT32; }
  // As attend, for a call whose plan is kept for backward; `makes_plan` says that it is still to be made. An lse that is
  // None lies behind the plan, in the last of kept_bytes(), and so it does for backward.
  int64_t kept_bytes(bool has_lse) const;
  bool attend_and_keep(const Exchange &exchange, nb::handle out, nb::handle lse, nb::handle plan, bool makes_plan);
  void backward(const BackwardArguments &arguments, nb::handle plan, nb::handle workspace) const;
  bool backward(const Exchange &exchange, const BackwardArguments &arguments, nb::handle plan);

private:
  // The bytes of each part of attend's scratch memory, where it is needed.
  struct Scratch {
    int64_t plan, lse, workspace;

    int64_t bytes() const { return plan + lse + workspace; }
  };

  void read_query(const AttentionRecord &record);
  void read_key_value(const AttentionRecord &record);
  void read_sequences(const AttentionRecord &record);
  void read_mask(const AttentionRecord &record);
  void read_bias(const AttentionRecord &record);
  void read_sink(const AttentionRecord &record);
  void read_settings(const AttentionRecord &record, const Execution &execution);
  void read_window(const AttentionRecord &record);
  void measure_plan();

  // A tensor of the shape and dtype of query, key or value.
  fdm_tensor read_like(nb::handle object, const char *name, const fdm_tensor &model, const char *model_name) const;
  fdm_tensor read_lse(nb::handle object, const char *name) const;
  fdm_tensor read_out(nb::handle object) const;
  Scratch scratch_of(bool has_lse, bool has_plan) const;
  fdm_tensor lse_behind(fdm_buffer plan) const;
  fdm_backward_args read_gradients(const BackwardArguments &arguments, fdm_buffer plan) const;

  // What a pack is given: where the problem selects its keys, start and end are the first part of the plan's memory.
  struct Placed {
    fdm_problem problem;
    fdm_selection selection;
    fdm_buffer plan;
  };
  // Who reads a plan: other calls too, or the forward pass alone.
  enum class PlanUse { kept, forward_only };
  Placed placed(fdm_buffer plan, PlanUse use = PlanUse::kept) const;
  void attend_in(void *memory, const Scratch &sizes, nb::handle out, nb::handle lse, nb::handle plan) const;
  void run_plan(fdm_buffer plan, fdm_buffer workspace, PlanUse use = PlanUse::kept) const;
  void run_forward(const fdm_tensor &out, const fdm_tensor &lse, int32_t splits, fdm_buffer plan, fdm_buffer workspace,
                   PlanUse use = PlanUse::kept) const;
  void run_backward(const fdm_backward_args &args, fdm_buffer plan, fdm_buffer workspace) const;

  const fdm_pack &pack_;
  fdm_problem problem_;
  Extents extents_;
  Device device_;
  bool paged_;
  bool has_bias_, has_sink_;
  bool selects_; // its keys, by its bias; start and end of problem_ then say no more than that there are intervals
  fdm_selection selection_;
  fdm_mask_kind mask_kind_;
  int64_t plan_bytes_;
};

} // namespace fdm
