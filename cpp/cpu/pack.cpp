// SPDX-License-Identifier: BSD-3-Clause
// The table of the cpu pack: checks what a caller could get wrong about memory, then runs the passes.
#include "../pack_calls.h"
#include "columns.h"
#include "kernels.h"
#include "passes.h"
#include "plan.h"
#include "selection.h"

namespace fdm::cpu {
namespace {

constexpr PackLimits kLimits{256, 1u << FDM_FLOAT32 | 1u << FDM_FLOAT16 | 1u << FDM_BFLOAT16};

int64_t workspace_needed(const fdm_problem &p, int32_t pass) {
  switch (pass) {
  case FDM_PASS_PLAN:
    return plan_workspace_bytes(p);
  case FDM_PASS_FORWARD:
    return forward_workspace_bytes(p);
  default:
    return backward_workspace_bytes(p);
  }
}

// Memory that plan() has not written, zeros for one, would be divided by.
bool is_filled(const fdm_problem &p, const void *plan) {
  const int64_t rows = tile_rows(p, plan);
  return rows >= kMinTileRows && rows <= kMaxTileRows && (rows & (rows - 1)) == 0;
}

// Checks common to plan, forward and backward; then the work.
template <class Work>
int32_t run(const fdm_problem *p, int32_t pass, fdm_buffer plan, fdm_buffer workspace, const Message &message,
            const Work &work) {
  if (int32_t status = check_problem(p, kLimits, message)) return status;
  if (int32_t status = check_buffer("plan", plan, plan_bytes(*p), message)) return status;
  if (int32_t status = check_buffer("workspace", workspace, workspace_needed(*p, pass), message)) return status;
  if (pass != FDM_PASS_PLAN && !is_filled(*p, plan.data))
    return message.fail(FDM_INVALID_ARGUMENT, "the plan was not filled by plan()");
  return run_guarded(message, [&] {
    work();
    return FDM_OK;
  });
}

int32_t workspace_bytes(const fdm_problem *p, int32_t pass, int64_t *bytes, char *text, size_t text_bytes) {
  const Message message{text, text_bytes};
  if (int32_t status = check_problem(p, kLimits, message)) return status;
  *bytes = workspace_needed(*p, pass);
  return FDM_OK;
}

int32_t plan(const fdm_problem *p, fdm_buffer plan, fdm_buffer workspace, char *text, size_t text_bytes) {
  return run(p, FDM_PASS_PLAN, plan, workspace, {text, text_bytes}, [&] { make_plan(*p, plan.data, workspace.data); });
}

int32_t forward(const fdm_problem *p, const fdm_forward_args *args, fdm_buffer plan, fdm_buffer workspace, char *text,
                size_t text_bytes) {
  const Message message{text, text_bytes};
  if (int32_t status = check_args(args, "fdm_forward_args", message)) return status;
  return run(p, FDM_PASS_FORWARD, plan, workspace, message,
             [&] { forward_pass(*p, *args, plan.data, workspace.data); });
}

int32_t backward(const fdm_problem *p, const fdm_backward_args *args, fdm_buffer plan, fdm_buffer workspace, char *text,
                 size_t text_bytes) {
  const Message message{text, text_bytes};
  if (int32_t status = check_args(args, "fdm_backward_args", message)) return status;
  if (int32_t status = check_problem(p, kLimits, message)) return status; // before p is read
  if (present(p->block_table)) return message.fail(FDM_UNSUPPORTED, "paged keys have no backward pass");
  return run(p, FDM_PASS_BACKWARD, plan, workspace, message,
             [&] { backward_pass(*p, *args, plan.data, workspace.data); });
}

int32_t select_workspace(const fdm_selection *s, int64_t *bytes, char *text, size_t text_bytes) {
  const Message message{text, text_bytes};
  if (int32_t status = check_selection(s, message)) return status;
  *bytes = selection_workspace_bytes(*s);
  return FDM_OK;
}

int32_t select(const fdm_selection *s, fdm_buffer workspace, char *text, size_t text_bytes) {
  const Message message{text, text_bytes};
  if (int32_t status = check_selection(s, message)) return status;
  if (int32_t status = check_buffer("workspace", workspace, selection_workspace_bytes(*s), message)) return status;
  return run_guarded(message, [&] {
    select_keys(*s, workspace.data);
    return FDM_OK;
  });
}

#if defined(__clang__)
constexpr char kCompiler[] = "clang " __clang_version__;
#else
constexpr char kCompiler[] = "gcc " __VERSION__;
#endif

fdm_pack make_table() {
  fdm_pack table{};
  table.abi_version = FDM_PACK_ABI_VERSION;
  table.struct_size = sizeof(fdm_pack);
  table.name = "cpu";
  table.version = FDM_VERSION;
  table.compiler = kCompiler;
  table.features = best_kernels().name;
  table.device_type = FDM_CPU;
  table.max_head_dim = kLimits.max_head_dim;
  table.dtypes = kLimits.dtypes;
  for (int kind = 0; kind < FDM_MASK_KIND_COUNT; ++kind) table.plan_layouts[kind] = plan_layout(fdm_mask_kind(kind));
  table.workspace_bytes = workspace_bytes;
  table.plan = plan;
  table.forward = forward;
  table.backward = backward;
  table.selection_workspace_bytes = select_workspace;
  table.select = select;
  return table;
}

} // namespace
} // namespace fdm::cpu

extern "C" __attribute__((visibility("default"))) const fdm_pack *flash_dmattn_pack(void) {
  static const fdm_pack table = fdm::cpu::make_table();
  return &table;
}
