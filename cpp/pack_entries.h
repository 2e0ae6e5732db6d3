// SPDX-License-Identifier: BSD-3-Clause
// The entry points that every pack shares: the checks of pack_calls.h, then the pack's own work.
//
// A Pack has these static members:
//   kLimits, kKeyMassBiases, kKeyLists, kPlansBlocks           limits and capabilities
//   plan_layout(kind), plan_bytes(p), plan_workspace_bytes(p), forward_workspace_bytes(p), backward_workspace_bytes(p),
//   key_mass_workspace_bytes(p), selection_workspace_bytes(s), forget_workspace_bytes(f)
//   is_filled(p, plan)                                         whether forward and backward may read this plan
//   describe(p, s, forward, backward)                          JSON that describes the passes with non-null arguments
//   run(context, message, work)                                runs `work` on the pack's device and returns a status
//   block_plan_bytes(p, blocks), plan_blocks(p, blocks, plan)  with kPlansBlocks
//   plan(p, plan, workspace), forward(p, args, plan, workspace), backward(p, args, plan, workspace),
//   key_mass(p, args, plan, workspace),
//   select(s, workspace), select_and_plan(s, p, plan, workspace), forget(f, workspace), forget_backward(f, workspace)
//                                                              the work; `run` interprets the result
#pragma once

#include <string>

#include "pack_calls.h"

