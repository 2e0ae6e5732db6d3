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

class Selection;

// The gradients of a call, None where one is not wanted, by the fields of AttentionRecord that they belong to, and that
// of Problem::list_keys.
struct Gradients {
  TensorField query, key, value, bias, sink;
  TensorField index_bias;

  template <class Visit> void each_field(Visit &&visit) {
    visit("query", query);
    visit("key", key);
    visit("value", value);
    visit("bias", bias);
    visit("sink", sink);
  }
};

// ValueError for a name that no gradient has.
Gradients read_gradients(nb::dict by_name);

struct BackwardArguments {
  TensorField dout, dlse, out, lse;
  Gradients gradients;
};

// What a forward pass leaves for the backward pass beside its output.
struct Kept {
  fdm_tensor start, end; // of the mask, or of the selection that the call makes
  fdm_buffer plan;       // the pack's
  fdm_tensor lse;
  fdm_tensor out_rest; // without data where the backward pass does not need it
};

// Holds addresses into the tensors it was made from and no references: the caller keeps them alive.
class Problem {
public:
  Problem(const fdm_pack &pack, const AttentionRecord &record, const Execution &execution);

  // Makes it a problem whose queries list their keys; index_bias may be None. The pack must have kernels for it.
  void list_keys(const TensorField &indices, const TensorField &index_bias);

  int64_t plan_bytes() const { return plan_bytes_; }
  // The same, or 0 where the pack needs no plan for this call. Traced calls know too little to ask.
  int64_t needed_plan_bytes() const;
  int64_t workspace_bytes(fdm_pass pass) const;
  // How a call is computed, as the JSON text of fdm_pack.describe: with a backward pass for the gradients of these
  // fields, if there are any. `before` selects the booleans that are the mask, or is null. Results are taken to be
  // contiguous. Runs nothing.
  std::string describe(nb::tuple gradients, const Selection *before) const;

  void plan(const TensorField &plan, const TensorField &workspace) const;
  void forward(const TensorField &out, const TensorField &lse, const TensorField &plan, const TensorField &workspace,
               int32_t splits) const;

  // These return false, with nothing done, where the workspace has no memory.

  // forward, which makes the plan and the lse itself where they are None. They are parts of its workspace, since
  // allocations are a good part of a small call's time.
  int64_t attend_bytes(bool has_lse, bool has_plan) const { return attend_sizes(has_lse, has_plan).bytes(); }
  bool attend(const TensorField &out, const TensorField &lse, const TensorField &plan, Workspace &&workspace);
  // As attend, for a call that has a backward pass. `kept` is what that needs beside the results, of kept_bytes(): the
  // plan that is made where none is given, then out_rest if the pack wants it, then an lse that is None. Backward
  // without `kept` makes do without out_rest.
  int64_t kept_bytes(bool has_lse, bool has_plan) const { return kept_bytes(has_lse, has_plan, out_rest_bytes()); }
  bool keep(const TensorField &out, const TensorField &lse, const TensorField &given_plan, const TensorField &kept,
            Workspace &&workspace);
  bool backward(const BackwardArguments &arguments, const TensorField &given_plan, const TensorField &kept,
                Workspace &&workspace);

  // Writes the attention that each key received, by the plan and the lse of forward. The pack must have a kernel for
  // it.
  void key_mass(const TensorField &mass, const TensorField &lse, const TensorField &plan,
                const TensorField &workspace) const;

  const Extents &extents() const { return extents_; }
  // The dtype of lse and of its gradient.
  int32_t lse_dtype() const { return problem_.bias.dtype == FDM_FLOAT64 ? FDM_FLOAT64 : FDM_FLOAT32; }
  bool has_narrow_values() const { return problem_.v.shape[3] != problem_.head_dim; }
  // Whether values are narrow, and kernels cannot read the rows of query, key and value as they lie.
  bool copies_rows() const;
  // Whether they can read those of a tensor of 16-bit elements.
  bool takes_rows(const TensorField &field) const;
  void use_threads(int32_t threads) { problem_.context.threads = threads; }

private:
  // The bytes that attend needs: for what others keep, and for its work.
  struct AttendSizes {
    int64_t kept, work;

    int64_t bytes() const { return padded(kept) + work; }
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
  fdm_tensor read_like(const TensorField &field, const char *name, const fdm_tensor &model,
                       const char *model_name) const;
  fdm_tensor read_lse(const TensorField &field, const char *name) const;
  // A tensor with a row for each query and some heads, of `length` elements if that is above 0.
  fdm_tensor read_listed(const TensorField &field, const char *name, DtypeSet allowed, bool may_be_per_head,
                         int64_t length) const;
  // The shape and dtype of out: query's, with the columns of value.
  fdm_tensor out_model() const;
  fdm_tensor read_out(const TensorField &field) const;
  fdm_tensor read_mass(const TensorField &field) const;
  AttendSizes attend_sizes(bool has_lse, bool has_plan) const;
  // Of out_rest, if the call keeps it.
  int64_t out_rest_bytes() const;
  int64_t kept_bytes(bool has_lse, bool has_plan, int64_t rest_bytes) const;
  // The parts of a buffer of kept_bytes(), or of a larger one, whose plan then has more room.
  Kept kept_in(fdm_buffer buffer, const TensorField &lse, const TensorField &given_plan, int64_t rest_bytes) const;
  Kept parts_of(fdm_buffer plan, const fdm_tensor &lse) const;
  fdm_backward_args read_gradients(const BackwardArguments &arguments, const Kept &kept) const;

  // Who reads a plan: other calls too, or the forward pass alone.
  enum class PlanUse { kept, forward_only };
  fdm_problem with(const Kept &kept, PlanUse use = PlanUse::kept) const;
  void run_plan(const Kept &kept, fdm_buffer workspace, PlanUse use = PlanUse::kept) const;
  void run_forward(const fdm_tensor &out, const Kept &kept, int32_t splits, fdm_buffer workspace,
                   PlanUse use = PlanUse::kept) const;

  const fdm_pack &pack_;
  fdm_problem problem_;
  Extents extents_;
  Device device_;
  bool paged_;
  bool has_bias_, has_sink_, has_index_bias_ = false;
  bool selects_; // its keys, by its bias; start and end of problem_ then have no memory, which is a part of the plan's
  fdm_selection selection_;
  fdm_mask_kind mask_kind_;
  int64_t plan_bytes_;
};

} // namespace fdm
