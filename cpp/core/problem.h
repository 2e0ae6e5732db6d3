// SPDX-License-Identifier: BSD-3-Clause
//
// A validated attention problem, and the pack calls for it.
#pragma once

#include "broadcast.h"
#include "library.h"
#include "record.h"
#include "varlen.h"
#include "window.h"

namespace fdm {

class Selection;

// The requested gradients of a call, named by the fields of AttentionRecord, and that of Problem::set_key_lists. None:
// not requested.
struct Gradients {
  TensorField query, key, value, bias, sink;
  TensorField index_bias;

  template <class Visit> void for_each_field(Visit &&visit) {
    visit("query", query);
    visit("key", key);
    visit("value", value);
    visit("bias", bias);
    visit("sink", sink);
  }
};

// Raises ValueError for a name without a gradient.
Gradients read_gradients(nb::dict by_name);

struct BackwardArguments {
  TensorField dout, dlse, out, lse;
  Gradients gradients;
};

// The data that a forward pass keeps for the backward pass besides its output.
struct Kept {
  fdm_tensor start, end; // of the mask, or of the call's own selection
  fdm_buffer plan;       // plan of the pack
  fdm_tensor lse;
  fdm_tensor out_rest; // absent if the backward pass does not need it
};

// Holds addresses into its source tensors but no references: the caller keeps them alive.
class Problem {
public:
  Problem(const fdm_pack &pack, const AttentionRecord &record, const Execution &execution);

  // Sets per-query key lists; index_bias may be None. The pack must have kernels for them.
  void set_key_lists(const TensorField &indices, const TensorField &index_bias);

  // Makes this a problem of a mask of blocks for plan(). The pack must have plans of blocks. See fdm_mask_blocks.
  void set_mask_blocks(const TensorField &numbers, const TensorField &contents, int64_t kept, int64_t partial);

  int64_t plan_bytes() const { return plan_bytes_; }
  // The same, or 0 if the pack needs no plan for this call. Traced calls lack the facts for this query.
  int64_t needed_plan_bytes() const;
  int64_t workspace_bytes(fdm_pass pass) const;
  // The JSON text of fdm_pack.describe for a call, with a backward pass for the gradients of the named fields, if
  // any. `mask_selection` is the selection that makes the boolean mask, or null. Results are assumed contiguous. Runs
  // nothing.
  std::string describe(nb::tuple gradients, const Selection *mask_selection) const;

  void plan(const TensorField &plan, const TensorField &workspace) const;
  void forward(const TensorField &out, const TensorField &lse, const TensorField &plan, const TensorField &workspace,
               int32_t splits) const;

  // The methods below return false without effect if the workspace allocation fails.

  // Runs forward. If plan or lse is None, it is made in the workspace, because allocations take much of the time of a
  // small call.
  int64_t attend_bytes(bool has_lse, bool has_plan) const { return attend_sizes(has_lse, has_plan).bytes(); }
  bool attend(const TensorField &out, const TensorField &lse, const TensorField &plan, Workspace &&workspace);
  // As attend, for a call with a backward pass. `kept`, of kept_bytes(), holds the data for that pass besides the
  // results: the plan if none is given, then out_rest if the pack needs it, then the lse if that is None. Backward
  // without `kept` runs without out_rest.
  int64_t kept_bytes(bool has_lse, bool has_plan) const { return kept_bytes(has_lse, has_plan, out_rest_bytes()); }
  bool keep(const TensorField &out, const TensorField &lse, const TensorField &given_plan, const TensorField &kept,
            Workspace &&workspace);
  bool backward(const BackwardArguments &arguments, const TensorField &given_plan, const TensorField &kept,
                Workspace &&workspace);

  // Computes the key mass from the plan and the lse of forward. The pack must have a kernel for it.
  void key_mass(const TensorField &mass, const TensorField &lse, const TensorField &plan,
                const TensorField &workspace) const;

  const Extents &extents() const { return extents_; }
  // The dtype of lse and dlse.
  int32_t lse_dtype() const { return problem_.bias.dtype == FDM_FLOAT64 ? FDM_FLOAT64 : FDM_FLOAT32; }
  bool has_narrow_values() const { return problem_.v.shape[3] != problem_.head_dim; }
  // Whether kernels cannot read the rows of query, key or value (fdm_pack.row_bytes): those of the forward pass, or
  // with `for_backward` those of any pass.
  bool needs_row_copies(bool for_backward) const;
  // Whether all kernels can read the rows of this tensor, which has query's dtype.
  bool can_read_rows(const TensorField &field, const char *name) const;
  void set_threads(int32_t threads) { problem_.context.threads = threads; }

private:
  // The bytes of the workspace of attend: for otherwise kept data, and for its work.
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
  void set_plan_bytes();

  // A tensor with the shape and dtype of query, key or value.
  fdm_tensor read_like(const TensorField &field, const char *name, const fdm_tensor &prototype,
                       const char *prototype_name) const;
  fdm_tensor read_lse(const TensorField &field, const char *name) const;
  // A tensor with a row for each query, some heads, and `length` elements per row if that is above 0.
  fdm_tensor read_key_list_tensor(const TensorField &field, const char *name, DtypeSet allowed, bool may_be_per_head,
                                  int64_t length) const;
  // The shape and dtype of out: those of query, with the columns of value.
  fdm_tensor out_prototype() const;
  fdm_tensor read_out(const TensorField &field) const;
  fdm_tensor read_mass(const TensorField &field) const;
  AttendSizes attend_sizes(bool has_lse, bool has_plan) const;
  // The bytes of out_rest; 0 if the call does not keep it.
  int64_t out_rest_bytes() const;
  int64_t kept_bytes(bool has_lse, bool has_plan, int64_t rest_bytes) const;
  // The parts of a buffer of kept_bytes(). In a larger buffer the plan has more room.
  Kept split_kept_buffer(fdm_buffer buffer, const TensorField &lse, const TensorField &given_plan,
                         int64_t rest_bytes) const;
  Kept split_plan_buffer(fdm_buffer plan, const fdm_tensor &lse) const;
  fdm_backward_args read_gradients(const BackwardArguments &arguments, const Kept &kept) const;

  // The readers of a plan: other calls too, or only the forward pass.
  enum class PlanUse { kept, forward_only };
  fdm_problem problem_with(const Kept &kept, PlanUse use = PlanUse::kept) const;
  void run_plan(const Kept &kept, fdm_buffer workspace, PlanUse use = PlanUse::kept) const;
  void run_forward(const fdm_tensor &out, const Kept &kept, int32_t splits, fdm_buffer workspace,
                   PlanUse use = PlanUse::kept) const;

  const fdm_pack &pack_;
  fdm_problem problem_;
  Extents extents_;
  Device device_;
  bool is_paged_;
  bool has_bias_, has_sink_, has_index_bias_ = false;
  // The call selects keys by its bias. start and end of problem_ then have no memory; a part of the plan buffer holds
  // them.
  bool has_selection_;
  fdm_selection selection_;
  fdm_mask_blocks mask_blocks_{}; // of set_mask_blocks(); before, struct_size is 0
  fdm_mask_kind mask_kind_;
  int64_t plan_bytes_;
};

} // namespace fdm