namespace fdm {

template <class Pack> struct PackEntries {
  static int32_t workspace_bytes(const fdm_problem *p, int32_t pass, int64_t *bytes, char *text, size_t text_bytes) {
    if (int32_t status = check_problem(p, Pack::kLimits, {text, text_bytes})) return status;
    *bytes = workspace_needed(*p, pass);
    return FDM_OK;
  }

  static int32_t plan_bytes(const fdm_problem *p, int64_t *bytes, char *text, size_t text_bytes) {
    if (int32_t status = check_problem(p, Pack::kLimits, {text, text_bytes})) return status;
    *bytes = Pack::plan_bytes(*p);
    return FDM_OK;
  }

  static int32_t plan(const fdm_problem *p, fdm_buffer plan, fdm_buffer workspace, char *text, size_t text_bytes) {
    const Message message{text, text_bytes};
    if (int32_t status = check(p, FDM_PASS_PLAN, plan, workspace, message)) return status;
    return Pack::run(p->context, message, [&] { return Pack::plan(*p, plan.data, workspace.data); });
  }

  static int32_t block_plan_bytes(const fdm_problem *p, const fdm_mask_blocks *blocks, int64_t *bytes, char *text,
                                  size_t text_bytes) {
    const Message message{text, text_bytes};
    if (int32_t status = check_problem(p, Pack::kLimits, message)) return status;
    if (int32_t status = check_blocks(*p, blocks, message)) return status;
    *bytes = Pack::block_plan_bytes(*p, *blocks);
    return FDM_OK;
  }

  static int32_t plan_blocks(const fdm_problem *p, const fdm_mask_blocks *blocks, fdm_buffer plan, char *text,
                             size_t text_bytes) {
    const Message message{text, text_bytes};
    int64_t needed = 0;
    if (int32_t status = block_plan_bytes(p, blocks, &needed, text, text_bytes)) return status;
    if (int32_t status = check_buffer("plan", plan, needed, message)) return status;
    return Pack::run(p->context, message, [&] { return Pack::plan_blocks(*p, *blocks, plan.data); });
  }

  static int32_t forward(const fdm_problem *p, const fdm_forward_args *args, fdm_buffer plan, fdm_buffer workspace,
                         char *text, size_t text_bytes) {
    const Message message{text, text_bytes};
    if (int32_t status = check_args(args, "fdm_forward_args", message)) return status;
    if (int32_t status = check(p, FDM_PASS_FORWARD, plan, workspace, message)) return status;
    return Pack::run(p->context, message, [&] { return Pack::forward(*p, *args, plan.data, workspace.data); });
  }

  static int32_t backward(const fdm_problem *p, const fdm_backward_args *args, fdm_buffer plan, fdm_buffer workspace,
                          char *text, size_t text_bytes) {
    const Message message{text, text_bytes};
    if (int32_t status = check_args(args, "fdm_backward_args", message)) return status;
    if (int32_t status = check_rows(args->out, "out", Pack::kLimits, message)) return status;
    if (int32_t status = check_rows(args->dout, "dout", Pack::kLimits, message)) return status;
    if (int32_t status = check(p, FDM_PASS_BACKWARD, plan, workspace, message)) return status;
    return Pack::run(p->context, message, [&] { return Pack::backward(*p, *args, plan.data, workspace.data); });
  }

  static int32_t key_mass(const fdm_problem *p, const fdm_key_mass_args *args, fdm_buffer plan, fdm_buffer workspace,
                          char *text, size_t text_bytes) {
    const Message message{text, text_bytes};
    if (int32_t status = check_args(args, "fdm_key_mass_args", message)) return status;
    if (int32_t status = check(p, FDM_PASS_KEY_MASS, plan, workspace, message)) return status;
    return Pack::run(p->context, message, [&] { return Pack::key_mass(*p, *args, plan.data, workspace.data); });
  }

  static int32_t selection_workspace_bytes(const fdm_selection *s, int64_t *bytes, char *text, size_t text_bytes) {
    if (int32_t status = check_selection(s, {text, text_bytes})) return status;
    *bytes = Pack::selection_workspace_bytes(*s);
    return FDM_OK;
  }

  static int32_t select(const fdm_selection *s, fdm_buffer workspace, char *text, size_t text_bytes) {
    const Message message{text, text_bytes};
    if (int32_t status = check_selection(s, message)) return status;
    const int64_t needed = Pack::selection_workspace_bytes(*s);
    if (int32_t status = check_buffer("workspace", workspace, needed, message)) return status;
    return Pack::run(s->context, message, [&] { return Pack::select(*s, workspace.data); });
  }

  static int32_t select_and_plan(const fdm_selection *s, const fdm_problem *p, fdm_buffer plan, fdm_buffer workspace,
                                 char *text, size_t text_bytes) {
    const Message message{text, text_bytes};
    if (int32_t status = check_selection(s, message)) return status;
    if (int32_t status = check(p, FDM_PASS_PLAN, plan, workspace, message)) return status;
    const int64_t needed = Pack::selection_workspace_bytes(*s);
    if (int32_t status = check_buffer("workspace", workspace, needed, message)) return status;
    return Pack::run(s->context, message, [&] { return Pack::select_and_plan(*s, *p, plan.data, workspace.data); });
  }

  static int32_t forget_workspace_bytes(const fdm_forgetting *f, int64_t *bytes, char *text, size_t text_bytes) {
    if (int32_t status = check_forgetting(f, {text, text_bytes})) return status;
    *bytes = Pack::forget_workspace_bytes(*f);
    return FDM_OK;
  }

  static int32_t forget(const fdm_forgetting *f, fdm_buffer workspace, char *text, size_t text_bytes) {
    return run_forgetting(f, workspace, {text, text_bytes}, [&] { return Pack::forget(*f, workspace.data); });
  }

  static int32_t forget_backward(const fdm_forgetting *f, fdm_buffer workspace, char *text, size_t text_bytes) {
    return run_forgetting(f, workspace, {text, text_bytes}, [&] { return Pack::forget_backward(*f, workspace.data); });
  }

  static int32_t describe(const fdm_problem *p, const fdm_selection *s, const fdm_forward_args *forward,
                          const fdm_backward_args *backward, char *text, size_t text_bytes, char *words,
                          size_t word_bytes) {
    const Message message{words, word_bytes};
    if (int32_t status = check_problem(p, Pack::kLimits, message)) return status;
    return run_guarded(message, [&] {
      const std::string json = Pack::describe(*p, s, forward, backward);
      if (text && std::snprintf(text, text_bytes, "%s", json.c_str()) < int64_t(text_bytes)) return int32_t(FDM_OK);
      return message.fail(FDM_BUFFER_TOO_SMALL, "the description has %zu characters", json.size());
    });
  }

  // Returns a table with the entry points, the limits and the plan layouts. The pack adds its name and its device.
  static fdm_pack table() {
    fdm_pack table{};
    table.abi_version = FDM_PACK_ABI_VERSION;
    table.struct_size = sizeof(fdm_pack);
    table.version = FDM_VERSION;
    table.max_head_dim = Pack::kLimits.max_head_dim;
    table.dtypes = Pack::kLimits.dtypes;
    table.key_bias_dtypes = Pack::kLimits.key_bias_dtypes;
    for (int kind = 0; kind < FDM_MASK_KIND_COUNT; ++kind)
      table.plan_layouts[kind] = Pack::plan_layout(fdm_mask_kind(kind));
    table.workspace_bytes = workspace_bytes;
    table.plan = plan;
    table.forward = forward;
    table.backward = backward;
    table.selection_workspace_bytes = selection_workspace_bytes;
    table.select = select;
    table.select_and_plan = select_and_plan;
    table.plan_bytes = plan_bytes;
    table.describe = describe;
    table.key_mass = key_mass;
    table.key_mass_biases = Pack::kKeyMassBiases;
    table.lists_keys = Pack::kKeyLists;
    if constexpr (Pack::kPlansBlocks) {
      table.block_plan_bytes = block_plan_bytes;
      table.plan_blocks = plan_blocks;
    }
    table.row_bytes = Pack::kLimits.row_bytes;
    table.narrow_head_dim = Pack::kLimits.narrow_head_dim;
    table.narrow_value_dim = Pack::kLimits.narrow_value_dim;
    table.forget_workspace_bytes = forget_workspace_bytes;
    table.forget = forget;
    table.forget_backward = forget_backward;
    return table;
  }

private:
  template <class Work>
  static int32_t run_forgetting(const fdm_forgetting *f, fdm_buffer workspace, const Message &message,
                                const Work &work) {
    if (int32_t status = check_forgetting(f, message)) return status;
    const int64_t needed = Pack::forget_workspace_bytes(*f);
    if (int32_t status = check_buffer("workspace", workspace, needed, message)) return status;
    return Pack::run(f->context, message, work);
  }

  static int64_t workspace_needed(const fdm_problem &p, int32_t pass) {
    switch (pass) {
    case FDM_PASS_PLAN:
      return Pack::plan_workspace_bytes(p);
    case FDM_PASS_FORWARD:
      return Pack::forward_workspace_bytes(p);
    case FDM_PASS_KEY_MASS:
      return Pack::key_mass_workspace_bytes(p);
    default:
      return Pack::backward_workspace_bytes(p);
    }
  }

  static int32_t check_pass(const fdm_problem &p, int32_t pass, const Message &message) {
    if (present(p.block_table) && pass == FDM_PASS_BACKWARD)
      return message.fail(FDM_UNSUPPORTED, "paged keys have no backward pass");
    if (present(p.block_table) && pass == FDM_PASS_KEY_MASS)
      return message.fail(FDM_UNSUPPORTED, "paged keys have no key mass");
    if (pass == FDM_PASS_KEY_MASS && Pack::kKeyMassBiases != FDM_KEY_MASS_ALL && has_query_rows(p.bias))
      return message.fail(FDM_UNSUPPORTED, "no kernel computes the key mass with a bias for each query");
    if (pass != FDM_PASS_PLAN && !(pass == FDM_PASS_FORWARD && forward_takes_any_rows(p)))
      if (int32_t status = check_input_rows(p, Pack::kLimits, message)) return status;
    if (has_mask_blocks(p)) {
      if (!Pack::kPlansBlocks || pass == FDM_PASS_PLAN)
        return message.fail(FDM_INVALID_ARGUMENT, "plan_blocks makes the plan of a mask of blocks, if the pack has it");
      if (int32_t status = check_block_mask(p, message)) return status;
    }
    if (!has_key_lists(p)) return FDM_OK;
    if (Pack::kKeyLists == FDM_LISTS_NONE)
      return message.fail(FDM_UNSUPPORTED, "no kernel of this pack reads lists of keys");
    if (pass != FDM_PASS_FORWARD && pass != FDM_PASS_BACKWARD)
      return message.fail(FDM_UNSUPPORTED, "of calls that list keys there are a forward and a backward pass only");
    if (Pack::kKeyLists != FDM_LISTS_IN_ORDER && pass == FDM_PASS_BACKWARD && p.flags & FDM_DETERMINISTIC)
      return message.fail(FDM_UNSUPPORTED, "the backward pass of calls that list keys adds in any order");
    if (mask_kind(p) == FDM_MASK_NONE && !has_query_rows(p.bias)) return FDM_OK;
    return message.fail(FDM_INVALID_ARGUMENT,
                        "queries that list keys have no mask and no bias with a row for each query");
  }

  static int32_t check(const fdm_problem *p, int32_t pass, fdm_buffer plan, fdm_buffer workspace,
                       const Message &message) {
    if (int32_t status = check_problem(p, Pack::kLimits, message)) return status;
    if (int32_t status = check_pass(*p, pass, message)) return status;
    if (int32_t status = check_buffer("plan", plan, Pack::plan_bytes(*p), message)) return status;
    if (int32_t status = check_buffer("workspace", workspace, workspace_needed(*p, pass), message)) return status;
    if (pass == FDM_PASS_PLAN || Pack::is_filled(*p, plan.data)) return FDM_OK;
    return message.fail(FDM_INVALID_ARGUMENT, "the plan was not filled by plan()");
  }
};

} // namespace fdm
